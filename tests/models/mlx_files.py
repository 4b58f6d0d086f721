"""Writes transformers models as mlx-lm's quantized checkpoints, whose format is written out here in numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from tests.models.random_models import byte_tokenizer

Array = np.ndarray[Any, Any]
Formats = Mapping[str, tuple[int, int] | None]  # by a module's name: bits and columns of a group; None: not quantized


def mlx_quantized(w: Array, bits: int, group: int) -> tuple[Array, Array, Array]:
    """`mlx.core.quantize`: uint32 [out, in bits / 32], scales and biases [out, in / group], these in float64."""
    out, width = w.shape
    grouped = w.astype(np.float64).reshape(out, width // group, group)
    low, high = grouped.min(-1), grouped.max(-1)
    from_below = np.abs(low) > np.abs(high)
    scales = np.maximum((high - low) / (2**bits - 1), 1e-7) * np.where(from_below, 1, -1)
    edge = np.where(from_below, low, high)
    zero = np.rint(edge / scales)
    scales = np.where(zero != 0, edge / np.where(zero == 0, 1, zero), scales)
    biases = np.where(zero != 0, edge, 0.0)
    numbers = np.clip(np.rint((grouped - biases[..., None]) / scales[..., None]), 0, 2**bits - 1)
    per_word = 32 // bits
    words = numbers.astype(np.uint64).reshape(out, width // per_word, per_word)
    packed = (words << np.arange(0, 32, bits, dtype=np.uint64)).sum(-1).astype(np.uint32)
    return packed, scales, biases


def mlx_dequantized(packed: Array, scales: Array, biases: Array, bits: int, group: int) -> Array:
    """[out, in], in the type of scales and biases."""
    numbers = np.stack([packed >> np.uint32(shift) & np.uint32(2**bits - 1) for shift in range(0, 32, bits)], -1)
    numbers = numbers.reshape(len(packed), -1).astype(scales.dtype)
    return numbers * np.repeat(scales, group, 1) + np.repeat(biases, group, 1)


def write_mlx(
    model: PreTrainedModel, directory: Path, bits: int, group: int, overrides: Formats | None = None, **config: Any
) -> PreTrainedModel:
    """All matrices quantized, as mlx-lm does; gives back the model, its weights what is left of them.

    Scales and biases are float32. `config`: further keys of config.json's "quantization".
    """
    tensors: dict[str, Array] = {}
    for name, parameter in model.named_parameters():  # tied ones once
        w = parameter.detach().numpy()
        module = name.removesuffix(".weight")
        how = (overrides or {}).get(module, (bits, group)) if w.ndim == 2 else None
        if how is None:
            tensors[name] = w
            continue
        packed, scales, biases = mlx_quantized(w, *how)
        tensors |= {
            name: packed,
            f"{module}.scales": scales.astype(np.float32),
            f"{module}.biases": biases.astype(np.float32),
        }
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(mlx_dequantized(packed, scales, biases, *how)))
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    raw = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    quantization: dict[str, Any] = {"group_size": group, "bits": bits}
    for module, how in (overrides or {}).items():
        quantization[module] = False if how is None else {"bits": how[0], "group_size": how[1]}
    quantization |= config
    raw |= {"quantization": quantization, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    byte_tokenizer(model.config.vocab_size).save(str(directory / "tokenizer.json"))
    return model
