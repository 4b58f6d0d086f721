"""Runs any decoder-only model of transformers, with kvmux's attention in place of the model's own.

The model's code runs unchanged; for attention it calls the step's `Attention`, which stores keys and values under each
sequence's strategy. Configs differ from family to family, so the parameters of each layer's attention (heads, scale,
window, softcap) are recorded in a probe: one forward pass over a short text with its tokens in reverse order. The model
is refused unless transformers' own attention gives the same logits for that text. The probe is too short to show
windows: they are taken from the layer or else from the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernels.ops import Attention
from kernels.products import MAX_SUMMED, multiply
from kernels.types import LayerSpec
from server.models.base import ForwardStepMixin
from server.models.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelInfo
from server.models.config_file import check_counts, read_json, shorten_repr
from server.models.errors import ModelError
from server.models.files.end_tokens import read_eos_ids
from server.models.no_cache import NoCacheAttention
from server.records import WeightUsage

ATTN_IMPLEMENTATION = "kvmux"  # the name under which the attention is registered with transformers
MAX_MESSAGE_LENGTH = 300  # maximum number of characters of transformers' error messages that are shown
PROBE_TOKENS = 24
# Maximum difference between logits with kvmux's attention and with the model's own, relative to the largest logit
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.02}

_current_attention: ContextVar[Attention] = ContextVar("attention of the step that runs")


class TransformersModel(ForwardStepMixin):
    """A model that transformers computes; implements `server.models.base.Model`."""

    impl: Literal["transformers"] = "transformers"

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, *, positions: int | None = None
    ) -> None:
        """Load the model. `positions`: the length of the longest text, by default max_position_embeddings.

        Raises ModelError if transformers cannot load it, or if its layers have other state than keys and values.
        """
        self.info = read_transformers_info(directory)
        self.dtype = dtype
        self._model = _load_model(directory, dtype, device)
        positions = positions or self.info.max_positions
        try:
            _freeze_longrope(self._model, positions)
            self.layer_specs = _probe_layers(self._model, self.info, positions, device)
        except ModelError as error:
            raise ModelError(f"{directory}: {error}") from None

    @property
    def device(self) -> torch.device:
        found: torch.device = self._model.device
        return found

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self._model.parameters())

    @property
    def weight_formats(self) -> Mapping[str, WeightUsage]:
        count = sum(p.numel() for p in self._model.parameters())
        return {str(self.dtype).removeprefix("torch."): WeightUsage(count, self.weight_bytes)}

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V] float32 of ids [N] int64, for rows `attention.logit_index`."""
        return _compute_logits(self._model, attention, input_ids=ids[None])

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [N, d] of ids [N] int64."""
        found: Tensor = self._model.get_input_embeddings()(ids)
        return found

    def count_flops(self, num_tokens: int, num_logits: int) -> None:
        """Return None (unknown): only the model's own code has the shapes of its matrix products."""

    def forward_embedded(self, x: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V] float32 from embeddings x [N, d], as `forward` does from ids."""
        return _compute_logits(self._model, attention, inputs_embeds=x[None])


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
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many kinds for a bad config
        raise ModelError(f"{directory}: transformers cannot read its config: {_format_error(error)}") from None


def _load_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTN_IMPLEMENTATION, _attend)
    empty: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):  # the meta device takes no memory
            numbers = sum(p.numel() for p in empty.from_config(_load_config(directory)).parameters())
        _check_size(directory, numbers)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=ATTN_IMPLEMENTATION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except ModelError:
        raise
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            raise ModelError(f"{directory}: transformers has no decoder-only model of this architecture") from None
        raise ModelError(
            f"{directory}: transformers cannot load it with kvmux's attention: {_format_error(error)}"
        ) from None
    model, found = loaded
    if lacking := sorted(found["missing_keys"]) + sorted(str(key) for key in found["mismatched_keys"]):
        raise ModelError(
            f"{directory} is incomplete, or config.json is of another model: {lacking[0]} is missing or has another "
            f"shape (tensors with such faults: {len(lacking)})"
        )
    _replace_long_linear_layers(model)
    return model.to(device).eval().requires_grad_(False)


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


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_MESSAGE_LENGTH]}"


def _freeze_longrope(model: nn.Module, positions: int) -> None:
    """Fix LongRoPE's frequencies to the set (short or long) for texts of up to `positions` tokens.

    transformers would choose the set by the longest text of each step; then new keys would not match cached ones, and
    sequences would affect each other. Raises ModelError if the model has code of its own that chooses in this way.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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


