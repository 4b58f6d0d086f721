"""kvmux's attention in transformers' code: what its attention layers and its layers with states find of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from kernels.ops import Attention
from kernels.states import StateStore
from server.models.errors import ModelError

ATTN_IMPLEMENTATION = "kvmux"  # the name under which the attention is registered with transformers


class RowPart(NamedTuple):
    """Tokens of a row that layers with states compute at once."""

    tokens: slice  # of the step
    store: StateStore
    read: int  # the slot of the states before them, or NO_SLOT
    write: int  # the slot for the states after them


class RunningStep(NamedTuple):
    """What the layers of a model need to know of the step that runs."""

    attention: Attention
    numbers: Mapping[int, int]  # of each attention layer among all of them, by transformers' index
    row_parts: Sequence[RowPart] | None = None  # None: the tokens are one text, of which nothing is kept
    record: Callable[..., None] | None = None  # called with what each attention layer gets, if it is to be recorded


running_step: ContextVar[RunningStep] = ContextVar("the step that runs")


def compute_logits(model: Any, step: RunningStep, **inputs: Any) -> Tensor:
    """Return logits [K, V] float32 of the rows `logit_index` of a step's attention.

    `inputs` are input_ids [1, N] or inputs_embeds [1, N, d], and perhaps transformers' own cache.
    """
    token = running_step.set(step)
    try:
        found: Tensor = model(
            **{"use_cache": False} | inputs,
            position_ids=step.attention.positions[None],
            logits_to_keep=step.attention.logit_index,
        ).logits[0]
    finally:
        running_step.reset(token)
    return found.float()


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **how: Any
) -> tuple[Tensor, None]:
    """Compute attention with transformers' signature: q [1,Hq,N,D], k and v [1,H,N,D] -> (output [1,N,Hq,D], None)."""
    step, index = running_step.get(), _get_layer_index(module)
    if step.record is not None:
        step.record(index, q, k, v, how)
    out = step.attention.attend(step.numbers[index], *(x[0].transpose(0, 1) for x in (q, k, v)))
    return out[None].contiguous(), None


def _get_layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or index < 0:
        raise ModelError(f"{type(module).__name__} has no layer_idx of its own")
    return index
