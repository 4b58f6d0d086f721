"""Tracing: which operations and which parts of a step run, how often, for how long, and on how many bytes.

An engine has one `Tracer`. `TracedOps` reports every call of an operation to it, and the engine every part of a step;
the tracer passes the reports on to the recorders that are attached at that moment. Without a recorder, an operation
costs one more Python call (80 ns), and a part of a step 200 ns.
"""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels.composite import CompositeOps
from kernels.memory import ConcatenatedWeight
from kernels.ops import Attention, AttentionWeights, DecoderLayer, DecoderLayers, GatedMLP, Ops, Weight
from kernels.selfcheck.layer_ops import FORWARD_LAYERS
from kernels.selfcheck.op_db import OP_NAMES, OPS
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots

NULL_CONTEXT: AbstractContextManager[object] = nullcontext()
SYNCHRONIZE: dict[str, Callable[[], None]] = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}
COUNT_BYTES: Mapping[str, Callable[..., int]] = {op.name: op.count_bytes for op in OPS}

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound="Recorder")


# ---------------------------------------------------------------- the interface
class Recorder(ABC):  # noqa: B024 - a subclass overrides the methods whose reports it needs
    """Measures operations and parts of a step while it is attached to a `Tracer`; this base class ignores them all."""

    needs_every_op = False  # True: layers that a backend runs in one call are run operation by operation instead

    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Return the context in which an operation of `Ops` is called with these arguments."""
        return NULL_CONTEXT

    def layers(self) -> AbstractContextManager[object]:
        """Return the context in which all layers of a model run; `op` or `add_seconds` report their operations."""
        return NULL_CONTEXT

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return the context in which a part of a step runs, for example "schedule"."""
        return NULL_CONTEXT

    def add_seconds(self, name: str, seconds: float) -> None:  # noqa: B027 - as above
        """Add the seconds of an operation that a backend has run and timed itself, as a part of all layers."""


class Tracer:
    """Passes reports on to the recorders that are attached; drops them while there is none."""

    def __init__(self) -> None:
        self.recorders: tuple[Recorder, ...] = ()

    @contextmanager
    def record(self, recorder: R) -> Iterator[R]:
        """Attach a recorder within the block."""
        self.recorders = (*self.recorders, recorder)
        try:
            yield recorder
        finally:
            self.recorders = tuple(each for each in self.recorders if each is not recorder)

    @property
    def needs_every_op(self) -> bool:
        """Whether a recorder has to see each operation with its arguments; seconds alone do not suffice."""
        return any(recorder.needs_every_op for recorder in self.recorders)

    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Return the context in which to call an operation of `Ops` with these arguments."""
        return _nest([recorder.op(name, args, kwargs) for recorder in self.recorders])

    def layers(self) -> AbstractContextManager[object]:
        """Return the context in which to run all layers of a model."""
        return _nest([recorder.layers() for recorder in self.recorders])

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return the context in which to run a part of a step; the name must not be that of an operation."""
        if not self.recorders:
            return NULL_CONTEXT
        return _nest([recorder.span(name) for recorder in self.recorders])

    def add_seconds(self, name: str, seconds: float) -> None:
        """Report the seconds of an operation that a backend has timed itself."""
        for recorder in self.recorders:
            recorder.add_seconds(name, seconds)


def _nest(contexts: Sequence[AbstractContextManager[object]]) -> AbstractContextManager[object]:
    """Return one context that enters all of these in order and leaves them in reverse order."""
    return contexts[0] if len(contexts) == 1 else _enter_all(contexts)


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


# ---------------------------------------------------------------- recorders
def get_synchronize(device: torch.device | str) -> Callable[[], None]:
    """Return the function that waits until a device has computed everything; on a CPU it does nothing."""
    return SYNCHRONIZE.get(torch.device(device).type, lambda: None)