def _compute_logits(model: Any, attention: Attention, **tokens: Tensor) -> Tensor:
    """Return logits [K, V] float32 of the rows `attention.logit_index`.

    `tokens` are input_ids [1, N] or inputs_embeds [1, N, d].
    """
    token = _current_attention.set(attention)
    try:
        found: Tensor = model(
            **tokens,
            position_ids=attention.positions[None],
            use_cache=False,
            logits_to_keep=attention.logit_index,
        ).logits[0]
    finally:
        _current_attention.reset(token)
    return found.float()


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **how: Any
) -> tuple[Tensor, None]:
    """Compute attention with transformers' signature: q [1,Hq,N,D], k and v [1,H,N,D] -> (output [1,N,Hq,D], None)."""
    attention = _current_attention.get()
    if isinstance(attention, _Probe):
        attention.record_layer(module, q, k, v, how)
    out = attention.attend(_get_layer_index(module), *(x[0].transpose(0, 1) for x in (q, k, v)))
    return out[None].contiguous(), None


def _get_layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ModelError(f"{type(module).__name__} has no layer_idx: the model cannot be served")
    return index


# ---------------------------------------------------------------- the probe
class _Probe(NoCacheAttention):
    """Attention over one short text that records the parameters of every layer's attention (`layer_specs`)."""

    def __init__(self, length: int, config: Any, positions: int, device: torch.device) -> None:
        self.layer_specs: dict[int, LayerSpec] = {}
        super().__init__(self.layer_specs, length, device)
        self.logit_index = self.positions  # all rows
        # Positions are in reverse, to detect models that take the order of rows for positions.
        self.positions = self.positions.flip(0)
        self._config = config
        self._max_positions = positions  # number of tokens of the longest text

    def record_layer(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, how: Mapping[str, Any]) -> None:
        index = _get_layer_index(module)
        if index in self.layer_specs:
            raise ModelError(f"layer {index} attends twice: the model cannot be served")
        scale = how.get("scaling")
        self.layer_specs[index] = LayerSpec(
            num_kv_heads=k.shape[1],
            num_q_heads=q.shape[1],
            head_dim=k.shape[3],
            v_head_dim=v.shape[3],
            window=how.get("sliding_window") or self._find_window(index),
            scale=q.shape[3] ** -0.5 if scale is None else float(scale),
            softcap=how.get("softcap"),
            sink_logits=how.get("s_aux"),
        )

    def _find_window(self, index: int) -> int | None:
        """Return a layer's window from the config, for models whose code passes it only as a mask (vllm#49795)."""
        kinds = getattr(self._config, "layer_types", None)
        window = getattr(self._config, "sliding_window", None)
        if kinds is None:
            if window is not None and window < self._max_positions:
                raise ModelError(
                    f"config.json has sliding_window {window}, but no layer_types to tell which layers have it: "
                    f"give --max-seq-len {window}"
                )
            return None
        if kinds[index] not in (SLIDING_ATTENTION, FULL_ATTENTION):
            raise ModelError(
                f"layer {index} is of kind {kinds[index]!r}; only {SLIDING_ATTENTION} and {FULL_ATTENTION} can be "
                "served"
            )
        return window if kinds[index] == SLIDING_ATTENTION else None


@torch.inference_mode()
def _probe_layers(model: Any, info: ModelInfo, positions: int, device: torch.device) -> list[LayerSpec]:
    """Return every layer's attention parameters. Raises ModelError if the model cannot run with kvmux's attention."""
    name, config = type(model).__name__, model.config.get_text_config()
    probe = _Probe(PROBE_TOKENS, config, positions, device)
    ids = (torch.arange(PROBE_TOKENS, device=device) * 7919) % info.vocab_size
    try:
        ours = _compute_logits(model, probe, input_ids=ids.flip(0)[None]).flip(0)
    except ModelError:
        raise
    except Exception as error:  # the model's `forward` lacks position_ids or logits_to_keep, or fails in another way
        raise ModelError(f"{name} cannot be served: {_format_error(error)}") from None
    layers = config.num_hidden_layers
    if sorted(probe.layer_specs) != list(range(layers)):
        without = [str(i) for i in range(layers) if i not in probe.layer_specs]
        raise ModelError(
            f"{name} cannot be served: layers {', '.join(without)} of {layers} do not attend over keys and values "
            "through transformers' AttentionInterface (linear attention, state spaces, ALiBi, or older code)"
        )
    model.set_attn_implementation("eager")
    theirs = model(input_ids=ids[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    if not ours.isfinite().all():
        raise ModelError(f"{name} cannot be served: its logits are NaN or infinite; is the checkpoint damaged?")
    if (ours - theirs).abs().max() > PROBE_TOLERANCE[model.dtype] * theirs.abs().max():
        raise ModelError(f"{name} cannot be served: its logits with kvmux's attention and with its own differ")
    return [probe.layer_specs[i] for i in range(layers)]
