"""What config.json says about a model, in the words of the decoder. Imports no torch: the API reads it too.

What differs between families is data: a row in FAMILIES, and fields of ModelConfig.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from config.settings import SettingsError

EMBEDDED = {"tiny": Path(__file__).parent / "tiny"}


class ModelError(SettingsError):
    """A model that cannot be served; the message tells the user why, and what can."""


class Family(NamedTuple):
    """How an architecture differs from Llama."""

    qkv_bias: bool | None = None  # None: config.attention_bias decides


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
}

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]  # per layer; None: the layer sees everything
    eos_ids: frozenset[int]
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"


def model_directory(model: str) -> Path:
    """The directory of a model's name or path. Raises ModelError."""
    directory = EMBEDDED.get(model, Path(model).expanduser())
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"no model at {model!r}: give a directory with config.json, tokenizer.json and *.safetensors, "
            f"or an embedded model ({', '.join(EMBEDDED)})"
        )
    return directory


def load_config(directory: Path) -> ModelConfig:
    """Reads config.json and generation_config.json. Raises ModelError for what the decoder does not know."""
    raw = _json(directory / "config.json")
    architecture = (raw.get("architectures") or ["none"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"{directory} holds a {architecture}; the decoder knows {', '.join(FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}: hidden_act is {raw['hidden_act']!r}; the decoder knows silu")
    if missing := [key for key in REQUIRED if not isinstance(raw.get(key), int)]:
        raise ModelError(f"{directory / 'config.json'} lacks {', '.join(missing)}; is it the file of this model?")
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(raw, directory),
        max_positions=raw["max_position_embeddings"],
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        windows=_windows(raw, layers, directory),
        eos_ids=_eos_ids(raw, directory),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _rope_theta(raw: Mapping[str, Any], directory: Path) -> float:
    """transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ModelError(f"{directory}: RoPE scaling {kind!r} is not supported yet")
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    if not isinstance(theta, int | float):
        raise ModelError(f"{directory / 'config.json'}: rope_theta is {theta!r}, and should be a number")
    return float(theta)


def _windows(raw: Mapping[str, Any], layers: int, directory: Path) -> tuple[int | None, ...]:
    """layer_types says which layers slide; a lone sliding_window means none does (vllm#49795).

    Files from before layer_types say use_sliding_window, and mean the layers from max_window_layers on.
    """
    full = raw.get("max_window_layers", layers) if raw.get("use_sliding_window") else layers
    kinds = raw.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if len(kinds) != layers:
        raise ModelError(f"{directory / 'config.json'} has {layers} layers and {len(kinds)} layer_types")
    return tuple(raw.get("sliding_window") if kind == "sliding_attention" else None for kind in kinds)


def _eos_ids(raw: Mapping[str, Any], directory: Path) -> frozenset[int]:
    """Generation settings know more end tokens than the model's config."""
    path = directory / "generation_config.json"
    generation = _json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is no JSON object")
    return value
