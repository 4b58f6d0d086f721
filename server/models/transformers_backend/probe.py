"""Finds what the layers of a transformers model are like by running it on short texts, and whether it can be served.

Configs differ from family to family, so the parameters of each layer's attention (heads, scale, window, softcap) and
the shapes of what its layers with states keep are recorded in a forward pass. The model is refused unless kvmux's
attention gives the logits of its own, and unless texts with states that are computed in parts, packed with others, have
the logits of whole ones. The texts are too short to show windows: these are taken from the layer or from the config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.ops import Attention, AttentionSlice
from kernels.states import NO_SLOT, States, StateSpec, StateStore, compute_slot_bytes
from kernels.store import ALIGN, Pages
from kernels.types import LayerSpec
from server.models.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelInfo
from server.models.errors import ModelError
from server.models.no_cache import NoCacheAttention, attend_causally
from server.models.transformers_backend.attention import ATTN_IMPLEMENTATION, RunningStep, compute_logits
from server.models.transformers_backend.loading import format_error, make_empty_model
from server.models.transformers_backend.states import StateLayerFinder, make_cache, split_rows

PROBE_TOKENS = 24
# Maximum difference between logits with kvmux's attention and with the model's own, relative to the largest logit
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.02}
# In layer_types, layers with states beside attention
ATTENTION_OF_HYBRIDS = {"hybrid": FULL_ATTENTION, "hybrid_sliding": SLIDING_ATTENTION}
PARTS = ((1, 7, 16), (5, 4, 15))  # tokens of two texts in each step; all are PROBE_TOKENS


class FoundLayers(NamedTuple):
    """What a probe finds out about a model."""

    attention: Sequence[LayerSpec]
    states: Sequence[StateSpec]
    numbers: Mapping[int, int]  # of each attention layer among all of them, by transformers' index
    one_by_one: bool = False  # whether its code goes on from states with one token at a time only

    def begin_step(self, attention: Attention) -> RunningStep:
        """Return what the model's layers need to know of a step."""
        parts = split_rows(attention.slices, one_by_one=self.one_by_one) if self.states else None
        return RunningStep(attention, self.numbers, parts)


@torch.inference_mode()
def probe_layers(model: Any, info: ModelInfo, positions: int, device: torch.device) -> FoundLayers:
    """Return what the layers of a model are like. Raises ModelError if it cannot run with kvmux's attention."""
    name = type(model).__name__
    ids = (torch.arange(PROBE_TOKENS, device=device) * 7919) % info.vocab_size
    recorder = _Recorder(model.config.get_text_config(), positions)
    try:
        theirs = _run_as_it_is(model, ids)
        found = _record(model, ids, recorder)
        ours = _run_in_parts(model, ids, found)
        if found.states and not _agree(ours, theirs, model.dtype):
            found = found._replace(one_by_one=True)
            ours = _run_in_parts(model, ids, found)
    except ModelError as error:
        raise ModelError(f"{name} cannot be served: {error}") from None
    except Exception as error:  # the model's `forward` lacks position_ids or logits_to_keep, or fails in another way
        raise ModelError(f"{name} cannot be served: {format_error(error)}") from None
    if not ours.isfinite().all():
        raise ModelError(f"{name} cannot be served: its logits are NaN or infinite; is the checkpoint damaged?")
    if not _agree(ours, theirs, model.dtype):
        raise ModelError(f"{name} cannot be served: its logits with kvmux's attention and with its own differ")
    return found


def _agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    return bool((ours - theirs).abs().max() <= PROBE_TOLERANCE[dtype] * theirs.abs().max())


@torch.inference_mode()
def describe_layers(directory: Path, info: ModelInfo) -> FoundLayers:
    """Return what the layers of a model are like, without its weights: from shapes alone. Raises ModelError."""
    model = make_empty_model(directory)
    ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device="meta")
    try:
        return _record(model, ids, _Recorder(model.config.get_text_config(), info.max_positions))
    except ModelError as error:
        raise ModelError(f"{directory}: {type(model).__name__} cannot be served: {error}") from None
    except Exception as error:
        raise ModelError(f"{directory}: {type(model).__name__} cannot be served: {format_error(error)}") from None


def _run_as_it_is(model: Any, ids: Tensor) -> Tensor:
    """Return the logits [N, V] of a text that the model computes with its own attention, as a whole."""
    model.set_attn_implementation("eager")
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    return logits


# ---------------------------------------------------------------- what layers are like
class _Recorder:
    """Records the parameters of each attention layer that is called, by transformers' index."""

    def __init__(self, config: Any, positions: int) -> None:
        """`positions` is the number of tokens of the longest text."""
        self.layer_specs: dict[int, LayerSpec] = {}
        self._config = config
        self._max_positions = positions

    def record(self, index: int, q: Tensor, k: Tensor, v: Tensor, how: Mapping[str, Any]) -> None:
        """Record a call of transformers' attention interface: q [1,Hq,N,D], k [1,H,N,D], v [1,H,N,Dv]."""
        if index in self.layer_specs:
            raise ModelError(f"layer {index} attends twice")
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
        kind = ATTENTION_OF_HYBRIDS.get(kinds[index], kinds[index])
        if kind not in (SLIDING_ATTENTION, FULL_ATTENTION):
            raise ModelError(
                f"layer {index} is of kind {kind!r}; only {SLIDING_ATTENTION} and {FULL_ATTENTION} can be served"
            )
        return window if kind == SLIDING_ATTENTION else None


