"""Operations that fail when they are told to."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import LayerSpec, Slots
from kernels.reference import ReferenceOps
from kernels.store import KVStore


class FailingOps(ReferenceOps):
    """Fails once, after `calls` more calls of attend; the layer's keys are written by then."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: int | None = None

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
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                self.calls = None
                raise RuntimeError("injected")
        super().attend(out, q, store, layer, at, spec, window=window)
