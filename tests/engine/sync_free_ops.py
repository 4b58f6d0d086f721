"""Operations without device synchronization, as kernels have to be: keys are found by address on the device.

They are formulas, not kernels: every query meets every position of the longest text, with masked positions ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.reference.backend import ReferenceOps
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots


class SyncFreeOps(ReferenceOps):
    """Operations that store keys and values as the model computes them, without padding."""

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        row, position = _tokens(at, len(k))
        block, slot = _places(at, row, position)
        for new, plane in zip((k, v), store.planes(layer), strict=True):
            plane.numbers[block, :, slot] = new

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
        row, position = (x[:, None] for x in _tokens(at, len(q)))
        key = torch.arange(at.max_kv, device=q.device)
        places = _places(at, row, key.minimum(position))
        k, v = (plane[places[0], :, places[1]].repeat_interleave(_group(spec), 2) for plane in _planes(store, layer))
        seen = key <= position  # [N, S]
        if window is not None:
            seen = seen & ((position - key < window) | (key < at.sinks))
        scores = torch.einsum("nhd,nshd->nhs", q.float(), k.float()) * spec.scale
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        out.copy_(torch.einsum("nhs,nshd->nhd", weights, v.float().nan_to_num(0.0)))


def _tokens(at: Slots, n: int) -> tuple[Tensor, Tensor]:
    """Return the row and the position of each token [N]."""
    token = torch.arange(n, device=at.start.device)
    row = (token[:, None] >= at.q_start[1:]).sum(-1)
    return row, at.start[row].long() + token - at.q_start[row].long()


def _places(at: Slots, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the block, and the slot in it, of each position."""
    slot = at.slot(position)
    return at.table[at.table_row[row].long(), slot // at.block_size].long(), slot % at.block_size


def _planes(store: KVStore, layer: int) -> Any:
    return store.k(layer), store.v(layer)


def _group(spec: LayerSpec) -> int:
    return spec.num_q_heads // spec.num_kv_heads
