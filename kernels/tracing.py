"""Traces operations: hooks around every call of a backend, which time or count them while they are entered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor

from kernels.composite import CompositeOps
from kernels.ops import Attention, DecoderLayers, Ops
from kernels.selfcheck.layer_ops import FORWARD_LAYERS
from kernels.selfcheck.op_db import OP_NAMES, OPS
from kernels.selfcheck.op_info import OpInfo

ForwardLayers = Callable[[DecoderLayers, Tensor, Attention], Tensor]
SYNCHRONIZE: dict[str, Callable[[], None]] = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}


class OpHook:
    """Passes every call of `ops` to `call` while it is entered, but for those that an operation makes itself."""

    needs_every_call = True  # calls, and what goes into them; not time alone

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._before: dict[str, Any] = {}  # what the object had of its own
        self._busy = False

    def call(self, op: OpInfo, run: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run an operation. Subclasses measure it."""
        return run(*args, **kwargs)

    def on_seconds(self, name: str, seconds: float) -> None:
        """Take the seconds of an operation, which was called by itself or as a part of another."""

    def forward_layers(self, run: ForwardLayers, layers: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
        """Call the operations that it is made of, or let it say what each of them took."""
        if self.needs_every_call or attention.kv_locations is None or layers.op_seconds() is None:
            return CompositeOps.forward_layers(self._ops, layers, x, attention)
        out = run(layers, x, attention)
        for name, seconds in (layers.op_seconds() or {}).items():
            self.on_seconds(name, seconds)
        return out

    def __enter__(self) -> Self:
        own = vars(self._ops)
        hooked: dict[str, Any] = {op.name: self._wrap(op, getattr(self._ops, op.name)) for op in OPS}
        hooked[FORWARD_LAYERS.name] = partial(self.forward_layers, self._ops.forward_layers)
        self._before = {name: own[name] for name in hooked if name in own}
        own.update(hooked)
        return self

    def __exit__(self, *_: object) -> None:
        own = vars(self._ops)
        for name in OP_NAMES:
            del own[name]
        own.update(self._before)

    def _wrap(self, op: OpInfo, run: Callable[..., object]) -> Callable[..., object]:
        def called(*args: Any, **kwargs: Any) -> object:
            if self._busy:
                return run(*args, **kwargs)
            self._busy = True
            try:
                return self.call(op, run, args, kwargs)
            finally:
                self._busy = False

        return called


class TimingHook(OpHook):
    """Times every call for `on_seconds`, and waits for the device before and after it."""

    needs_every_call = False

    def __init__(self, ops: Ops, device: torch.device | str = "cpu") -> None:
        super().__init__(ops)
        self._wait = SYNCHRONIZE.get(torch.device(device).type, lambda: None)

    def call(self, op: OpInfo, run: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        self._wait()
        start = perf_counter()
        try:
            result = run(*args, **kwargs)
            self._wait()
            return result
        finally:
            self.on_seconds(op.name, perf_counter() - start)


class OpTimer(TimingHook):
    """Sums up the seconds of each operation while it is entered; a call within another belongs to the other."""

    def __init__(self, ops: Ops, device: torch.device | str = "cpu") -> None:
        super().__init__(ops, device)
        self.seconds = {name: 0.0 for name in OP_NAMES if name != FORWARD_LAYERS.name}

    def __enter__(self) -> Self:
        """Begin at zero."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return super().__enter__()

    def on_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds


class OpCounter(OpHook):
    """Counts calls and the bytes that they must move; a call within another belongs to the other."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # as the table has them, of these calls

    def __enter__(self) -> Self:
        """Begin at zero."""
        self.calls, self.bytes = Counter(), Counter()
        return super().__enter__()

    def call(self, op: OpInfo, run: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        self.calls[op.name] += 1
        self.bytes[op.name] += op.count_bytes(*args, **kwargs)
        return run(*args, **kwargs)
