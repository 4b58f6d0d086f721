"""Records the calls that `OpInfo.samples` makes of an operation, so that a test can repeat them with other arguments.

Works for every operation of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from kernels.ops import Attention, AttentionWeights, DecoderLayer, DecoderLayers, GatedMLP, Ops, Weight
from kernels.selfcheck.op_info import OpInfo
from kernels.store import KVStore

CPU = torch.device("cpu")
WRITTEN = ("out", "mirror", "lse")  # arguments that an operation writes into


@dataclass(frozen=True)
class Call:
    """One call of an operation: its arguments by name, weights are not packed."""

    op: OpInfo
    arguments: Mapping[str, Any]

    def run(self, ops: Ops, **changed: Any) -> list[Tensor]:
        """Return the results, the tensors that the call wrote into, and the KV memory, which is then restored."""
        arguments = {**self.arguments, **changed}
        for name in WRITTEN:
            if isinstance(arguments.get(name), Tensor) and not arguments[name].is_meta:
                arguments[name] = _copied(arguments[name])
        memories = [store.memory for store in _stores(arguments)]
        before = [memory.clone() for memory in memories]
        try:
            found = getattr(ops, self.op.name)(**_packed(ops, self.op.name, arguments))
            returned = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
            written = [arguments[name] for name in WRITTEN if arguments.get(name) is not None]
            return returned + written + [memory.clone() for memory in memories]
        finally:
            for memory, old in zip(memories, before, strict=True):
                memory.copy_(old)


def calls(op: OpInfo, ops: Ops, dtype: torch.dtype) -> Iterator[Call]:
    """Yield every call of the operation in the samples of a dtype, before it is made."""
    pending: list[Call] = []
    recording: Any = _RecordingOps(ops, op, pending.append)
    for _ in op.samples(recording, dtype, CPU):
        yield from pending
        pending.clear()


class _RecordingOps:
    """Operations that record the calls of one of them, and pack weights only when it runs."""

    def __init__(self, ops: Ops, op: OpInfo, found: Callable[[Call], None]) -> None:
        self._ops, self._op, self._found = ops, op, found

    def pack(self, weight: Weight) -> Weight:
        return weight

    def pack_layers(self, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> DecoderLayers:
        return DecoderLayers(layers)

    def __getattr__(self, name: str) -> Any:
        run = getattr(self._ops, name)
        return self._record if name == self._op.name else run

    def _record(self, *args: Any, **kwargs: Any) -> Any:
        bound = signature(getattr(self._ops, self._op.name)).bind(*args, **kwargs)
        self._found(Call(self._op, bound.arguments))
        return getattr(self._ops, self._op.name)(**_packed(self._ops, self._op.name, bound.arguments))


def _packed(ops: Ops, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with weights as the backend multiplies them."""
    packed = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, AttentionWeights | GatedMLP):
            packed[key] = value.pack(ops)
        elif isinstance(value, DecoderLayers):
            packed[key] = ops.pack_layers([layer.pack(ops) for layer in value.layers], arguments["x"].dtype)
        elif name == "linear" and key == "weight":
            packed[key] = ops.pack(value)
    return packed


def _stores(arguments: Mapping[str, Any]) -> list[KVStore]:
    """Return the stores that a call may write into."""
    attention: Attention | None = arguments.get("attention")
    if attention is not None:
        return [where.store for each in attention.slices for where in each.kv_locations if where is not None]
    return [value for value in arguments.values() if isinstance(value, KVStore)]


def real_tokens(attention: Any, *, unless_seeing: int | None = None) -> list[int]:
    """Return the tokens of a step that are not padding.

    `unless_seeing`: without that token and those after it in its row, which see it.
    """
    found: list[int] = []
    for tokens, ((_, at, _), *_), *_ in attention.slices:
        begins = [tokens.start + first for first in at.q_start.tolist()]
        for start, first, end in zip(at.start.tolist(), begins, begins[1:], strict=False):
            if start >= 0:
                sees = unless_seeing is not None and first <= unless_seeing < end
                found += range(first, unless_seeing if sees and unless_seeing is not None else end)
    return found


def _copied(t: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) if 0 not in t.stride() else t.clone()
