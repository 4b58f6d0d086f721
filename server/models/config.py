"""Reads config.json into `ModelConfig`, the decoder's description of a model. Imports no torch: the API uses it, too.

Differences between model families are data: a row in FAMILIES, and fields of ModelConfig. Reads the files of
transformers 5 and of earlier versions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from server.models.config_file import check_config, find_stored_dtype, read_json, read_loosely, shorten_repr
from server.models.errors import ModelError, UnknownModelError
from server.models.families import FAMILIES, ModelFamily, MoENames, RawConfig
from server.models.files.end_tokens import read_eos_ids

if TYPE_CHECKING:
    from kernels.ops import Activation

log = logging.getLogger(__name__)

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
ROPE_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")  # the values of rope_type
SLIDING_ATTENTION = "sliding_attention"
FULL_ATTENTION = "full_attention"


class Dim(int):
    """A tensor dimension, with the keys of config.json that determine it, for error messages."""

    description: str

    def __new__(cls, size: int, description: str) -> Dim:
        dim = super().__new__(cls, size)
        dim.description = description
        return dim


class ModelInfo(NamedTuple):
    """The properties of a model that the engine and the API need before the weights are read."""

    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int]
    dtype: str  # dtype of the checkpoint: "float32", "bfloat16" or "float16"


@dataclass(frozen=True)
class Rope:
    """The parameters of a layer's rotary position embedding."""

    theta: float
    dim: int  # number of leading dimensions of a head that are rotated; the others stay as they are
    max_positions: int
    scaling: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # file from which the values were read, for error messages
    file: Path = field(default=Path("config.json"), compare=False)


@dataclass(frozen=True)
class MixtureOfExperts:
    """The mixture of experts of a layer: each token is computed by the few experts that a router chooses."""

    module: str  # the name of the mixture's module within a layer
    projections: tuple[str, str, str]  # the names of an expert's gate, up and down matrices
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # number of rows of an expert's gate matrix
    norm_topk_prob: bool  # whether the weights of the chosen experts are scaled to sum to 1


@dataclass(frozen=True)
class LayerConfig:
    """The parts of a model's configuration that may differ from layer to layer."""

    window: int | None  # number of latest tokens to which each token attends (sliding window); None: full attention
    rope: Rope | None  # position embedding of queries and keys; None: they are not rotated (NoPE)
    experts: MixtureOfExperts | None  # mixture of experts; None: a dense feed-forward network


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    layers: tuple[LayerConfig, ...]
    eos_ids: frozenset[int]
    dtype: str  # dtype of the checkpoint: "float32", "bfloat16" or "float16"
    scale: float  # factor of attention scores before softmax
    activation: Activation = "silu"
    qk_norm: bool = False
    sandwich_norm: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    softcap: float | None = None  # bound of attention scores, softcap * tanh(score / softcap); None: no bound
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def vocab_dim(self) -> Dim:
        return Dim(self.vocab_size, "vocab_size")

    @property
    def hidden_dim(self) -> Dim:
        return Dim(self.hidden_size, "hidden_size")

    @property
    def head_width(self) -> Dim:
        return Dim(self.head_dim, "head_dim")

    @property
    def q_size(self) -> Dim:
        return Dim(self.num_q_heads * self.head_dim, "num_attention_heads * head_dim")

    @property
    def kv_size(self) -> Dim:
        return Dim(self.num_kv_heads * self.head_dim, "num_key_value_heads * head_dim")

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(self.vocab_size, self.max_positions, self.eos_ids, self.dtype)


def load_config(directory: Path) -> ModelConfig:
    """Read config.json and generation_config.json. Raises ModelError for a model that `Decoder` cannot compute."""
    file = directory / "config.json"
    config = parse_config(read_json(file), file)
    dtype = config.dtype or find_stored_dtype(directory)
    return replace(config, eos_ids=read_eos_ids(directory, config.vocab_size), dtype=dtype)


def parse_config(raw: RawConfig, file: Path) -> ModelConfig:
    """Return the model that the JSON object of config.json describes; `file` is named in errors.

    What other files say is missing: eos_ids, and a dtype that config.json does not have, which is "".

    Raises ModelError for invalid values, and UnknownModelError for valid ones that the decoder does not support.
    """
    architecture = get_architecture(raw)
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnknownModelError(f"{file} describes a {architecture}; the decoder knows {', '.join(FAMILIES)}")
    text = raw.get("text_config")  # multimodal models have their decoder's config in text_config
    raw = read_loosely({**family.defaults, **raw, **(text if isinstance(text, dict) else {})})
    check_config(raw, file)
    _check_supported(raw, file)
    activation = raw.get(family.activation_key) or raw.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise UnknownModelError(
            f"{file}: {family.activation_key} is {shorten_repr(activation)}; the decoder knows {', '.join(ACTIVATIONS)}"
        )
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    _check_heads(heads, kv_heads, head_dim, file)
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_positions=raw["max_position_embeddings"],
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.tie_embeddings)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        layers=_parse_layers(raw, family, head_dim, file),
        eos_ids=frozenset(),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "",
        scale=(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        activation=ACTIVATIONS[activation],
        qk_norm=family.qk_norm,
        sandwich_norm=family.sandwich_norm,
        norm_offset=family.norm_offset,
        embedding_scale=raw["hidden_size"] ** 0.5 if family.scaled_embedding else 1.0,
        softcap=raw.get("attn_logit_softcapping"),
        logit_softcap=raw.get("final_logit_softcapping"),
    )


