"""Tiny tokenizers of the kinds that models use."""

from __future__ import annotations

import string

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello hills, hello you",
    "caf\u00e9 na\u00efve \u2603",
]
SPECIAL = ["<s>", "</s>"]
BOS, EOS = 0, 1


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3, Qwen."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2, Mistral, Gemma: words begin with "\u2581", what is not in the vocabulary becomes bytes."""
    tokens = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *string.ascii_lowercase]
    tokens += ["he", "ll", "hell", "hello", "\u2581hello", "\u2581w", "\u2581\u2581"]
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("\u2581", "hello"),
        ("\u2581", "w"),
        ("\u2581", "\u2581"),
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """As T5 and the newer conversions of sentencepiece models."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
