"""What config.json says about a model, in the words of the decoder. Imports no torch: the API reads it too.

What differs between families is data: a row in FAMILIES, and fields of ModelConfig. Reads the files of transformers 5,
and those from before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from server.models.config_file import checked, read_json
from server.models.errors import ModelError, UnknownModelError
from server.models.families import FAMILIES, Experts, Family, Raw

if TYPE_CHECKING:
    from kernels.layer import Activation

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")  # of RoPE
SLIDING = "sliding_attention"
SEES_ALL = "full_attention"


class Facts(NamedTuple):
    """What the engine must know of a model before its weights are read, whoever computes it."""

    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int]
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"


@dataclass(frozen=True)
class Rope:
    """How queries and keys of a layer turn with their position."""

    theta: float
    dim: int  # leading dimensions of a head that turn; the others stay
    max_positions: int
    trained_positions: int  # before the context was stretched
    scaling: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class MixtureOfExperts:
    """A layer whose feed-forward is chosen token by token."""

    module: str
    split: tuple[str, str, str]
    count: int
    chosen: int  # per token
    width: int
    normalise: bool


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None  # None: sees everything
    rope: Rope | None  # None: positions do not turn anything
    experts: MixtureOfExperts | None


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
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"
    scale: float  # of attention scores
    activation: Activation = "silu"
    qk_norm: bool = False
    sandwich: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    softcap: float | None = None  # of attention scores
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def facts(self) -> Facts:
        return Facts(self.vocab_size, self.max_positions, self.eos_ids, self.dtype)


def load_config(directory: Path) -> ModelConfig:
    """Reads config.json and generation_config.json. Raises ModelError for what the decoder does not know."""
    file = directory / "config.json"
    raw = read_json(file)
    architecture = architecture_of(raw)
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnknownModelError(f"{directory} holds a {architecture}; the decoder knows {', '.join(FAMILIES)}")
    text = raw.get("text_config")  # a model that sees, too, writes its decoder's config within its own
    raw = {**family.defaults, **raw, **(text if isinstance(text, dict) else {})}
    checked(raw, file)
    _refuse_what_is_computed_otherwise(raw, directory)
    activation = raw.get(family.activation) or raw.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise UnknownModelError(
            f"{directory}: {family.activation} is {activation!r}; the decoder knows {', '.join(ACTIVATIONS)}"
        )
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_q_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_positions=raw["max_position_embeddings"],
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.tied)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        layers=_layers(raw, family, head_dim, directory),
        eos_ids=eos_ids_of(directory),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        scale=(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        activation=ACTIVATIONS[activation],
        qk_norm=family.qk_norm,
        sandwich=family.sandwich,
        norm_offset=family.norm_offset,
        embedding_scale=raw["hidden_size"] ** 0.5 if family.scaled_embedding else 1.0,
        softcap=raw.get("attn_logit_softcapping"),
        logit_softcap=raw.get("final_logit_softcapping"),
    )


def architecture_of(raw: Raw) -> str:
    """The first that config.json names."""
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "none"


def _refuse_what_is_computed_otherwise(raw: Raw, directory: Path) -> None:
    quantisation = raw.get("quantization_config")
    if quantisation and raw.get("quantization") is None:  # MLX's is written under both names
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise ModelError(
            f"{directory}: the checkpoint is quantised ({method}), which cannot be read: take the one it was made "
            "from, one of MLX, or a GGUF file"
        )
    if raw.get("use_bidirectional_attention"):
        raise ModelError(f"{directory}: use_bidirectional_attention makes it an encoder, which cannot be served")


def _layers(raw: Raw, family: Family, head_dim: int, directory: Path) -> tuple[LayerConfig, ...]:
    """layer_types says which layers slide; the family's own rule counts only where it is not given (vllm#49795)."""
    count = raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or [SLIDING if slides else SEES_ALL for slides in family.slides(raw, count)]
    every = raw.get("no_rope_layer_interval") or count + 1
    turning = raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]  # 0: does not turn
    if len(kinds) != count or len(turning) != count:
        raise ModelError(
            f"{directory / 'config.json'} has {count} layers, {len(kinds)} layer_types, {len(turning)} no_rope_layers"
        )
    if unknown := set(kinds) - {SLIDING, SEES_ALL}:
        raise UnknownModelError(
            f"{directory}: layer_types has {', '.join(sorted(unknown))}; the decoder knows {SLIDING} and {SEES_ALL}"
        )
    ropes = {kind: _rope(raw, family, head_dim, kind, directory) for kind in set(kinds)}
    experts = _experts(raw, family.experts, directory)
    dense = set(raw.get("mlp_only_layers") or ())
    sparse_step = raw.get("decoder_sparse_step", 1)
    return tuple(
        LayerConfig(
            window=raw.get("sliding_window") if kind == SLIDING else None,
            rope=ropes[kind] if turns else None,
            experts=experts if i not in dense and sparse_step and (i + 1) % sparse_step == 0 else None,
        )
        for i, (kind, turns) in enumerate(zip(kinds, turning, strict=True))
    )


def _rope(raw: Raw, family: Family, head_dim: int, kind: str, directory: Path) -> Rope:
    """transformers 5 writes rope_parameters, by kind of layer where they differ; before: rope_theta, rope_scaling."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta: float = raw.get("rope_theta") or 10_000.0
    if kind in given:
        given = given[kind]
    elif family.local_theta is not None and kind == SLIDING:
        given, theta = {}, raw.get("rope_local_base_freq") or family.local_theta
    theta = given.get("rope_theta") or theta
    share: float = given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    scaling = given.get("rope_type") or given.get("type") or "default"
    scaling = family.scalings.get(scaling, scaling)
    if scaling not in SCALINGS:
        raise UnknownModelError(f"{directory}: RoPE scaling {scaling!r}; the decoder knows {', '.join(SCALINGS)}")
    longest = raw["max_position_embeddings"]
    # Phi-3 writes the positions of training beside the scaling, not within.
    trained = given.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or longest
    return Rope(
        theta=float(theta),
        dim=int(head_dim * share),
        max_positions=longest,
        trained_positions=trained,
        scaling=scaling,
        parameters={**given, "original_max_position_embeddings": trained},
    )


def _experts(raw: Raw, experts: Experts | None, directory: Path) -> MixtureOfExperts | None:
    if experts is None:
        return None
    count: Any = next((raw[key] for key in experts.number if key in raw), None)
    try:
        return MixtureOfExperts(
            module=experts.module,
            split=experts.split,
            count=int(count),
            chosen=int(raw["num_experts_per_tok"]),
            width=int(raw[experts.width]),
            normalise=bool(raw.get("norm_topk_prob", False)) if experts.normalise is None else experts.normalise,
        )
    except (KeyError, TypeError, ValueError):
        raise ModelError(
            f"{directory / 'config.json'} does not say how many experts there are, or of what width"
        ) from None


def eos_ids_of(directory: Path) -> frozenset[int]:
    """Generation settings know more end tokens than the model's config. Raises ModelError."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id", read_json(directory / "config.json").get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"{directory}: eos_token_id is {eos!r}, and should be a number or several")
    return frozenset(ids)
