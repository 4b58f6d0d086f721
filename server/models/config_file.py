"""config.json as it must be for the decoder to read it: types and ranges of the keys it knows. Imports no torch.

What a key means is config.py's business, and what a family takes for granted is in families.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from server.models.errors import ModelError

Dtype = Literal["float32", "bfloat16", "float16"]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class RopeFile(_Strict):
    """rope_parameters or rope_scaling, or what they hold for a kind of layer."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    factor: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    full_attention: RopeFile | None = None
    sliding_attention: RopeFile | None = None


class ConfigFile(_Strict):
    """Keys that are not here are left alone."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    original_max_position_embeddings: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat | None = None
    rope_local_base_freq: PositiveFloat | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    rope_parameters: RopeFile | None = None
    rope_scaling: RopeFile | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool | None = None
    max_window_layers: NonNegativeInt | None = None
    sliding_window_pattern: PositiveInt | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    query_pre_attn_scalar: PositiveFloat | None = None
    attn_logit_softcapping: PositiveFloat | None = None
    final_logit_softcapping: PositiveFloat | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: NonNegativeInt | None = None
    dtype: Dtype | None = None
    torch_dtype: Dtype | None = None


def checked(raw: Mapping[str, Any], file: Path) -> None:
    """Raises ModelError for a key that is missing, or has a value that no model can have."""
    try:
        ConfigFile.model_validate(raw)
    except ValidationError as error:
        raise ModelError(f"{file}: {_faults(error)}") from None


def _faults(error: ValidationError) -> str:
    told = error.errors(include_url=False)
    missing = [str(fault["loc"][0]) for fault in told if fault["type"] == "missing"]
    if missing:
        return f"lacks {', '.join(missing)}; is it the file of this model?"
    first = told[0]
    return f"{'.'.join(map(str, first['loc']))} is {first['input']!r}: {first['msg'].lower()}"


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is no JSON object")
    return value
