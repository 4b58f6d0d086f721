"""Reads a model's config and weights with transformers. Raises ModelError for what cannot be read or is incomplete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.products import MAX_SUMMED, multiply
from server.models.config import ModelInfo
from server.models.config_file import check_counts, read_json, shorten_repr
from server.models.errors import ModelError
from server.models.files.end_tokens import read_eos_ids
from server.models.transformers_backend.attention import ATTN_IMPLEMENTATION, attend

MAX_MESSAGE_LENGTH = 300  # maximum number of characters of transformers' error messages that are shown


def read_transformers_info(directory: Path) -> ModelInfo:
    """Return a model's properties from its config, read by transformers. Raises ModelError for an invalid config."""
    check_counts(read_json(directory / "config.json"), directory / "config.json")
    config = _load_config(directory)
    text = config.get_text_config()
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None:
        raise ModelError(
            f"{directory}: a {type(config).__name__} has no max_position_embeddings; models with state spaces, linear "
            "attention or ALiBi cannot be served"
        )
    vocab_size: Any = getattr(text, "vocab_size", None)
    for key, value in (("vocab_size", vocab_size), ("positions", positions)):
        if type(value) is not int or value < 1:
            raise ModelError(
                f"{directory}: its config's {key} is {shorten_repr(value)}, and should be a number above 0"
            )
    return ModelInfo(vocab_size, positions, read_eos_ids(directory, vocab_size), str(dtype).removeprefix("torch."))


def _load_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many kinds for a bad config
        raise ModelError(f"{directory}: transformers cannot read its config: {format_error(error)}") from None


def make_empty_model(directory: Path) -> Any:
    """Return a model with kvmux's attention on the meta device: it takes no memory. Raises ModelError.

    Its numbers are in 16 bits, as products of experts have no shapes for others there.
    """
    config = _load_config(directory)
    made: Any = AutoModelForCausalLM
    with _translate_errors(directory), torch.device("meta"):
        AttentionInterface.register(ATTN_IMPLEMENTATION, attend)
        model: Any = made.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTN_IMPLEMENTATION)
    return model.eval()


def load_transformers_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model with its weights and kvmux's attention. Raises ModelError."""
    _check_size(directory, sum(p.numel() for p in make_empty_model(directory).parameters()))
    with _translate_errors(directory):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=ATTN_IMPLEMENTATION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, found = loaded
    if lacking := sorted(found["missing_keys"]) + sorted(str(key) for key in found["mismatched_keys"]):
        raise ModelError(
            f"{directory} is incomplete, or config.json is of another model: {lacking[0]} is missing or has another "
            f"shape (tensors with such faults: {len(lacking)})"
        )
    _replace_long_linear_layers(model)
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def _translate_errors(directory: Path) -> Iterator[None]:
    """Turn transformers' errors about a model into ModelErrors."""
    try:
        yield
    except Exception as error:  # of many kinds
        if "Unrecognized configuration class" in str(error):
            raise ModelError(f"{directory}: transformers has no decoder-only model of this architecture") from None
        raise ModelError(
            f"{directory}: transformers cannot load it with kvmux's attention: {format_error(error)}"
        ) from None


def _replace_long_linear_layers(model: nn.Module) -> None:
    """Replace the linear layers whose sums are too long for some accelerators by layers that compute them in parts."""
    for parent in [*model.modules()]:
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear and layer.in_features > MAX_SUMMED:
                setattr(parent, name, _LinearInParts(layer))


class _LinearInParts(nn.Module):
    """A linear layer that sums no more products at once than accelerators compute rightly; see `multiply`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)


def _check_size(directory: Path, numbers: int) -> None:
    """Raise ModelError if the files are too small for `numbers` parameters: transformers would make up the rest."""
    stored = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
    if numbers > 8 * stored:  # even a quantized parameter takes at least one bit
        raise ModelError(
            f"{directory}: config.json describes a model of {numbers} parameters, and the files have {stored} bytes; "
            "is it the file of this model?"
        )


def format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_MESSAGE_LENGTH]}"


def freeze_longrope(model: nn.Module, positions: int) -> None:
    """Fix LongRoPE's frequencies to the set (short or long) for texts of up to `positions` tokens.

    transformers would choose the set by the longest text of each step; then new keys would not match cached ones, and
    sequences would affect each other. Raises ModelError if the model has code of its own that chooses in this way.
    """
    rope: Any
    for rope in model.modules():
        if getattr(rope, "rope_type", None) == "longrope":
            parameters = rope.config.rope_parameters
            limit = parameters["original_max_position_embeddings"]
            if "short_mscale" in parameters and positions > limit:
                raise ModelError(
                    f"texts longer than {limit} tokens would change the RoPE of other texts: give --max-seq-len {limit}"
                )
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](rope.config, rope.inv_freq.device, seq_len=positions)
            rope.inv_freq.copy_(frequencies)
            rope.original_inv_freq.copy_(frequencies)
