"""A tokenizer that went through a GGUF file gives the ids that it gave before."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from config.errors import SettingsError
from server.grammar.constraint import constrain_to_schema
from server.grammar.lark import write_lark
from server.grammar.matcher import TokenTable, compile_grammar
from server.models.formats.gguf_file import read_header
from server.text.encoder import Encoder
from server.text.gguf_tokenizer import PRE_TOKENIZERS, SPACE, make_tokenizer
from tests.models.gguf_files import add_byte_level, write_to

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog's dream isn't over in 1999 or 2024.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "def f(x):\n    return x ** 2 + 17\n\n\nprint(f(1234567))\n",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
] * 3
TEXTS = [
    "",
    "The dog jumps.",
    " two  spaces   and\ttabs \n\n end ",
    "I'm, you'LL, we've; don't 12345 a1b22c333 3.1415",
    "<|user|>Hi the <tool>re<|end|> the end",
    "naïve e\u0301tude 日本語 🙂 Straße\u00a0x",
    "    if x:\r\n\treturn (a/b)//c\n",
]


def through_gguf(file: Path, write: Any, architecture: str = "llama") -> tuple[Tokenizer, dict[str, Any]]:
    writer = gguf.GGUFWriter(file, architecture)
    write(writer)
    return make_tokenizer(read_header(write_to(writer, file)).metadata)


def gpt2_style(pre: pre_tokenizers.PreTokenizer, *, nfc: bool = False) -> Tokenizer:
    """A byte-level tokenizer as Hugging Face models have it, trained a little."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|user|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


PRE = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@pytest.mark.parametrize("name", PRE)
def test_byte_pairs_give_the_same_ids(name: str, tmp_path: Path) -> None:
    theirs = gpt2_style(PRE[name])
    ours, config = through_gguf(tmp_path / "a.gguf", lambda writer: add_byte_level(writer, theirs, name))
    for text in [*TEXTS, *CORPUS]:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids
        for special in (True, False):
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<s>", "</s>", False)


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "dbrx"])
def test_text_is_split_as_transformers_splits_it(name: str, tmp_path: Path) -> None:
    theirs_module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    regex = theirs_module.GGUF_PRE_TOKENIZER_SPLITS[name]
    pre = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    theirs = gpt2_style(pre, nfc=name == "qwen2")
    ours, _ = through_gguf(tmp_path / "a.gguf", lambda writer: add_byte_level(writer, theirs, name))
    assert ours.pre_tokenizer is not None
    for text in [*TEXTS, *CORPUS]:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == pre.pre_tokenize_str(text)
        begins = [0] if PRE_TOKENIZERS[name].bos else []
        assert ours.encode(text).ids[len(begins) :] == theirs.encode(text).ids
        assert ours.encode(text).ids[: len(begins)] == begins
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text).ids


# ---------------------------------------------------------------- SentencePiece
def sentence_piece(writer: gguf.GGUFWriter, *, prefix: bool = True) -> tuple[list[str], list[float]]:
    """Writes a small vocabulary; scores are those of merges, best first, as SentencePiece counts them."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=lambda piece: trained.get_vocab()[piece])
    first = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "<tool>"]
    types = [2, 3, 3, *[6] * 256, 4] + [1] * len(pieces)
    scores = [0.0] * len(first) + [-float(i) for i in range(len(pieces))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*first, *pieces])
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if not prefix:
        writer.add_add_space_prefix(False)
    return [*first, *pieces], scores


def merged(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """llama.cpp's way: of all neighbours that make a token together, the best are joined, the leftmost first."""
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list(text.replace(" ", SPACE))
    while True:
        joined = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joined:
            break
        _, i = min(joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found = [[ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()] for p in parts]
    return [i for part in found for i in part]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_gives_the_ids_of_its_scores(prefix: bool, tmp_path: Path) -> None:
    seen: list[tuple[list[str], list[float]]] = []
    ours, config = through_gguf(tmp_path / "a.gguf", lambda writer: seen.append(sentence_piece(writer, prefix=prefix)))
    tokens, scores = seen[0]
    for text in [*TEXTS, *CORPUS]:
        if "<" in text or not text:
            continue
        ids = ours.encode(text).ids
        assert ids == [1, *merged(" " + text if prefix else text, tokens, scores)], text
        assert ours.decode(ids) == text
    with_tool = ours.encode("a<tool>b</s>").tokens
    assert "<tool>" in with_tool
    assert with_tool[-1] == "</s>"
    assert config["add_bos_token"] is True
    assert config["unk_token"] == "<unk>"


def test_sentence_piece_agrees_with_transformers(tmp_path: Path) -> None:
    theirs_module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    ours, _ = through_gguf(tmp_path / "a.gguf", sentence_piece)
    header = read_header(tmp_path / "a.gguf").metadata
    words = {"tokens": "tokens", "scores": "scores", "token_type": "token_type"}
    theirs, _ = theirs_module.convert_gguf_tokenizer(
        "phi3", {"tokenizer_type": "llama"} | {key: header[f"tokenizer.ggml.{value}"] for key, value in words.items()}
    )
    for text in CORPUS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["bytes", "sentence_piece"])