class OpTimer(Recorder):
    """Sums up the seconds of each operation, of its first call to its last."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._synchronize = get_synchronize(device)
        self.seconds = {name: 0.0 for name in OP_NAMES if name != FORWARD_LAYERS.name}

    @contextmanager
    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        self._synchronize()
        start = perf_counter()
        try:
            yield
            self._synchronize()
        finally:
            self.add_seconds(name, perf_counter() - start)

    def add_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds


class OpCounter(Recorder):
    """Counts the calls of each operation, and the bytes that they must move as kernels/selfcheck/op_db.py says."""

    needs_every_op = True

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
        self.calls[name] += 1
        self.bytes[name] += COUNT_BYTES[name](*args, **kwargs)
        return NULL_CONTEXT


# ---------------------------------------------------------------- operations that report themselves
class TracedOps(Ops):
    """The operations of any backend, each call of which is reported to a tracer.

    An operation that the backend calls within another one is a part of that one, and is not reported.
    """

    def __init__(self, ops: Ops, tracer: Tracer) -> None:
        self._ops = ops
        self._tracer = tracer

    def _trace(self, name: str, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._tracer.op(name, args, kwargs):
            return run(*args, **kwargs)

    # ---------------------------------------------------------------- not reported
    @property
    def batch_invariant_head_dim(self) -> int:
        return self._ops.batch_invariant_head_dim

    def prepare(self, layers: Sequence[LayerSpec], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self._ops.prepare(layers, dtype, kv_dtype)

    def pack(self, weight: Weight | ConcatenatedWeight) -> Weight:
        return self._ops.pack(weight)

    def pack_layers(self, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> DecoderLayers:
        return self._ops.pack_layers(layers, dtype)

    # ---------------------------------------------------------------- layers
    def forward_layers(self, layers: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
        tracer = self._tracer
        if not tracer.recorders:
            return self._ops.forward_layers(layers, x, attention)
        with tracer.layers():
            if tracer.needs_every_op or attention.kv_locations is None or layers.op_seconds() is None:
                return CompositeOps.forward_layers(self, layers, x, attention)  # calls the operations below
            out = self._ops.forward_layers(layers, x, attention)
            for name, seconds in (layers.op_seconds() or {}).items():
                tracer.add_seconds(name, seconds)
            return out

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        run = self._ops.linear
        return self._trace("linear", run, x, weight, bias) if self._tracer.recorders else run(x, weight, bias)

    def qkv_proj_rope(
        self, layer: AttentionWeights, x: Tensor, added: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = self._ops.qkv_proj_rope
        if self._tracer.recorders:
            return self._trace("qkv_proj_rope", run, layer, x, added, positions)
        return run(layer, x, added, positions)

    def o_proj_add_norm(self, layer: AttentionWeights, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        run = self._ops.o_proj_add_norm
        return self._trace("o_proj_add_norm", run, layer, x, mixed) if self._tracer.recorders else run(layer, x, mixed)

    def mlp(self, weights: GatedMLP, h: Tensor) -> Tensor:
        run = self._ops.mlp
        return self._trace("mlp", run, weights, h) if self._tracer.recorders else run(weights, h)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        run = self._ops.rms_norm
        return self._trace("rms_norm", run, x, weight, eps) if self._tracer.recorders else run(x, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        run = self._ops.add_rms_norm
        if self._tracer.recorders:
            return self._trace("add_rms_norm", run, x, delta, weight, eps)
        return run(x, delta, weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        run = self._ops.rope
        return (
            self._trace("rope", run, x, cos, sin, positions) if self._tracer.recorders else run(x, cos, sin, positions)
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        run = self._ops.silu_mul
        return self._trace("silu_mul", run, gate_up) if self._tracer.recorders else run(gate_up)

    def sample(self, logits: Tensor, params: Tensor) -> Tensor:
        run = self._ops.sample
        return self._trace("sample", run, logits, params) if self._tracer.recorders else run(logits, params)

    # ---------------------------------------------------------------- KV memory
    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        run = self._ops.quantize
        return self._trace("quantize", run, x) if self._tracer.recorders else run(x)

    def dequantize(self, x: Tensor, scale: Tensor) -> Tensor:
        run = self._ops.dequantize
        return self._trace("dequantize", run, x, scale) if self._tracer.recorders else run(x, scale)

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        run = self._ops.write_kv
        if self._tracer.recorders:
            return self._trace("write_kv", run, store, layer, k, v, at)
        return run(store, layer, k, v, at)

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        store: KVStore,
        layer: int,
        at: Slots,
        spec: LayerSpec,
        *,
        window: int | None = None,
    ) -> None:
        run = self._ops.attend
        if self._tracer.recorders:
            return self._trace("attend", run, out, q, store, layer, at, spec, window=window)
        return run(out, q, store, layer, at, spec, window=window)

    def gather(self, store: KVStore, layer: int, at: Slots, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        run = self._ops.gather
        if self._tracer.recorders:
            return self._trace("gather", run, store, layer, at, row, positions)
        return run(store, layer, at, row, positions)

    def copy_blocks(self, store: KVStore, src: list[int], dst: list[int]) -> None:
        run = self._ops.copy_blocks
        return self._trace("copy_blocks", run, store, src, dst) if self._tracer.recorders else run(store, src, dst)

    def repeat_kv_heads(self, x: Tensor, groups: int) -> Tensor:
        run = self._ops.repeat_kv_heads
        return self._trace("repeat_kv_heads", run, x, groups) if self._tracer.recorders else run(x, groups)

    def repeat_kv_heads_step(self, mirror: Tensor, x: Tensor, start: int) -> None:
        run = self._ops.repeat_kv_heads_step
        if self._tracer.recorders:
            return self._trace("repeat_kv_heads_step", run, mirror, x, start)
        return run(mirror, x, start)
