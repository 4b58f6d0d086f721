"""The differences between model families as data: one row of FAMILIES per architecture. Knows no tensors.

An architecture without a row is served through transformers (transformers_backend.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

RawConfig = Mapping[str, Any]  # the contents of config.json
# Function: (config.json, number of layers) -> for each layer, whether it has a sliding window
SlidingRule = Callable[[RawConfig, int], list[bool]]


def _slide_none(raw: RawConfig, layers: int) -> list[bool]:
    return [False] * layers


def _slide_all(raw: RawConfig, layers: int) -> list[bool]:
    return [raw.get("sliding_window") is not None] * layers


def _slide_upper_if_enabled(raw: RawConfig, layers: int) -> list[bool]:
    """Follow Qwen's rule: layers from max_window_layers on have a sliding window if use_sliding_window is true."""
    first = raw.get("max_window_layers")
    return [bool(raw.get("use_sliding_window")) and first is not None and i >= first for i in range(layers)]


def _slide_all_if_enabled(raw: RawConfig, layers: int) -> list[bool]:
    return [bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None] * layers


def _slide_alternate(raw: RawConfig, layers: int) -> list[bool]:
    return [i % 2 == 0 for i in range(layers)]


def _slide_all_but_every_nth(raw: RawConfig, layers: int) -> list[bool]:
    return [(i + 1) % (raw.get("sliding_window_pattern") or 6) != 0 for i in range(layers)]


class MoENames(NamedTuple):
    """The names that a family's mixture of experts has in config.json and in checkpoints."""

    module: str  # name within a layer: "<module>.gate.weight" is the router, "<module>.experts.0..." the first expert
    # Keys of config.json for the number of experts; the first key that is present is used
    num_experts_keys: tuple[str, ...]
    intermediate_size_key: str
    # Whether the chosen experts' weights are scaled to sum to 1; None: config.json decides
    norm_topk_prob: bool | None = True
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names of an expert's matrices


NOTHING: Mapping[str, Any] = {}


class ModelFamily(NamedTuple):
    """How a model architecture differs from Llama."""

    qkv_bias: bool | None = None  # whether q, k and v have a bias; None: attention_bias in config.json decides
    qk_norm: bool = False  # whether each head's query and key is normalized before RoPE
    sliding_rule: SlidingRule = _slide_none  # which layers have a sliding window if config.json has no layer_types
    sandwich_norm: bool = False  # whether attention and feed-forward are also followed by a norm
    norm_offset: float = 0.0  # number added to the weights of norms
    scaled_embedding: bool = False  # whether embeddings are multiplied by the square root of hidden_size
    tie_embeddings: bool = False  # whether lm_head is the embedding if config.json has no tie_word_embeddings
    activation_key: Literal["hidden_act", "hidden_activation"] = "hidden_act"
    experts: MoENames | None = None
    local_theta: float | None = None  # rope_theta of sliding layers, if config.json has no rope_local_base_freq
    defaults: RawConfig = NOTHING  # values of keys that config.json may leave out, as in transformers
    rope_scaling_aliases: Mapping[str, str] = NOTHING  # other names of RoPE scalings -> names in ROPE_SCALINGS


_MIXTRAL = MoENames("block_sparse_moe", ("num_local_experts",), "intermediate_size", projections=("w1", "w3", "w2"))
_QWEN3_MOE = MoENames("mlp", ("num_experts", "num_local_experts"), "moe_intermediate_size", norm_topk_prob=None)

_GEMMA = ModelFamily(
    sandwich_norm=True,
    norm_offset=1.0,
    scaled_embedding=True,
    tie_embeddings=True,
    activation_key="hidden_activation",
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
)

_GEMMA2_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192}
_GEMMA3_DEFAULTS = {"vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6}
_GEMMA3 = _GEMMA._replace(
    qk_norm=True,
    sliding_rule=_slide_all_but_every_nth,
    local_theta=10_000.0,
    defaults={**_GEMMA.defaults, **_GEMMA3_DEFAULTS},
)
_QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(),
    "MistralForCausalLM": ModelFamily(qkv_bias=False, sliding_rule=_slide_all, defaults={"sliding_window": 4096}),
    "MixtralForCausalLM": ModelFamily(
        qkv_bias=False, sliding_rule=_slide_all, experts=_MIXTRAL, defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5}
    ),
    "Phi3ForCausalLM": ModelFamily(
        qkv_bias=False,
        sliding_rule=_slide_all,
        defaults={"rms_norm_eps": 1e-5},
        rope_scaling_aliases={"su": "longrope", "yarn": "longrope"},  # names in config.json of the first Phi-3 models
    ),
    "Qwen2ForCausalLM": ModelFamily(qkv_bias=True, sliding_rule=_slide_upper_if_enabled, defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": ModelFamily(
        qk_norm=True, sliding_rule=_slide_upper_if_enabled, defaults={**_QWEN_DEFAULTS, "head_dim": 128}
    ),
    "Qwen3MoeForCausalLM": ModelFamily(
        qk_norm=True, sliding_rule=_slide_all_if_enabled, experts=_QWEN3_MOE, defaults={"sliding_window": 4096}
    ),
    "SmolLM3ForCausalLM": ModelFamily(
        sliding_rule=_slide_upper_if_enabled,
        tie_embeddings=True,
        defaults={"rope_theta": 2e6, "no_rope_layer_interval": 4, "max_window_layers": 28},
    ),
    "Gemma2ForCausalLM": _GEMMA._replace(
        sliding_rule=_slide_alternate, defaults={**_GEMMA.defaults, **_GEMMA2_DEFAULTS}
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,  # a multimodal model, of which only the text decoder is served
}