def test_random_texts_by_a_grammar(kind: str, tmp_path: Path, rng: random.Random) -> None:
    """What the tokens that a grammar allows say, as `tokenizers` decodes them, is JSON by its schema."""
    theirs = gpt2_style(PRE["gpt-2"])
    writers: dict[str, Any] = {
        "bytes": lambda writer: add_byte_level(writer, theirs, "gpt-2"),
        "sentence_piece": sentence_piece,
    }
    ours, _ = through_gguf(tmp_path / "a.gguf", writers[kind])
    table = TokenTable(Encoder(ours).vocabulary)
    members = {"text": {"type": "string", "maxLength": 9}, "count": {"enum": [1, 22, None]}}
    schema = {"type": "object", "properties": members, "required": ["text"], "additionalProperties": False}
    constraint = constrain_to_schema(schema, "")
    start = compile_grammar(table.make_tokenizer(), write_lark(constraint.kind, constraint.text))
    texts = set()
    for _ in range(50):
        matcher, tokens = start.deep_copy(), list[int]()
        while not matcher.is_stopped():
            packed = matcher.compute_bitmask()
            allowed = [token for token in range(table.end_id) if packed[token // 8] >> token % 8 & 1]
            tokens.append(rng.choice(allowed))
            assert matcher.consume_token(tokens[-1])
        text = ours.decode(tokens)
        value = json.loads(text)
        assert len(value["text"]) <= 9
        assert value.keys() <= members.keys()
        assert value.get("count") in (1, 22, None)
        texts.add(text)
    assert len(texts) > 25


def test_runs_of_spaces_that_were_added_by_hand_are_merged(tmp_path: Path) -> None:
    """Gemma's: written as spaces, scored as if they came last, and in the file before all that can contain them."""

    def write(writer: gguf.GGUFWriter) -> None:
        tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "  ", "    ", "a", SPACE, f"{SPACE}a"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0, 0.0, 0.0, 0.0, -1000.0, -1000.0, -1.0, -2.0, -3.0])
        writer.add_token_types([2, 3, 3, 6, 4, 4, 1, 1, 1])
        writer.add_add_space_prefix(False)
        writer.add_bool("tokenizer.ggml.add_bos_token", False)

    ours, _ = through_gguf(tmp_path / "a.gguf", write, "gemma2")
    ids = ours.encode("a     a\n   a").ids
    assert ids == [6, 5, 8, 3, 4, 8]
    assert ours.decode(ids) == "a     a\n   a"


def test_bos_and_eos_are_added_where_the_file_says_so(tmp_path: Path) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, gpt2_style(PRE["gpt-2"]))
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    ours, _ = through_gguf(tmp_path / "a.gguf", write)
    ids = ours.encode("the").ids
    assert (ids[0], ids[-1]) == (0, 1)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "has no vocabulary"),
        ({"tokens": ["a"], "model": "t5"}, "of kind 't5'"),
        ({"tokens": ["a"], "model": "gpt2", "pre": "x"}, r"\(tokenizer\.ggml\.pre\) 'x' is not known"),
        ({"tokens": ["a", "b"], "model": "llama", "scores": [0.0]}, "2 tokens, 2 types and 1 scores"),
        ({"tokens": ["a"], "model": "gpt2", "pre": "gpt-2", "merges": ["a b"]}, "merges do not fit its vocabulary"),
    ],
)
def test_what_cannot_be_read_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
