"""Checkpoints as people leave them are read as transformers reads them: heads, files, dtypes, ends."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from server.models.load import read_model_info
from server.models.no_cache import NoCacheAttention
from tests.models.random_models import load_decoder, save_random_model

WHOLE = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def change(file: Path, **values: Any) -> None:
    """Change members of the JSON object in a file; make the file if there is none."""
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | values))


def save(tensors: dict[str, Tensor], file: Path) -> None:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def assert_like_transformers(directory: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    ours, ids = load_decoder(directory), torch.randint(2, 300, (40,))
    attention = NoCacheAttention(ours.layer_specs, len(ids), ours.device)
    attention.logit_index = attention.positions
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
        torch.testing.assert_close(ours.forward(ids, attention), expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- heads
@pytest.mark.parametrize("name", ["qwen2_tied", "llama_tied_biased", "gemma2", "gemma3"])
def test_a_head_of_its_own_counts_although_the_config_ties_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random_model(name, tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    save(tensors | {HEAD: tensors[EMBEDDING]}, tmp_path / WHOLE)
    assert_like_transformers(tmp_path)
    assert "config.json ties them" not in caplog.text
    save(tensors | {HEAD: torch.randn_like(tensors[EMBEDDING])}, tmp_path / WHOLE)
    assert_like_transformers(tmp_path)
    assert "config.json ties them" in caplog.text


@pytest.mark.parametrize("name", ["llama", "qwen2_tied"])
def test_names_of_a_base_model(name: str, tmp_path: Path) -> None:
    save_random_model(name, tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    save({key.removeprefix("model."): tensor for key, tensor in tensors.items()}, tmp_path / WHOLE)
    assert_like_transformers(tmp_path)


# ---------------------------------------------------------------- files
@pytest.mark.parametrize("is_there", [True, False])
def test_the_whole_file_counts_beside_an_index_of_others(is_there: bool, tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    old = "model-00001-of-00001.safetensors"
    if is_there:
        save({key: torch.zeros_like(tensor) for key, tensor in tensors.items()}, tmp_path / old)
    (tmp_path / f"{WHOLE}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, old)}))
    assert_like_transformers(tmp_path)


def test_weights_of_float64(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    save({key: tensor.double() for key, tensor in load_file(tmp_path / WHOLE).items()}, tmp_path / WHOLE)
    assert_like_transformers(tmp_path)


@pytest.mark.parametrize("written", ["auto", "float64", None, "float99"])
def test_a_dtype_that_says_nothing_is_that_of_the_file(written: str | None, tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    save({key: tensor.bfloat16() for key, tensor in load_file(tmp_path / WHOLE).items()}, tmp_path / WHOLE)
    change(tmp_path / "config.json", dtype=None, torch_dtype=written)
    assert read_model_info(tmp_path, "auto").dtype == "bfloat16"
    change(tmp_path / "config.json", torch_dtype="torch.float16")
    assert read_model_info(tmp_path, "auto").dtype == "float16"


def test_a_window_of_no_tokens_is_none(tmp_path: Path) -> None:
    save_random_model("mistral", tmp_path)
    change(tmp_path / "config.json", sliding_window=0)
    assert {layer.window for layer in load_decoder(tmp_path).layer_specs} == {None}


# ---------------------------------------------------------------- ends
END = {"content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize("written", ["<|im_end|>", END])
@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
def test_the_end_of_the_tokenizer_is_one(written: Any, place: str, tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    change(tmp_path / "tokenizer_config.json", eos_token=written)
    if place == "tokenizer_config.json":
        change(tmp_path / place, added_tokens_decoder={"7": END})
    else:
        added = json.loads((tmp_path / place).read_text())["added_tokens"]
        change(tmp_path / place, added_tokens=[*added, END | {"id": 7, "single_word": False}])
    assert read_model_info(tmp_path, "auto").eos_ids == {1, 7}
    change(tmp_path / "generation_config.json", eos_token_id=None)  # says nothing
    assert read_model_info(tmp_path, "auto").eos_ids == {1, 7}
    change(tmp_path / "generation_config.json", eos_token_id=[3])
    assert read_model_info(tmp_path, "auto").eos_ids == {3, 7}


@pytest.mark.parametrize("end", ["<none>", 5, None, {"content": 7}])
def test_an_end_that_the_tokenizer_does_not_have_is_none(end: Any, tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    change(tmp_path / "tokenizer_config.json", eos_token=end)
    assert read_model_info(tmp_path, "auto").eos_ids == {1}


def draw_ends(rng: random.Random, directory: Path) -> None:
    """Change a model's files so that they name its ends in ways that fine-tunes and conversions are known for."""
    valid = [1, [1], [1, 5], [5], 3, [5, 3]]
    config = rng.choice([{}, {"eos_token_id": None}, *({"eos_token_id": ids} for ids in valid)])
    generation = rng.choice([None, {}, {"eos_token_id": None}, *({"eos_token_id": ids} for ids in valid)])
    written = json.loads((directory / "config.json").read_text())
    written.pop("eos_token_id", None)
    (directory / "config.json").write_text(json.dumps(written | config))
    (directory / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        change(directory / "generation_config.json", **generation)
    ids = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True)
    end = END | {"content": rng.choice(sorted(ids))}
    tokens: dict[str, Any] = rng.choice(
        [{}, {"eos_token": None}, {"eos_token": end["content"]}, {"eos_token": end | {"__type": "AddedToken"}}]
    )
    if rng.random() < 0.7:
        tokens |= {"added_tokens_decoder": {str(ids[end["content"]]): end}}
    (directory / "tokenizer_config.json").unlink(missing_ok=True)
    change(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **tokens)


def test_drawn_ends_are_those_of_transformers(tmp_path: Path, rng: random.Random) -> None:
    """Of the model's or generation's configuration, as `generate` takes them, and the tokenizer's own."""
    save_random_model("llama", tmp_path)
    for _ in range(20):
        draw_ends(rng, tmp_path)
        generation = tmp_path / "generation_config.json"
        ids = GenerationConfig.from_pretrained(tmp_path).eos_token_id if generation.exists() else None
        ids = json.loads((tmp_path / "config.json").read_text()).get("eos_token_id") if ids is None else ids
        expected = {*(ids if isinstance(ids, list) else [] if ids is None else [ids])}
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        if (
            tokenizer.eos_token in tokenizer.get_vocab()
            and tokenizer.eos_token_id < read_model_info(tmp_path, "auto").vocab_size
        ):
            expected.add(tokenizer.eos_token_id)
        assert read_model_info(tmp_path, "auto").eos_ids == expected, {
            file.name: file.read_text() for file in tmp_path.glob("*config.json")
        }
