"""Small random models as transformers itself writes them, and transformers' word on what they compute."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from kernels.reference import ReferenceOps
from server.models.config import load_config
from server.models.decoder import Decoder
from server.models.weights import Weights

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(vocab_size=300, rope_parameters=ROPE, tie_word_embeddings=False, **SHAPE),
    "llama_tied_biased": LlamaConfig(
        vocab_size=300, rope_parameters=ROPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **SHAPE
    ),
    "llama_wide_heads": LlamaConfig(vocab_size=300, rope_parameters=ROPE, head_dim=32, **SHAPE),
    "qwen2": Qwen2Config(
        vocab_size=300, rope_parameters=ROPE | {"rope_theta": 1e6}, tie_word_embeddings=False, **SHAPE
    ),
    "qwen2_tied": Qwen2Config(vocab_size=300, rope_parameters=ROPE, tie_word_embeddings=True, **SHAPE),
    "qwen2_windows": Qwen2Config(
        vocab_size=300, rope_parameters=ROPE, use_sliding_window=True, sliding_window=16, max_window_layers=1, **SHAPE
    ),
}


def save_random(name: str, directory: Path, *, seed: int = 0, shard_size: str = "5GB") -> PreTrainedModel:
    """Saves a random model; large weights in attention, so that a wrong key shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            p.normal_(0, 0.4 if "q_proj" in parameter_name else 0.1) if p.dim() > 1 else p.add_(
                torch.randn_like(p) * 0.1
            )
    model.save_pretrained(directory, max_shard_size=shard_size)
    byte_tokenizer(CONFIGS[name].vocab_size).save(str(directory / "tokenizer.json"))
    return model


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """<s>, </s>, the bytes, and made-up words up to `vocab_size`: every id has a text."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"\u0120w{i}" for i in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our decoder on that directory."""
    weights = Weights(directory, dtype, torch.device("cpu"))
    return Decoder(load_config(directory), weights, ReferenceOps(), dtype)
