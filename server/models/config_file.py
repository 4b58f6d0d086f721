"""Checks config.json: types and ranges of the keys that the decoder knows. Imports no torch.

The meaning of the keys is in config.py, the defaults of each family in families.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from config.wording import explain_problem
from server.models.errors import ModelError, first_line

Dtype = Literal["float32", "bfloat16", "float16"]
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # by the names in safetensors files
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as in the format's own library
MAX_VALUE_LENGTH = 80  # maximum number of characters of a value that an error message shows
# Bounds far beyond any model: config.json cannot make the server build gigabytes of lists before weights are checked.
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
Count = Annotated[int, Field(gt=0, lt=2**31)]
NumLayers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
NumExperts = Annotated[int, Field(ge=0, le=MAX_EXPERTS)]  # number of experts; 0 in some dense models
# Positive numbers whose square and inverse fit float32
Real = Annotated[float, Field(ge=1e-12, le=1e12, allow_inf_nan=False)]
RealOrZero = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Theta = Annotated[float, Field(gt=1, le=1e12, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class RopeFile(_Strict):
    """The values of rope_parameters or rope_scaling in config.json, or their part for one kind of layer."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    partial_rotary_factor: Share | None = None
    factor: Real | None = None
    attention_factor: Real | None = None
    original_max_position_embeddings: Count | None = None
    low_freq_factor: Real | None = None
    high_freq_factor: Real | None = None
    beta_fast: RealOrZero | None = None
    beta_slow: RealOrZero | None = None
    mscale: RealOrZero | None = None
    mscale_all_dim: RealOrZero | None = None
    truncate: bool | None = None
    short_factor: list[Real] | None = None
    long_factor: list[Real] | None = None
    full_attention: RopeFile | None = None
    sliding_attention: RopeFile | None = None


class ConfigFile(_Strict):
    """The keys of config.json that are checked, with their types and ranges; other keys are ignored."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: NumLayers
    num_attention_heads: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    original_max_position_embeddings: Count | None = None
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Theta | None = None
    rope_local_base_freq: Theta | None = None
    partial_rotary_factor: Share | None = None
    rope_parameters: RopeFile | None = None
    rope_scaling: RopeFile | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: NonNegativeInt | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool | None = None
    max_window_layers: NonNegativeInt | None = None
    sliding_window_pattern: Count | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    query_pre_attn_scalar: Real | None = None
    attn_logit_softcapping: Real | None = None
    final_logit_softcapping: Real | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: NonNegativeInt | None = None
    num_experts: NumExperts | None = None
    num_local_experts: NumExperts | None = None
    num_experts_per_tok: NumExperts | None = None
    moe_intermediate_size: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    norm_topk_prob: bool | None = None
    dtype: Dtype | None = None
    torch_dtype: Dtype | None = None


def read_loosely(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json without what says nothing: a window of 0 tokens, and dtypes that are none here."""
    read = {**raw, "sliding_window": raw.get("sliding_window") or None}
    for key in ("dtype", "torch_dtype"):
        if isinstance(value := raw.get(key), str):
            value = value.removeprefix("torch.")
            read[key] = value if value in get_args(Dtype) else None
    return read


def find_stored_dtype(directory: Path) -> str:
    """Return the dtype of most tensors in a directory's first safetensors file; "float32" if there is no such file."""
    counts: Counter[str] = Counter()
    for file in sorted(directory.glob("*.safetensors"))[:1]:
        with suppress(OSError, ValueError, AttributeError, RecursionError), file.open("rb") as opened:
            header = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), MAX_HEADER_BYTES)))
            counts.update(str(entry.get("dtype")) for entry in header.values())
    return next((STORED_DTYPES[name] for name, _ in counts.most_common() if name in STORED_DTYPES), "float32")


def check_config(raw: Mapping[str, Any], file: Path) -> None:
    """Raise ModelError if config.json lacks a required key or has an invalid value; `file` is named in the message."""
    try:
        ConfigFile.model_validate(raw)
    except ValidationError as error:
        raise ModelError(f"{file}: {_format_validation_error(error)}") from None


def check_counts(raw: Mapping[str, Any], file: Path) -> None:
    """Raise ModelError if a key of config.json with "layer" or "expert" in its name has a value far beyond any model.

    This protects transformers, which makes an object for each layer and expert before it looks at the weights.
    """
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key, value in part.items():
            limit = MAX_LAYERS if "layer" in key else MAX_EXPERTS if "expert" in key else None
            if limit is not None and isinstance(value, int | float) and value > limit:
                raise ModelError(f"{file}: {key} is {shorten_repr(value)}, and should be at most {limit}")


def _format_validation_error(error: ValidationError) -> str:
    faults = error.errors(include_url=False)
    missing = [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing"]
    if missing:
        return f"lacks {', '.join(missing)}; is it the file of this model?"
    first = faults[0]
    where = f"{'.'.join(map(str, first['loc']))} is {shorten_repr(first['input'])}"
    return explain_problem(where, first, shows_value=False)


def shorten_repr(value: Any) -> str:
    """Return the repr of a value, cut to MAX_VALUE_LENGTH characters for an error message."""
    try:
        written = repr(value)
    except ValueError:  # Python refuses to print an int of thousands of digits
        return "a number of thousands of digits"
    return written if len(written) <= MAX_VALUE_LENGTH else f"{written[:MAX_VALUE_LENGTH]}..."


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError if the file cannot be read or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
