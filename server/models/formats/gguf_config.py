"""Translates a GGUF file's metadata to the keys of config.json, which config.py then reads as it does for any model.

Differences between architectures are data: each has a row in ARCHITECTURES, with the rules that are in llama.cpp's code
and not in GGUF files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf, log, prod
from typing import Any, NamedTuple

from server.models.config import FULL_ATTENTION, SLIDING_ATTENTION
from server.models.config_file import MAX_LAYERS, shorten_repr
from server.models.errors import ModelError
from server.models.formats.gguf_file import GGUFHeader

DTYPES = {0: "float32", 1: "float16"}  # dtypes to compute in, by GGML tensor type; bfloat16 for all other types

TENSOR_NAMES = {  # Hugging Face name without "model.layers.<layer>." -> GGUF name without "blk.<layer>."
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PHI_NAMES = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class GGUFArchitecture(NamedTuple):
    """How llama.cpp writes a model family to a GGUF file."""

    family: str  # the key of the family in families.FAMILIES
    names: Mapping[str, str] = TENSOR_NAMES
    permuted: bool = False  # whether the rows of q and k alternate between the two halves of each head
    norm_offset: float = 0.0  # number that the converter added to the weights of norms
    # Every n-th layer has full attention; None: no layer, if the file has a window
    full_attention_interval: int | None = None
    activation: str = "silu"
    defaults: Mapping[str, Any] = {}  # values of keys that older files lack
    local_theta: float | None = None  # rope_theta of sliding layers, which then have no RoPE scaling
    layers_of_27b: int | None = None  # a model with so many layers scales attention by (hidden_size / heads) ** -0.5


_GEMMA = GGUFArchitecture(
    "", names=TENSOR_NAMES | _GEMMA_NAMES, norm_offset=1.0, activation="gelu_pytorch_tanh", full_attention_interval=2
)
# by the file's general.architecture: how llama.cpp writes that architecture
ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("LlamaForCausalLM", permuted=True),  # Mistral, too
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", permuted=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM"),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", names=TENSOR_NAMES | _PHI_NAMES),
    "gemma2": _GEMMA._replace(
        family="Gemma2ForCausalLM",
        defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096},
        layers_of_27b=46,
    ),
    "gemma3": _GEMMA._replace(
        family="Gemma3ForCausalLM", full_attention_interval=6, local_theta=10_000.0, layers_of_27b=62
    ),
}


class GGUFMetadata:
    """Reads a GGUF file's metadata by keys without the prefix, which is the architecture's name."""

    def __init__(self, header: GGUFHeader) -> None:
        """Wrap a header. Raises ModelError for an unknown architecture, or a mixture of experts."""
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{header.file} holds a model of architecture {shorten_repr(self.architecture)}; "
                f"GGUF files can be of {', '.join(ARCHITECTURES)}"
            )
        self.arch_spec = ARCHITECTURES[self.architecture]
        if self.get("expert_count"):
            raise ModelError(f"{header.file} has experts, which are read from Hugging Face directories only")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value in the file, or else the architecture's default, or else `default`."""
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        return self.arch_spec.defaults.get(key, default) if value is None else value

    def get_int(self, key: str, default: int | None = None, largest: int = 2**31 - 1) -> int:
        """Return a whole number from 1 to `largest`. Raises ModelError for other values, or if layers differ in it."""
        value = self.get(key, default)
        if isinstance(value, list) and value and all(number == value[0] for number in value):
            value = value[0]
        if isinstance(value, list) or value is None:
            what = "is missing" if value is None else "differs from layer to layer"
            raise ModelError(f"{self.header.file}: {self.architecture}.{key} {what}; the model cannot be served")
        if type(value) is not int or not 0 < value <= largest:
            raise self._invalid_value_error(key, value, f"should be a number from 1 to {largest}")
        return value

    def get_float(self, key: str, default: float | None = None) -> float | None:
        """Return a finite number >= 0; None if there is none and no default. Raises ModelError for other values."""
        value: float | None = self.get(key, default)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < inf):
            raise self._invalid_value_error(key, value, "should be a finite number, not below 0")
        return value

    def get_str(self, key: str, default: str) -> str:
        """Return a string, or the default if the file has none. Raises ModelError for other values."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._invalid_value_error(key, value, "should be a string")
        return value

    def _invalid_value_error(self, key: str, found: Any, expected: str) -> ModelError:
        name = f"{self.architecture}.{key}"
        return ModelError(f"{self.header.file}: {name} is {shorten_repr(found)}, and {expected}")

    @property
    def heads(self) -> int:
        return self.get_int("attention.head_count")

    @property
    def kv_heads(self) -> int:
        return self.get_int("attention.head_count_kv", self.heads)


def make_config(header: GGUFHeader) -> dict[str, Any]:
    """Return the contents of config.json for the model in a GGUF file. Raises ModelError for invalid metadata."""
    keys = GGUFMetadata(header)
    tensors, arch_spec = header.tensors, keys.arch_spec
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{header.file} has no tensor 'token_embd.weight'; is it a vocabulary only?")
    if len(tensors["token_embd.weight"].shape) != 2:
        raise ModelError(f"{header.file}: tensor 'token_embd.weight' is not a matrix")
    vocab_size, width = tensors["token_embd.weight"].shape
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise ModelError(f"{header.file} has {len(tokens)} tokens, and 'token_embd.weight' has rows for {vocab_size}")
    layers, heads = keys.get_int("block_count", largest=MAX_LAYERS), keys.heads
    head_dim = keys.get_int("attention.key_length", width // heads)
    if keys.get_int("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{header.file}: value vectors are not as long as key vectors; the model cannot be served")
    window = keys.get("attention.sliding_window") or None  # a window of 0 means none, too
    scale = (
        keys.get_float("attention.scale") or (width / heads if layers == arch_spec.layers_of_27b else head_dim) ** -0.5
    )
    return {
        "architectures": [arch_spec.family],
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": keys.get_int("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.get_int("context_length"),
        "rms_norm_eps": keys.get_float("attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": arch_spec.activation,
        "hidden_activation": arch_spec.activation,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "query_pre_attn_scalar": scale**-2,  # config.json gives the scale of attention in this form
        "attn_logit_softcapping": keys.get_float("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get_float("final_logit_softcapping"),
        "sliding_window": window,
        "layer_types": _layer_types(keys, layers, window),
        "rope_parameters": _parse_rope(keys, head_dim),
        "dtype": _find_main_dtype(header),
    }


def _layer_types(keys: GGUFMetadata, layers: int, window: int | None) -> list[str]:
    pattern = keys.get("attention.sliding_window_pattern", keys.arch_spec.full_attention_interval)
    if not isinstance(pattern, list):
        interval = layers + 1 if pattern is None else keys.get_int("attention.sliding_window_pattern", pattern)
        pattern = [(i + 1) % interval != 0 for i in range(layers)]
    return [SLIDING_ATTENTION if sliding and window else FULL_ATTENTION for sliding in pattern]


def _find_main_dtype(header: GGUFHeader) -> str:
    """Return the dtype to compute in: that of most weights, or bfloat16 if most are quantized."""
    weights: Counter[int] = Counter()
    for tensor in header.tensors.values():
        weights[tensor.type] += prod(tensor.shape)
    return DTYPES.get(weights.most_common(1)[0][0], "bfloat16")


# ---------------------------------------------------------------- RoPE
def _parse_rope(keys: GGUFMetadata, head_dim: int) -> dict[str, Any]:
    rotary_dim = keys.get_int("rope.dimension_count", head_dim)
    rope = {"rope_theta": keys.get_float("rope.freq_base", 10_000.0), "partial_rotary_factor": rotary_dim / head_dim}
    if keys.arch_spec.local_theta is None:
        return rope | _parse_rope_scaling(keys, rotary_dim)
    local = {"rope_theta": keys.get_float("rope.freq_base_swa", keys.arch_spec.local_theta), "rope_type": "default"}
    return {FULL_ATTENTION: rope | _parse_rope_scaling(keys, rotary_dim), SLIDING_ATTENTION: rope | local}


def _parse_rope_scaling(keys: GGUFMetadata, rotary_dim: int) -> dict[str, Any]:
    """Return rope_scaling of config.json; if the file has factors for each frequency, its type is longrope."""
    kind = keys.get_str("rope.scaling.type", "linear")  # "none": no scaling, even if the file has a factor
    factor = keys.get_float("rope.scaling.factor") or keys.get_float("rope.scale_linear") or 1.0
    trained = keys.get("rope.scaling.original_context_length") or keys.get_int("context_length")
    attn_factor = keys.get_float("rope.scaling.attn_factor") or 1.0
    if factors := _read_rope_factors(keys, rotary_dim // 2):
        return {
            "rope_type": "longrope",
            "attention_factor": attn_factor,
            "original_max_position_embeddings": trained,
        } | factors
    if kind == "yarn":
        betas = {name: keys.get_float(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return betas | {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": attn_factor * (1 + 0.1 * log(factor)),
            "original_max_position_embeddings": trained,
        }
    if kind not in ("none", "linear", "longrope"):
        raise ModelError(
            f"{keys.header.file}: RoPE scaling {shorten_repr(kind)} is not known; none, linear, yarn and longrope are"
        )
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {"rope_type": "default"}


def _read_rope_factors(keys: GGUFMetadata, pairs: int) -> dict[str, list[float]]:
    """Return the short and long factors for each pair of dimensions; Llama 3 has one set for both. {}: no factors."""
    names = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
    if "rope_freqs.weight" in keys.header.tensors:
        names = dict.fromkeys(names, "rope_freqs.weight")
    return {key: keys.header.read_floats(name, pairs) for key, name in names.items() if name in keys.header.tensors}