def _record(model: Any, ids: Tensor, recorder: _Recorder) -> FoundLayers:
    """Run a text, and return what the layers are like; layers with states are replaced by `StateLayer`s.

    Raises ModelError if there are layers that keep something else.
    """
    indices = {i: i for i in range(model.config.get_text_config().num_hidden_layers)}
    attention = NoCacheAttention(recorder.layer_specs, len(ids), ids.device)
    step = RunningStep(attention, indices, record=recorder.record)
    if (cache := make_cache(model)) is None:
        compute_logits(model, step, input_ids=ids[None])
        states: list[StateSpec] = []
    else:
        finder = StateLayerFinder(model, cache)
        compute_logits(model, step, input_ids=ids[None], cache=cache, use_cache=True)
        states = finder.replace_layers()
    attending = sorted(recorder.layer_specs)
    # Of a model with states, _run_in_parts shows whether the other layers keep anything
    if not states and attending != [*indices]:
        without = [str(i) for i in indices if i not in recorder.layer_specs]
        raise ModelError(
            f"layers {', '.join(without)} of {len(indices)} do not attend over keys and values through transformers' "
            "AttentionInterface (linear attention, state spaces, ALiBi, or older code)"
        )
    specs = [recorder.layer_specs[i] for i in attending]
    return FoundLayers(specs, states, {index: number for number, index in enumerate(attending)})


# ---------------------------------------------------------------- whether nothing else is kept
class _PackedTexts:
    """Attention for texts that are computed in parts, packed into steps: keeps their keys and values, and a slot each.

    Implements `kernels.ops.Attention`.
    """

    def __init__(self, found: FoundLayers, num_texts: int, device: torch.device) -> None:
        self._specs = found.attention
        self._past: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # keys and values by layer and text
        self._lengths = [0] * num_texts
        slot_bytes = max(1, compute_slot_bytes(found.states))
        # A text has two slots, of which steps write one and the other in turn
        self._store = StateStore(Pages(2 * num_texts, -(-slot_bytes // ALIGN) * ALIGN, device), found.states)
        self._turn = 0

    def begin(self, counts: Sequence[int]) -> None:
        """Begin a step with so many tokens of each text."""
        device = self._store.memory.device
        starts = [0, *accumulate(counts)]
        slots = torch.arange(len(counts), dtype=torch.int32, device=device) * 2
        read = slots + 1 - self._turn if any(self._lengths) else torch.full_like(slots, NO_SLOT)
        q_start = torch.tensor(starts, dtype=torch.int32, device=device)
        states = States(self._store, q_start, read, slots + self._turn, q_start.new_empty(0, 3))
        self.slices = [AttentionSlice(slice(0, starts[-1]), [None] * len(self._specs), states=states)]
        self._rows = [slice(first, end) for first, end in pairwise(starts)]
        before = zip(self._lengths, counts, strict=True)
        self.positions = torch.cat([torch.arange(old, old + new, device=device) for old, new in before])
        self.logit_index = torch.arange(starts[-1], device=device)
        self._lengths = [old + new for old, new in zip(self._lengths, counts, strict=True)]
        self._turn = 1 - self._turn

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from each text's q [n,Hq,D] to its keys so far; k [n,H,D], v [n,H,Dv] are added to them."""
        outputs = []
        for text, row in enumerate(self._rows):
            keys, values = k[row], v[row]
            if (layer_idx, text) in self._past:
                old_keys, old_values = self._past[layer_idx, text]
                keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
            self._past[layer_idx, text] = keys, values
            outputs.append(attend_causally(self._specs[layer_idx], q[row], keys, values))
        return torch.cat(outputs)


def _run_in_parts(model: Any, ids: Tensor, found: FoundLayers) -> Tensor:
    """Return the logits [N, V] of a text that is computed in parts, packed with another text.

    They are those of the whole text if positions are those given, and if only keys, values and states are kept.
    """
    attention = _PackedTexts(found, len(PARTS), ids.device)
    texts = [ids, ids.flip(0)]
    done = [0] * len(PARTS)
    logits = []
    for counts in zip(*PARTS, strict=True):
        attention.begin(counts)
        rows = [text[first : first + count] for text, first, count in zip(texts, done, counts, strict=True)]
        step = found.begin_step(attention)
        logits.append(compute_logits(model, step, input_ids=torch.cat(rows)[None])[: counts[0]])
        done = [first + count for first, count in zip(done, counts, strict=True)]
    return torch.cat(logits)
