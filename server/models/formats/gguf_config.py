"""Translates a GGUF file's metadata to config.json's keys, so that config.py reads it like any other. Knows no tensor.

What differs between architectures is data: a row in ARCHITECTURES. llama.cpp's own rules, which its files do not spell
out, are in the rows too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf, log, prod
from typing import Any, NamedTuple

from server.models.config import SEES_ALL, SLIDING
from server.models.config_file import MOST_LAYERS, shortened
from server.models.errors import ModelError
from server.models.formats.gguf_file import Header

DTYPES = {0: "float32", 1: "float16"}  # by type of tensor; all others are computed in bfloat16

NAMES = {  # of tensors: the decoder's, without "model." and the layer -> the file's, without "blk.<layer>."
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


class Architecture(NamedTuple):
    """The names by which llama.cpp writes a family."""

    family: str  # a row of families.py
    names: Mapping[str, str] = NAMES
    permuted: bool = False  # rows of q and k: the two halves of a head interleaved
    norm_offset: float = 0.0  # added to the weights of norms
    sees_all_every: int | None = None  # every n-th layer sees everything; None: none does, if there is a window
    activation: str = "silu"
    defaults: Mapping[str, Any] = {}  # metadata that older files leave out
    local_theta: float | None = None  # RoPE of sliding layers, which then are not stretched either
    layers_of_27b: int | None = None  # that size scales scores by hidden_size / heads, the others by key_length


_GEMMA = Architecture("", names=NAMES | _GEMMA_NAMES, norm_offset=1.0, activation="gelu_pytorch_tanh", sees_all_every=2)
ARCHITECTURES: Mapping[str, Architecture] = {  # by general.architecture
    "llama": Architecture("LlamaForCausalLM", permuted=True),  # Mistral, too
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM", names=NAMES | _PHI_NAMES),
    "gemma2": _GEMMA._replace(
        family="Gemma2ForCausalLM",
        defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096},
        layers_of_27b=46,
    ),
    "gemma3": _GEMMA._replace(family="Gemma3ForCausalLM", sees_all_every=6, local_theta=10_000.0, layers_of_27b=62),
}


class Keys:
    """The metadata of one file, by keys without the architecture's name in front."""

    def __init__(self, header: Header) -> None:
        """Wrap a header. Raises ModelError for an unknown architecture, and for a part of a model."""
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{header.file} holds a model of architecture {shortened(self.architecture)}; "
                f"GGUF files can be of {', '.join(ARCHITECTURES)}"
            )
        self.row = ARCHITECTURES[self.architecture]
        if header.metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(f"{header.file} is one part of several: join them with `llama-gguf-split --merge`")
        if self.get("expert_count"):
            raise ModelError(f"{header.file} has experts, which are read from Hugging Face directories only")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the file's value; else the architecture's default; else `default`."""
        found = self.header.metadata.get(f"{self.architecture}.{key}")
        return self.row.defaults.get(key, default) if found is None else found

    def number(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """Return a number above 0 that is the same for all layers. Raises ModelError."""
        found = self.get(key, default)
        if isinstance(found, list) and found and all(number == found[0] for number in found):
            found = found[0]
        if isinstance(found, list) or found is None:
            what = "is missing" if found is None else "differs from layer to layer"
            raise ModelError(f"{self.header.file}: {self.architecture}.{key} {what}; the model cannot be served")
        if type(found) is not int or not 0 < found <= most:
            raise self._strange(key, found, f"a number from 1 to {most}")
        return found

    def real(self, key: str, default: float | None = None) -> float | None:
        """Return a finite number that is not negative, or None. Raises ModelError."""
        found: float | None = self.get(key, default)
        if found is not None and (type(found) not in (int, float) or not 0 <= found < inf):
            raise self._strange(key, found, "a finite number, not below 0")
        return found

    def text(self, key: str, default: str) -> str:
        """Return a word, or the default if the file has none. Raises ModelError."""
        found = self.get(key, default)
        if not isinstance(found, str):
            raise self._strange(key, found, "a word")
        return found

    def _strange(self, key: str, found: Any, expected: str) -> ModelError:
        name = f"{self.architecture}.{key}"
        return ModelError(f"{self.header.file}: {name} is {shortened(found)}, and should be {expected}")

    @property
    def heads(self) -> int:
        return self.number("attention.head_count")

    @property
    def kv_heads(self) -> int:
        return self.number("attention.head_count_kv", self.heads)


def config_of(header: Header) -> dict[str, Any]:
    """Return the contents of config.json. Raises ModelError."""
    keys = Keys(header)
    tensors, row = header.tensors, keys.row
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{header.file} has no tensor 'token_embd.weight'; is it a vocabulary only?")
    if len(tensors["token_embd.weight"].shape) != 2:
        raise ModelError(f"{header.file}: tensor 'token_embd.weight' is not a matrix")
    vocab_size, width = tensors["token_embd.weight"].shape
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise ModelError(f"{header.file} has {len(tokens)} tokens, and 'token_embd.weight' has rows for {vocab_size}")
    layers, heads = keys.number("block_count", most=MOST_LAYERS), keys.heads
    head_dim = keys.number("attention.key_length", width // heads)
    if keys.number("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{header.file}: values are not as long as keys; the model cannot be served")
    window = keys.get("attention.sliding_window") or None  # 0: none, too
    scale = keys.real("attention.scale") or (width / heads if layers == row.layers_of_27b else head_dim) ** -0.5
    return {
        "architectures": [row.family],
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": row.activation,
        "hidden_activation": row.activation,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "query_pre_attn_scalar": scale**-2,  # config.json's word for the scale
        "attn_logit_softcapping": keys.real("attn_logit_softcapping"),
        "final_logit_softcapping": keys.real("final_logit_softcapping"),
        "sliding_window": window,
        "layer_types": _layer_types(keys, layers, window),
        "rope_parameters": _ropes(keys, head_dim),
        "dtype": _dtype(header),
    }


def _layer_types(keys: Keys, layers: int, window: int | None) -> list[str]:
    pattern = keys.get("attention.sliding_window_pattern", keys.row.sees_all_every)
    if not isinstance(pattern, list):
        every = layers + 1 if pattern is None else keys.number("attention.sliding_window_pattern", pattern)
        pattern = [(i + 1) % every != 0 for i in range(layers)]
    return [SLIDING if slides and window else SEES_ALL for slides in pattern]


def _dtype(header: Header) -> str:
    """Return the type that most weights have."""
    weights: Counter[int] = Counter()
    for tensor in header.tensors.values():
        weights[tensor.type] += prod(tensor.shape)
    return DTYPES.get(weights.most_common(1)[0][0], "bfloat16")


# ---------------------------------------------------------------- RoPE
def _ropes(keys: Keys, head_dim: int) -> dict[str, Any]:
    turning = keys.number("rope.dimension_count", head_dim)
    rope = {"rope_theta": keys.real("rope.freq_base", 10_000.0), "partial_rotary_factor": turning / head_dim}
    if keys.row.local_theta is None:
        return rope | _scaling(keys, turning)
    local = {"rope_theta": keys.real("rope.freq_base_swa", keys.row.local_theta), "rope_type": "default"}
    return {SEES_ALL: rope | _scaling(keys, turning), SLIDING: rope | local}


def _scaling(keys: Keys, turning: int) -> dict[str, Any]:
    """Return the scaling of frequencies: a factor for each (as longrope has it), or a rule."""
    kind = keys.text("rope.scaling.type", "linear")  # "none" means it even if there is a factor
    factor = keys.real("rope.scaling.factor") or keys.real("rope.scale_linear") or 1.0
    trained = keys.get("rope.scaling.original_context_length") or keys.number("context_length")
    attn_factor = keys.real("rope.scaling.attn_factor") or 1.0
    if factors := _factors(keys, turning // 2):
        return {
            "rope_type": "longrope",
            "attention_factor": attn_factor,
            "original_max_position_embeddings": trained,
        } | factors
    if kind == "yarn":
        betas = {name: keys.real(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return betas | {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": attn_factor * (1 + 0.1 * log(factor)),
            "original_max_position_embeddings": trained,
        }
    if kind not in ("none", "linear", "longrope"):
        raise ModelError(
            f"{keys.header.file}: RoPE scaling {shortened(kind)} is not known; none, linear, yarn and longrope are"
        )
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {"rope_type": "default"}


def _factors(keys: Keys, pairs: int) -> dict[str, list[float]]:
    """Return a factor for each pair of dimensions; Llama 3's are the same for texts of any length."""
    names = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
    if "rope_freqs.weight" in keys.header.tensors:
        names = dict.fromkeys(names, "rope_freqs.weight")
    return {key: keys.header.floats(name, pairs) for key, name in names.items() if name in keys.header.tensors}
