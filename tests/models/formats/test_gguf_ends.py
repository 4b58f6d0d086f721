"""The texts of a GGUF file's model end where they end in llama.cpp, but for what TEXTS says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from server.models.files.directory import locate
from server.models.files.end_tokens import read_eos_ids
from tests.models.gguf_files import gguf_model, write_gguf
from tests.models.llama_cpp_ends import find_ends

TYPES = NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # GGUF's types of tokens
NAMES = [
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "[e~["),
    *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
]
IN_THE_MIDDLE = {  # by the role of a token among files that a prompt joins: its names
    "fim_pad": ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    "fim_rep": ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    "fim_sep": ["<|file_sep|>"],
}
# Names that end texts if they are control tokens. llama.cpp does not look at the type: with it, HTML's </s> ends texts.
TEXTS = ["</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<PAD>", "[PAD]", "<REPO>", "<reponame>"]
OTHERS = [
    *("<|im_start|>", "<|eot|>", "<|im_end|", "im_end", "<|End|>", "<|END|>", "<|end_of_turn|>", "<end_of_text>"),
    *("</S>", "[eos]", "<eot>", "EOT", "<|eos|>", " <|eot_id|>", "<|fim_prefix|>", "<fim_suffix>", "<pad>", "<think>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|turn>", "<tool_response>", "<unused7>", "</s", "/s>"),
]
DEFAULTS = {"gpt2": 11, "llama": 2}  # llama.cpp's eos_token_id of files without one: 11 is a comma in most vocabularies
SIZE = 48


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return gguf_model("llama", vocab_size=SIZE)


def draw_tokenizer(rng: random.Random) -> dict[str, Any]:
    """Return the metadata of a tokenizer with names of ends and names that look like them, as any type of token."""
    roles = [role for role in IN_THE_MIDDLE if rng.random() < 0.5]
    keys = {role for role in roles if rng.random() < 0.5}  # llama.cpp looks for the names of the other roles
    keys |= {role for role in ("bos", "eos", "eot", "eom") if rng.random() < 0.4}
    names = {*rng.sample(NAMES, rng.randrange(6)), *rng.sample(OTHERS, rng.randrange(6))}
    names |= {rng.choice(IN_THE_MIDDLE[role]) for role in roles if role not in keys}
    if rng.random() < 0.4:  # what gpt-oss, Solar and Gemma 4 have, or a part of it
        names |= {"<|end|>", *rng.sample(["<|return|>", "<|call|>", "<|calls|>", "<|flush|>"], 2)}
        names |= {"</s>", *rng.sample(["<|tool_response>"], rng.randrange(2))}
    plain = ["b", "c", "bc", *(f"{number:02}" for number in range(SIZE))][: SIZE - 1 - len(names)]
    types = {name: rng.choice([CONTROL, rng.choice(TYPES)]) for name in sorted(names)}
    tokens = [*types, *plain]
    rng.shuffle(tokens)
    tokens.insert(DEFAULTS["gpt2"], "a")
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "merges": ["b c"],
        "tokens": tokens,
        "token_type": [types.get(token, NORMAL) for token in tokens] if rng.random() < 0.9 else None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if rng.random() < 0.5:
        metadata |= {"model": "llama", "merges": None, "pre": None, "scores": [-float(id) for id in range(SIZE)]}
    for role in sorted(keys):
        id = rng.choice([rng.randrange(SIZE), tokens.index(rng.choice([*types, "a"])), SIZE, 2**32 - 1])
        metadata[f"{role}_token_id"] = id
    return metadata


def adapt(ends: set[int], metadata: dict[str, Any]) -> set[int]:
    """Return the ends of llama.cpp without those that are ordinary text, and with all that the file names."""
    kinds = metadata["token_type"] or [NORMAL] * SIZE
    texts = {id for id, token in enumerate(metadata["tokens"]) if token in TEXTS and kinds[id] != CONTROL}
    ids = [metadata.get(f"{role}_token_id") for role in ("eos", "eot", "eom", *IN_THE_MIDDLE)]
    named = {id for id in ids if id is not None and id < SIZE}
    if ids[0] not in named:
        (texts if metadata["model"] == "gpt2" else named).add(DEFAULTS[metadata["model"]])
    return ends - texts | named


def test_drawn_tokenizers_end_texts_as_llama_cpp_does(
    tmp_path: Path, model: PreTrainedModel, rng: random.Random
) -> None:
    drawn = [draw_tokenizer(rng) for _ in range(20)]
    files = []
    for number, metadata in enumerate(drawn):
        keys = {f"tokenizer__ggml__{key}": value for key, value in metadata.items()}
        files.append(write_gguf(model, tmp_path / f"{number}.gguf", **keys))
    for file, metadata, ends in zip(files, drawn, find_ends(files), strict=True):
        assert read_eos_ids(locate(str(file)), SIZE) == adapt(ends, metadata), metadata
