"""Stands between the operations and who calls them, for as long as it is asked to. At other times nothing does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor

from kernels import composite
from kernels.layers import Stack
from kernels.ops import Attention, Ops
from kernels.selfcheck.op_info import LAYERS, OPS, Op

Run = Callable[[Stack, Tensor, Attention], Tensor]
WAITS: dict[str, Callable[[], None]] = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}


class Watched:
    """`with` it, every call of `ops` goes through `call`; those that an operation makes itself do not."""

    counts = True  # calls, and what goes into them; not time alone

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._before: dict[str, Any] = {}  # what the object had of its own
        self._busy = False

    def call(self, op: Op, run: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Runs one; whoever inherits this does more."""
        return run(*args, **kwargs)

    def took(self, name: str, seconds: float) -> None:
        """What an operation took, by itself or as part of another; for who times them."""

    def run_layers(self, run: Run, stack: Stack, x: Tensor, attention: Attention) -> Tensor:
        """Is made of others, which are what is watched: either they are called, or it can say what each took."""
        if self.counts or attention.stored is None or stack.took() is None:
            return composite.run_layers(self._ops, stack, x, attention)
        after = run(stack, x, attention)
        for name, seconds in (stack.took() or {}).items():
            self.took(name, seconds)
        return after

    def __enter__(self) -> Self:
        own = vars(self._ops)
        watched: dict[str, Any] = {op.name: self._through(op, getattr(self._ops, op.name)) for op in OPS}
        watched[LAYERS] = partial(self.run_layers, self._ops.run_layers)
        self._before = {name: own[name] for name in watched if name in own}
        own.update(watched)
        return self

    def __exit__(self, *_: object) -> None:
        own = vars(self._ops)
        for op in OPS:
            del own[op.name]
        own.update(self._before)

    def _through(self, op: Op, run: Callable[..., object]) -> Callable[..., object]:
        def called(*args: Any, **kwargs: Any) -> object:
            if self._busy:
                return run(*args, **kwargs)
            self._busy = True
            try:
                return self.call(op, run, args, kwargs)
            finally:
                self._busy = False

        return called


class Timed(Watched):
    """`with` it, `took` hears of every call: what computes elsewhere is waited for, before and after."""

    counts = False

    def __init__(self, ops: Ops, device: torch.device | str = "cpu") -> None:
        super().__init__(ops)
        self._wait = WAITS.get(torch.device(device).type, lambda: None)

    def call(self, op: Op, run: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        self._wait()
        began = perf_counter()
        try:
            result = run(*args, **kwargs)
            self._wait()
            return result
        finally:
            self.took(op.name, perf_counter() - began)
