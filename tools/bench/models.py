"""Makes models with real shapes and random weights, as speed does not depend on the weights' values.

The tokenizer is a byte-level BPE trained on Python's standard library and filled up with invented words, so that every
id has a text. Models are made once, and kept in the user's cache folder.
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

from kernels.weights.block_formats import FORMATS
from server.engine.device import WEIGHT_FORMATS
from server.models.formats.quantized import choose_block_format

LEARNT_VOCAB_SIZE = 16_384  # tokens that are trained; larger vocabularies are filled up with invented words
MAX_TRAINING_FILES = 700  # files of the standard library that the tokenizer is trained on
EOS_TOKEN = "<|endoftext|>"
INIT_STD = 0.02  # standard deviation of the weights
BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a dense decoder with tied embeddings, as in config.json."""

    name: str
    architecture: str
    model_type: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    qkv_bias: bool = False

    @property
    def head_dim(self) -> int:
        """The dimensions of a head."""
        return self.hidden_size // self.heads

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name and the shape [out, in] of every matrix, the embedding first."""
        d, kv = self.hidden_size, self.kv_heads * self.head_dim
        yield "model.embed_tokens", (self.vocab_size, d)
        for i in range(self.layers):
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            yield f"{attention}.q_proj", (d, d)
            yield from ((f"{attention}.{part}_proj", (kv, d)) for part in "kv")
            yield f"{attention}.o_proj", (d, d)
            yield from ((f"{mlp}.{part}_proj", (self.intermediate_size, d)) for part in ("gate", "up"))
            yield f"{mlp}.down_proj", (d, self.intermediate_size)

    def weight_bytes(self, weights: str) -> int:
        """Return the bytes of weights that a decode step reads, in the format `weights` (a value of --weights)."""
        shapes = [shape for _, shape in self.matrices()]
        if weights not in WEIGHT_FORMATS:
            return BFLOAT16_BYTES * sum(out * width for out, width in shapes)
        format, total = WEIGHT_FORMATS[weights], 0
        for name, (out, width) in self.matrices():
            chosen = choose_block_format(format, f"{name}.weight", width, self.layers)
            block = FORMATS[chosen] if chosen else None
            total += out * (width // block.columns * block.nbytes if block else width * BFLOAT16_BYTES)
        return total

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "bfloat16",
        }


QWEN = ModelShape(
    "qwen2.5-0.5b", "Qwen2ForCausalLM", "qwen2", 24, 896, 4864, 14, 2, 151_936, 32_768, 1e6, qkv_bias=True
)  # Qwen2.5-0.5B: 494 million parameters
LLAMA = ModelShape("llama-10m", "LlamaForCausalLM", "llama", 6, 288, 768, 6, 2, LEARNT_VOCAB_SIZE, 4096, 1e4)
SHAPES = {shape.name: shape for shape in (QWEN, LLAMA)}


def cache_folder() -> Path:
    """Return the default folder of the models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvmux" / "benchmarks"


def peers_folder() -> Path:
    """Return the default folder of other servers, beside that of the models."""
    return cache_folder().parent / "peers"


def find_model(name: str, show_status: Callable[[str], None]) -> str | Path:
    """Return the folder of a model of SHAPES, made if needed, or the name of another model as it is. Raises OSError."""
    return make_model(SHAPES[name], cache_folder(), show_status) if name in SHAPES else name


def make_model(shape: ModelShape, folder: Path, show_status: Callable[[str], None]) -> Path:
    """Return the model's directory in `folder`, made if it is not there. Raises OSError."""
    directory = folder / shape.name
    if directory.is_dir():
        return directory
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:  # so that a partial model is never used
        new = Path(place) / shape.name
        new.mkdir()
        show_status(f"{shape.name}: learning a tokenizer")
        (new / "tokenizer.json").write_text(_pad_vocabulary(train_tokenizer(), shape.vocab_size))
        (new / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS_TOKEN}))
        (new / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
        show_status(f"{shape.name}: drawing weights")
        save_file(dict(_make_weights(shape)), new / "model.safetensors")
        shutil.move(new, directory)
    return directory


def _make_weights(shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the checkpoint; norms are 1."""
    generator = torch.Generator().manual_seed(0)

    def draw_tensor(*size: int) -> torch.Tensor:
        return torch.empty(size).normal_(0, INIT_STD, generator=generator).bfloat16()

    for name, size in shape.matrices():
        yield f"{name}.weight", draw_tensor(*size)
        if shape.qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj")):
            yield f"{name}.bias", draw_tensor(size[0])
    norms = [f"model.layers.{i}.{at}_layernorm" for i in range(shape.layers) for at in ("input", "post_attention")]
    for name in [*norms, "model.norm"]:
        yield f"{name}.weight", torch.ones(shape.hidden_size, dtype=torch.bfloat16)


def train_tokenizer() -> Tokenizer:
    """Return a tokenizer trained on the sources of Python's standard library, which every machine has."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in stdlib.glob("**/*.py") if "site-packages" not in file.parts)[:MAX_TRAINING_FILES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNT_VOCAB_SIZE,
        special_tokens=[EOS_TOKEN],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(file) for file in files], trainer)
    return tokenizer


def _pad_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> str:
    """Return the contents of tokenizer.json, with invented words up to `vocab_size`."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    words = content["model"]["vocab"]
    words |= {f"\u0120word{i}": i for i in range(len(words), vocab_size)}
    return json.dumps(content, ensure_ascii=False)
