"""Measures which operations and which parts of a step run, how often, for how long, and on how many bytes.

An engine has one `Tracer`. `trace_ops` makes a backend report every call of an operation to it, and the engine reports
every part of a step. The tracer passes the reports on to the recorders that are attached at that moment. Without a
recorder, an operation costs one more Python call, and a part of a step 200 ns.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kernels.composite import CompositeOps
from kernels.ops import SINGLE_OPS, Attention, DecoderLayers, Ops

NULL_CONTEXT: AbstractContextManager[object] = nullcontext()
SYNCHRONIZE: dict[str, Callable[[], None]] = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}

R = TypeVar("R", bound="Recorder")


# ---------------------------------------------------------------- the interface
class Recorder(ABC):  # noqa: B024 - a subclass overrides the methods whose reports it needs
    """Measures operations and parts of a step while it is attached to a `Tracer`; this base class measures nothing."""

    needs_every_op = False  # True if layers must run operation by operation, even if a backend runs them in one call

    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Return the context manager within which an operation of `Ops` is called with these arguments."""
        return NULL_CONTEXT

    def layers(self) -> AbstractContextManager[object]:
        """Return the context manager within which all layers of a model run.

        Their operations are reported by `op`, or by `add_seconds`.
        """
        return NULL_CONTEXT

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return the context manager within which a part of a step runs, for example "schedule"."""
        return NULL_CONTEXT

    def add_seconds(self, name: str, seconds: float) -> None:  # noqa: B027 - as above
        """Add the seconds of an operation that a backend ran, and timed itself, within a call for all layers."""


class Tracer:
    """Passes reports on to all attached recorders; without one, drops them."""

    def __init__(self) -> None:
        self.recorders: tuple[Recorder, ...] = ()

    @contextmanager
    def record(self, recorder: R) -> Iterator[R]:
        """Attach a recorder within the `with` block."""
        self.recorders = (*self.recorders, recorder)
        try:
            yield recorder
        finally:
            self.recorders = tuple(each for each in self.recorders if each is not recorder)

    @property
    def needs_every_op(self) -> bool:
        """Whether some recorder must see each operation with its arguments, and not only the seconds it took."""
        return any(recorder.needs_every_op for recorder in self.recorders)

    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Return the context manager in which to call an operation of `Ops`, so that all recorders measure it."""
        return _nest([recorder.op(name, args, kwargs) for recorder in self.recorders])

    def layers(self) -> AbstractContextManager[object]:
        """Return the context manager in which to run all layers of a model, so that all recorders measure them."""
        return _nest([recorder.layers() for recorder in self.recorders])

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return the context manager in which to run a part of a step; its name must not be that of an operation."""
        if not self.recorders:
            return NULL_CONTEXT
        return _nest([recorder.span(name) for recorder in self.recorders])

    def add_seconds(self, name: str, seconds: float) -> None:
        """Report to all recorders the seconds of an operation that a backend timed itself."""
        for recorder in self.recorders:
            recorder.add_seconds(name, seconds)


def _nest(contexts: Sequence[AbstractContextManager[object]]) -> AbstractContextManager[object]:
    """Return one context manager that enters all of these in order and leaves them in reverse order."""
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
    """Sums up the seconds of each operation, over all calls while it is attached."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._synchronize = get_synchronize(device)
        self.seconds = dict.fromkeys(SINGLE_OPS, 0.0)

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


# ---------------------------------------------------------------- operations that report themselves
def trace_ops(ops: Ops, tracer: Tracer) -> Ops:
    """Return the operations of a backend in a form that reports each call to a tracer.

    An operation that the backend calls within another one is a part of that one, and is not reported.
    """
    return cast(Ops, _TracedOps(ops, tracer))


class _TracedOps:
    """Implements `Ops` by a backend's operations, whose calls are reported to a tracer."""

    def __init__(self, ops: Ops, tracer: Tracer) -> None:
        self._ops = ops
        self._tracer = tracer
        for name in SINGLE_OPS:
            setattr(self, name, _report_calls(name, getattr(ops, name), tracer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def forward_layers(self, layers: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
        tracer = self._tracer
        if not tracer.recorders:
            return self._ops.forward_layers(layers, x, attention)
        with tracer.layers():
            if tracer.needs_every_op or not attention.slices or layers.op_seconds() is None:
                return CompositeOps.forward_layers(cast(Ops, self), layers, x, attention)  # calls the operations above
            out = self._ops.forward_layers(layers, x, attention)
            for name, seconds in (layers.op_seconds() or {}).items():
                tracer.add_seconds(name, seconds)
            return out


def _report_calls(name: str, run: Callable[..., Any], tracer: Tracer) -> Callable[..., Any]:
    """Return a function that calls the operation `run`, and reports the call if a recorder is attached."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not tracer.recorders:
            return run(*args, **kwargs)
        with tracer.op(name, args, kwargs):
            return run(*args, **kwargs)

    return call
