"""The operations in C++ as torch sees them, and which of them torch computes faster.

Which instruction set they are compiled for is load.py's business.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import LayerSpec, Slots
from kernels.quantised import Quantised
from kernels.reference import ReferenceOps
from kernels.store import KVStore

MAX_DIM = 256  # of a head; attend.h
FEW, FEW_IF_NATIVE = 32, 8  # rows that are multiplied faster here than by torch
FEW_QUANTISED = 16  # the same of quantised weights, which torch gets as float32, some at a time
OUTPUTS = 512  # rows of weights that are widened at a time: they stay in the cache until they are multiplied
GROUPS = 32  # columns of a quantised weight's groups are a multiple of this; quantised.h
EVERYTHING = 1 << 40  # positions: no window


class CpuOps(ReferenceOps):
    """Implements `kernels.ops.Ops`. What it lacks, and shapes it does not know, it leaves to the reference."""

    def __init__(
        self, library: Any, native: frozenset[torch.dtype] = frozenset(), *, row_invariant: bool = False
    ) -> None:
        """`library`: a namespace of torch.ops. `native`: halves that this machine has instructions for."""
        super().__init__()
        self._library = library
        self._native = native
        self._row_invariant = row_invariant

    def row_invariant(self) -> CpuOps:
        """The same, but a row of a product has the same bits whatever rows stand beside it.

        Everything else is so by itself. torch's products are not: they sum in another order for another number of rows
        (He et al., "Defeating Nondeterminism in LLM Inference", 2025); ours sum in one order, for FEW rows at a time.
        """
        return CpuOps(self._library, self._native, row_invariant=True)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        few = FEW if self._row_invariant or weight.dtype not in self._native else FEW_IF_NATIVE
        if x.shape[0] <= few:
            multiplied: Tensor = self._library.linear(x, weight, bias)
            return multiplied
        if self._row_invariant:
            return torch.cat([self._library.linear(part, weight, bias) for part in x.split(few)])
        if weight.dtype in self._native or weight.dtype is torch.float32:
            return super().linear(x, weight, bias)
        return _linear_widened(x, weight, bias)

    def quantised_linear(self, x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
        if weight.group % GROUPS or (x.shape[0] > FEW_QUANTISED and not self._row_invariant):
            return super().quantised_linear(x, weight, bias)
        parts = weight.numbers, weight.scale, weight.offset, weight.bits, weight.group
        multiplied = [self._library.quantised_linear(some, *parts, bias) for some in x.split(FEW_QUANTISED)]
        return multiplied[0] if len(multiplied) == 1 else torch.cat(multiplied)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = self._library.rms_norm(x, weight, eps)
        return normed

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._library.add_rms_norm(x, delta, weight, eps)
        return found

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        turned: Tensor = self._library.rope(x, cos, sin, positions)
        return turned

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = self._library.silu_mul(gate_up)
        return gated

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        self._library.write_kv(
            store.k(layer),
            store.v(layer),
            k,
            v,
            *_addresses(at),
        )

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
        if max(spec.head_dim, spec.v_head_dim) > MAX_DIM:
            return super().attend(out, q, store, layer, at, spec, window=window)
        sinks = spec.sink_logits
        self._library.attend(
            out,
            q,
            store.k(layer),
            store.v(layer),
            *_addresses(at),
            EVERYTHING if spec.window is None else spec.window,
            EVERYTHING if window is None else window,
            spec.scale,
            spec.softcap or 0.0,
            None if sinks is None else sinks.float(),
        )
        return None


def _linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32, some of the weights after the other; rounded once."""
    wide = x.to(weight.dtype).float()
    out = x.new_empty(x.shape[0], weight.shape[0])
    for first in range(0, weight.shape[0], OUTPUTS):
        some = slice(first, first + OUTPUTS)
        out[:, some] = F.linear(wide, weight[some].float(), None if bias is None else bias[some].float())
    return out


def _addresses(at: Slots) -> tuple[Tensor | int, ...]:
    """In the order in which attention.cpp takes them."""
    return at.table, at.row_seat, at.q_start, at.start, at.block_size, at.sinks, at.ring
