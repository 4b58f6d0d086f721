"""Models of real shapes with random weights: what a benchmark multiplies does not matter, how much of it does.

The tokenizer is a byte-level BPE learnt from Python's standard library; made-up words fill it, so that every id has a
text. Made once, and kept in the user's cache folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from server.engine.device import WEIGHT_FORMATS

LEARNT = 16_384  # words of the tokenizer; what a model has beyond is filled up
BOOKS = 700  # files of the standard library
END = "<|endoftext|>"
SPREAD = 0.02  # standard deviation of the weights
HALF = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Shape:
    """A dense decoder as config.json has it; embeddings are the lm_head, too."""

    name: str
    architecture: str
    model_type: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int
    theta: float
    qkv_bias: bool = False

    @property
    def head(self) -> int:
        """Dimensions of one."""
        return self.width // self.heads

    @property
    def kv_bytes(self) -> int:
        """Of a token's keys and values in bfloat16."""
        return self.layers * 2 * self.kv_heads * self.head * HALF

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Names and [out, in], the embedding first."""
        d, kv = self.width, self.kv_heads * self.head
        yield "model.embed_tokens", (self.vocab, d)
        for i in range(self.layers):
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            yield f"{attention}.q_proj", (d, d)
            yield from ((f"{attention}.{part}_proj", (kv, d)) for part in "kv")
            yield f"{attention}.o_proj", (d, d)
            yield from ((f"{mlp}.{part}_proj", (self.inner, d)) for part in ("gate", "up"))
            yield f"{mlp}.down_proj", (d, self.inner)

    def weight_bytes(self, weights: str) -> int:
        """That a token must read, kept as `--weights` says: all matrices, since the embedding is the lm_head, too."""
        shapes = [shape for _, shape in self.matrices()]
        if weights not in WEIGHT_FORMATS:
            return HALF * sum(out * width for out, width in shapes)
        bits, group = WEIGHT_FORMATS[weights]
        scales = [4 * out if group is None else HALF * out * width // group for out, width in shapes]
        return sum(out * width * bits // 8 for out, width in shapes) + sum(scales)

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.theta,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "bfloat16",
        }


QWEN = Shape(
    "qwen2.5-0.5b", "Qwen2ForCausalLM", "qwen2", 24, 896, 4864, 14, 2, 151_936, 32_768, 1e6, qkv_bias=True
)  # Qwen2.5-0.5B: 494 million parameters
LLAMA = Shape("llama-10m", "LlamaForCausalLM", "llama", 6, 288, 768, 6, 2, LEARNT, 4096, 1e4)
SHAPES = {shape.name: shape for shape in (QWEN, LLAMA)}


def cache_folder() -> Path:
    """Where models are kept if nobody says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvmux" / "benchmarks"


def made(shape: Shape, folder: Path, tell: Callable[[str], None]) -> Path:
    """The model's directory in `folder`, made if it is not there. Raises OSError."""
    directory = folder / shape.name
    if directory.is_dir():
        return directory
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:  # so that nobody finds half a model
        new = Path(place) / shape.name
        new.mkdir()
        tell(f"{shape.name}: learning a tokenizer")
        (new / "tokenizer.json").write_text(_filled(learnt(), shape.vocab))
        (new / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
        (new / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
        tell(f"{shape.name}: drawing weights")
        save_file(dict(_weights(shape)), new / "model.safetensors")
        shutil.move(new, directory)
    return directory


def _weights(shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint; norms are 1."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.empty(size).normal_(0, SPREAD, generator=generator).bfloat16()

    for name, size in shape.matrices():
        yield f"{name}.weight", drawn(*size)
        if shape.qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj")):
            yield f"{name}.bias", drawn(size[0])
    norms = [f"model.layers.{i}.{at}_layernorm" for i in range(shape.layers) for at in ("input", "post_attention")]
    for name in [*norms, "model.norm"]:
        yield f"{name}.weight", torch.ones(shape.width, dtype=torch.bfloat16)


def learnt() -> Tokenizer:
    """From Python's own sources, which are wherever this runs."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    books = sorted(file for file in stdlib.glob("**/*.py") if "site-packages" not in file.parts)[:BOOKS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNT,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(book) for book in books], trainer)
    return tokenizer


def _filled(tokenizer: Tokenizer, vocab: int) -> str:
    """tokenizer.json with made-up words up to `vocab`."""
    told: dict[str, Any] = json.loads(tokenizer.to_str())
    words = told["model"]["vocab"]
    words |= {f"\u0120word{i}": i for i in range(len(words), vocab)}
    return json.dumps(told, ensure_ascii=False)