def get_architecture(raw: RawConfig) -> str:
    """Return the first architecture that config.json names; "none" if it names none."""
    named = raw.get("architectures")
    first = named[0] if isinstance(named, list) and named else "none"
    return first if isinstance(first, str) and first.isidentifier() else shorten_repr(first)


def _check_heads(heads: int, kv_heads: int, head_dim: int, file: Path) -> None:
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise ModelError(
            f"{file}: {heads} heads and {kv_heads} KV heads of dimension {head_dim} do not fit: "
            "the number of heads must be a multiple of the number of KV heads, and the dimension even"
        )


def _check_supported(raw: RawConfig, file: Path) -> None:
    """Raise ModelError for quantized checkpoints that cannot be read, and for encoders."""
    quantization = raw.get("quantization_config")
    if quantization and raw.get("quantization") is None:  # MLX checkpoints, which can be read, have "quantization", too
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        named = shorten_repr(method).strip("'")
        raise ModelError(
            f"{file}: the checkpoint is quantized ({named}), which cannot be read: use the unquantized model, "
            "an MLX checkpoint, or a GGUF file"
        )
    if raw.get("use_bidirectional_attention"):
        raise ModelError(f"{file}: use_bidirectional_attention makes it an encoder, which cannot be served")


def _parse_layers(raw: RawConfig, family: ModelFamily, head_dim: int, file: Path) -> tuple[LayerConfig, ...]:
    """Return each layer's config; the family's sliding rule is used only if layer_types is missing (see vllm#49795)."""
    count = raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or [
        SLIDING_ATTENTION if sliding else FULL_ATTENTION for sliding in family.sliding_rule(raw, count)
    ]
    interval = raw.get("no_rope_layer_interval") or count + 1
    uses_rope = raw.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]  # 0: without RoPE
    if len(kinds) != count or len(uses_rope) != count:
        raise ModelError(
            f"{file} has {count} layers, {len(kinds)} layer_types, {len(uses_rope)} no_rope_layers; all should be equal"
        )
    if unknown := set(kinds) - {SLIDING_ATTENTION, FULL_ATTENTION}:
        strange = shorten_repr(", ".join(sorted(unknown))).strip("'")
        raise UnknownModelError(
            f"{file}: layer_types has {strange}; the decoder knows {SLIDING_ATTENTION} and {FULL_ATTENTION}"
        )
    ropes = {kind: _parse_rope(raw, family, head_dim, kind, file) for kind in set(kinds)}
    experts = _parse_experts(raw, family.experts, file)
    dense = set(raw.get("mlp_only_layers") or ())
    sparse_step = raw.get("decoder_sparse_step", 1)
    return tuple(
        LayerConfig(
            window=raw.get("sliding_window") if kind == SLIDING_ATTENTION else None,
            rope=ropes[kind] if rotated else None,
            experts=experts if i not in dense and sparse_step and (i + 1) % sparse_step == 0 else None,
        )
        for i, (kind, rotated) in enumerate(zip(kinds, uses_rope, strict=True))
    )


def _parse_rope(raw: RawConfig, family: ModelFamily, head_dim: int, kind: str, file: Path) -> Rope:
    """Return the RoPE of a kind of layer, from rope_parameters (transformers 5) or rope_theta and rope_scaling."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta: float = raw.get("rope_theta") or 10_000.0
    if given.get(kind) is not None:
        given = given[kind]
    elif family.local_theta is not None and kind == SLIDING_ATTENTION:
        given, theta = {}, raw.get("rope_local_base_freq") or family.local_theta
    theta = given.get("rope_theta") or theta
    share: float = given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    scaling = given.get("rope_type") or given.get("type") or "default"
    scaling = family.rope_scaling_aliases.get(scaling, scaling)
    if scaling not in ROPE_SCALINGS:
        raise UnknownModelError(
            f"{file}: RoPE scaling {shorten_repr(scaling)}; the decoder knows {', '.join(ROPE_SCALINGS)}"
        )
    max_positions = raw["max_position_embeddings"]
    # Phi-3's config.json has original_max_position_embeddings beside rope_scaling, not in it.
    trained = (
        given.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or max_positions
    )
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ModelError(f"{file}: RoPE rotates {dim} of {head_dim} dimensions of a head, which must be an even number")
    return Rope(
        theta=float(theta),
        dim=dim,
        max_positions=max_positions,
        scaling=scaling,
        parameters={**given, "original_max_position_embeddings": trained},
        file=file,
    )


def _parse_experts(raw: RawConfig, experts: MoENames | None, file: Path) -> MixtureOfExperts | None:
    if experts is None:
        return None
    count = next((raw[key] for key in experts.num_experts_keys if raw.get(key) is not None), None)
    num_chosen, width = raw.get("num_experts_per_tok"), raw.get(experts.intermediate_size_key)
    if not count or not num_chosen or not width:
        raise ModelError(f"{file} lacks the number of experts, their width, or num_experts_per_tok")
    if num_chosen > count:
        raise ModelError(f"{file}: num_experts_per_tok is {num_chosen}, and there are {count} experts")
    return MixtureOfExperts(
        module=experts.module,
        projections=experts.projections,
        num_experts=count,
        num_experts_per_tok=num_chosen,
        intermediate_size=width,
        norm_topk_prob=bool(raw.get("norm_topk_prob", False))
        if experts.norm_topk_prob is None
        else experts.norm_topk_prob,
    )
