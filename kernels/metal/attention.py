"""Attention in Metal: which kernels a layer needs, with how many threads. reference/attention.py says what it means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.metal.arguments import (
    GROUP,
    LANES,
    addresses,
    expect_together,
    memory,
    memory_sizes,
    planes,
)
from kernels.metal.library import Grid, Kernel, Kernels, Longs
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots

# Numbers of a head that a lane holds, and with them the query heads of a threadgroup that decodes, at most: as many as
# its registers hold. What is instantiated at the ends of decode.metal and prefill.metal.
MOST_TOGETHER = {2: 8, 4: 8, 8: 4}
SPLIT = 256  # positions that a threadgroup sums; decode.metal
MOST_SUMS = 16 << 20  # numbers that splits leave to be summed, at a time
EVERYTHING = 2**31 - 1  # positions: no window
NO_SINK = torch.finfo(torch.float32).min  # NOTHING of attend.h


class Shape(NamedTuple):
    """The properties of a layer for which its kernels are compiled."""

    width: int  # numbers of a head that a lane holds
    group: int  # query heads that share a KV head
    together: int  # of these in a threadgroup that decodes

    @property
    def queries(self) -> int:
        """Of a threadgroup that prefills: ROWS of the Shape of prefill.metal."""
        return GROUP // LANES * max(MOST_TOGETHER) // self.width


def shape_of(spec: LayerSpec) -> Shape | None:
    """Return the kernels' shape for a layer; None if its heads are wider than those of any kernel."""
    dim, group = max(spec.head_dim, spec.v_head_dim), spec.num_q_heads // spec.num_kv_heads
    width = next((width for width in MOST_TOGETHER if LANES * width >= dim), None)
    if width is None:
        return None
    return Shape(width, group, min(1 << (group - 1).bit_length(), MOST_TOGETHER[width]))


class Layer(NamedTuple):
    """The arguments of attention over one layer's keys and values."""

    out: Tensor
    q: Tensor
    kept: tuple[Tensor, ...]  # the store's memory and the addresses of the step's rows, as kernels take them
    at: Slots
    spec: LayerSpec
    shape: Shape
    sinks: Tensor  # [Hq] float32
    call: Sequence[int]  # struct AttentionCall
    sizes: tuple[Sequence[int], Longs, Sequence[int], Sequence[float]]  # Memory, Planes, AttentionCall, Scoring


class MetalAttention:
    """Computes attention; holds what does not change from step to step."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._sinks: dict[tuple[torch.device, int], Tensor] = {}  # of layers that have none
        self._sums: dict[torch.device, Tensor] = {}  # of splits: it grows to the largest size asked for, and then stays

    def prepare(self, spec: LayerSpec, dtype: torch.dtype, stored: torch.dtype) -> None:
        """Compile the kernels that such a layer needs, if there are any."""
        if (shape := shape_of(spec)) is not None:
            self._decoding(shape, dtype, stored)
            self._kernel("prefill", f"prefill_{shape.width}", dtype, stored)

    def __call__(
        self, out: Tensor, q: Tensor, store: KVStore, layer: int, at: Slots, spec: LayerSpec, window: int | None
    ) -> None:
        """Compute `Ops.attend` for checked arguments and a layer that has kernels. Raises ValueError."""
        shape = shape_of(spec)
        assert shape is not None
        kept = (memory(store), *addresses(at))
        expect_together(q, out, *kept)
        call = (
            *(spec.num_q_heads, shape.group),
            *(q.stride(0), q.stride(1), out.stride(0), out.stride(1)),
            *(EVERYTHING if each is None else min(each, EVERYTHING) for each in (spec.window, window)),
        )
        sizes = memory_sizes(at), planes(store, layer), call, (spec.scale, spec.softcap or 0.0)
        this = Layer(out, q, kept, at, spec, shape, self._sinks_of(spec, q.device), call, sizes)
        if at.num_decode:
            self._decode(this)
        if at.num_rows > at.num_decode:
            self._prefill(this)

    def _decode(self, this: Layer) -> None:
        """Attend for rows of one token: in one pass over the keys, or over the splits of a long text.

        So many rows at a time that memory for sums does not grow with the longest text and the number of rows.
        """
        spec, splits = this.spec, -(-this.at.max_kv // SPLIT)
        per_row = spec.num_q_heads * splits * (2 + spec.v_head_dim) if splits > 1 else 0
        at_once = max(1, MOST_SUMS // per_row) if per_row else this.at.num_decode
        for first in range(0, this.at.num_decode, at_once):
            self._decode_some(this, splits, first, min(at_once, this.at.num_decode - first))

    def _decode_some(self, this: Layer, splits: int, first: int, count: int) -> None:
        """Attend for `count` rows from `first` on, of texts that are cut into as many splits as the longest has."""
        at, spec, shape = this.at, this.spec, this.shape
        sets = count * spec.num_q_heads * splits if splits > 1 else 1
        sums = self._scratch(sets * (2 + spec.v_head_dim), this.q.device)
        partial, values = sums[: 2 * sets], sums[2 * sets :]
        decode, merge = self._decoding(shape, this.q.dtype, this.kept[0].dtype)
        decode(
            Grid((GROUP * spec.num_kv_heads * -(-shape.group // shape.together), count, splits), (GROUP, 1, 1)),
            *(this.out, partial, values, this.q, *this.kept, this.sinks),
            *this.sizes,
            (splits, first),  # Splits
        )
        if splits > 1:
            merge(
                Grid((LANES, spec.num_q_heads, count), (LANES, 1, 1)),
                *(this.out, partial, values, at.q_start, at.start, this.sinks),
                this.call,
                (splits, first),  # Splits
                spec.v_head_dim,
            )

    def _prefill(self, this: Layer) -> None:
        """Attend for rows of several tokens."""
        at, shape = this.at, this.shape
        tiles = -(-at.max_q * shape.group // shape.queries)
        self._kernel("prefill", f"prefill_{shape.width}", this.q.dtype, this.kept[0].dtype)(
            Grid((GROUP * tiles, this.spec.num_kv_heads, at.num_rows - at.num_decode), (GROUP, 1, 1)),
            *(this.out, this.q, *this.kept, this.sinks),
            *this.sizes,
            at.num_decode,
        )

    def _decoding(self, shape: Shape, dtype: torch.dtype, stored: torch.dtype) -> tuple[Kernel, Kernel]:
        """Of a pass over the keys, and of the sum of its splits."""
        names = f"decode_{shape.width}_{shape.together}", f"merge_{shape.width}"
        decode, merge = (self._kernel("decode", name, dtype, stored) for name in names)
        return decode, merge

    def _kernel(self, file: str, name: str, dtype: torch.dtype, stored: torch.dtype) -> Kernel:
        return self._kernels.get(file, name, T=dtype, KV=stored)

    def _sinks_of(self, spec: LayerSpec, device: torch.device) -> Tensor:
        if spec.sink_logits is not None:
            return spec.sink_logits.to(device, torch.float32).contiguous()
        key = (device, spec.num_q_heads)
        if key not in self._sinks:
            self._sinks[key] = torch.full((spec.num_q_heads,), NO_SINK, device=device)
        return self._sinks[key]

    def _scratch(self, numbers: int, device: torch.device) -> Tensor:
        """Return at least `numbers` float32 of scratch memory."""
        sums = self._sums.get(device)
        if sums is None or len(sums) < numbers:
            sums = self._sums[device] = torch.empty(numbers, device=device)
        return sums
