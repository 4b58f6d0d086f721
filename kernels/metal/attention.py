"""Launches attention in Metal: the kernels of a layer and their grids. reference/attention.py defines the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.kv_formats import KVFormats
from kernels.metal.arguments import (
    GROUP,
    LANES,
    check_same_device,
    kv_types,
    memory_sizes,
    plane_sizes,
    planes,
    slot_tensors,
)
from kernels.metal.library import Grid, Kernel, Kernels, Longs
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots

# Most query heads that a decoding threadgroup computes, as registers limit them; by how many numbers of a head each
# lane holds. The kernels are instantiated at the ends of decode.metal and prefill.metal.
MAX_HEADS_PER_GROUP = {2: 8, 4: 8, 8: 4}
SPLIT = 256  # keys over which one threadgroup sums; as in decode.metal
MAX_PARTIAL_SUMS = 16 << 20  # most float32 numbers of partial sums in one launch
NO_WINDOW = 2**31 - 1  # positions: no window
NO_SINK = torch.finfo(torch.float32).min  # NOTHING of attend.h

Types = Mapping[str, torch.dtype]  # for which kernels are compiled


class Shape(NamedTuple):
    """The properties of a layer for which its kernels are compiled."""

    numbers_per_lane: int  # how many numbers of a head each lane holds
    num_queries_per_kv: int  # number of query heads that share a KV head
    heads_per_group: int  # number of a KV head's query heads that one decoding threadgroup computes

    @property
    def queries_per_group(self) -> int:
        """The number of queries that a prefilling threadgroup computes; ROWS of Shape in prefill.metal."""
        return GROUP // LANES * max(MAX_HEADS_PER_GROUP) // self.numbers_per_lane


def get_kernel_shape(spec: LayerSpec) -> Shape | None:
    """Return the Shape of a layer's kernels; None if its heads are wider than those of any kernel."""
    dim, group = max(spec.head_dim, spec.v_head_dim), spec.num_q_heads // spec.num_kv_heads
    width = next((width for width in MAX_HEADS_PER_GROUP if LANES * width >= dim), None)
    if width is None:
        return None
    return Shape(width, group, min(1 << (group - 1).bit_length(), MAX_HEADS_PER_GROUP[width]))


class AttentionArguments(NamedTuple):
    """The arguments of the attention kernels for one layer of a step."""

    out: Tensor
    q: Tensor
    kv_tensors: tuple[Tensor, ...]  # the store's memory and the tensors of the step's addresses, in the kernels' order
    slots: Slots
    spec: LayerSpec
    shape: Shape
    types: Types
    sinks: Tensor  # [Hq] float32
    lse: Tensor  # [N, Hq] float32; not written if `call` says so
    call: Sequence[int]  # struct AttentionCall
    sizes: tuple[Sequence[int], Longs, Sequence[int], Sequence[float]]  # Memory, Planes, AttentionCall, Scoring
    values: Longs  # PlaneSizes of values


class MetalAttention:
    """Computes `Ops.attend` with Metal kernels; keeps scratch memory and constant tensors from step to step."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        # Tensors [heads] filled with NO_SINK, for layers without sink logits; by device and number of heads.
        self._empty_sinks: dict[tuple[torch.device, int], Tensor] = {}
        # Scratch memory for the partial sums of splits; grows to the largest size requested so far.
        self._scratch_by_device: dict[torch.device, Tensor] = {}

    def prepare(self, spec: LayerSpec, dtype: torch.dtype, formats: KVFormats) -> None:
        """Compile the attention kernels of a layer, if there are kernels for the width of its heads."""
        if (shape := get_kernel_shape(spec)) is not None:
            self._get_decode_kernels(shape, kv_types(formats, dtype))
            self._get_prefill_kernel(shape, kv_types(formats, dtype))

    def __call__(
        self,
        out: Tensor,
        q: Tensor,
        store: KVStore,
        layer: int,
        at: Slots,
        spec: LayerSpec,
        window: int | None,
        lse: Tensor | None,
    ) -> None:
        """Compute `Ops.attend` for checked arguments. Raises ValueError if the tensors are on different devices."""
        shape = get_kernel_shape(spec)
        assert shape is not None
        has_window_start = at.window_start is not None and spec.window is not None
        window_start = at.window_start if has_window_start and at.window_start is not None else at.start  # not read
        kv_tensors = (store.memory, *slot_tensors(at), window_start)
        check_same_device(q, out, lse, *kv_tensors)
        call = (
            *(spec.num_q_heads, shape.num_queries_per_kv),
            *(q.stride(0), q.stride(1), out.stride(0), out.stride(1)),
            *(NO_WINDOW if each is None else min(each, NO_WINDOW) for each in (spec.window, window)),
            int(has_window_start),
            -1 if lse is None else lse.stride(0),
        )
        sinks = self._get_sinks(spec, q.device)
        sizes = memory_sizes(at), planes(store, layer), call, (spec.scale, spec.softcap or 0.0)
        types, values = kv_types(store.formats, q.dtype), plane_sizes(store.planes(layer)[1])
        arguments = AttentionArguments(
            *(out, q, kv_tensors, at, spec, shape, types, sinks),
            *(sinks if lse is None else lse, call, sizes, values),
        )
        if at.num_decode:
            self._decode(arguments)
        if at.num_rows > at.num_decode:
            self._prefill(arguments)

    def _decode(self, arguments: AttentionArguments) -> None:
        """Compute attention for rows of one token: in one launch, or split by split if a sequence is long.

        Takes only so many rows per launch that their partial sums stay within MAX_PARTIAL_SUMS.
        """
        spec, splits = arguments.spec, -(-arguments.slots.max_kv // SPLIT)
        per_row = spec.num_q_heads * splits * (2 + spec.v_head_dim) if splits > 1 else 0
        rows_at_once = max(1, MAX_PARTIAL_SUMS // per_row) if per_row else arguments.slots.num_decode
        for first in range(0, arguments.slots.num_decode, rows_at_once):
            self._decode_rows(arguments, splits, first, min(rows_at_once, arguments.slots.num_decode - first))

    def _decode_rows(self, arguments: AttentionArguments, splits: int, first: int, count: int) -> None:
        """Compute attention for `count` rows from `first` on; the longest sequence has `splits` splits."""
        at, spec, shape = arguments.slots, arguments.spec, arguments.shape
        sets = count * spec.num_q_heads * splits if splits > 1 else 1
        sums = self._get_scratch(sets * (2 + spec.v_head_dim), arguments.q.device)
        partial, values = sums[: 2 * sets], sums[2 * sets :]
        decode, merge = self._get_decode_kernels(shape, arguments.types)
        decode(
            Grid(
                (GROUP * spec.num_kv_heads * -(-shape.num_queries_per_kv // shape.heads_per_group), count, splits),
                (GROUP, 1, 1),
            ),
            *(arguments.out, partial, values, arguments.q, *arguments.kv_tensors, arguments.sinks, arguments.lse),
            *arguments.sizes,
            (splits, first),  # Splits
        )
        if splits > 1:
            merge(
                Grid((LANES, spec.num_q_heads, count), (LANES, 1, 1)),
                *(arguments.out, partial, values, at.q_start, at.start, arguments.sinks, arguments.lse),
                arguments.sizes[0],
                arguments.call,
                (splits, first),  # Splits
                arguments.values,
            )

    def _prefill(self, arguments: AttentionArguments) -> None:
        """Compute attention for the rows of several tokens."""
        at, shape = arguments.slots, arguments.shape
        tiles = -(-at.max_q * shape.num_queries_per_kv // shape.queries_per_group)
        self._get_prefill_kernel(shape, arguments.types)(
            Grid((GROUP * tiles, arguments.spec.num_kv_heads, at.num_rows - at.num_decode), (GROUP, 1, 1)),
            *(arguments.out, arguments.q, *arguments.kv_tensors, arguments.sinks, arguments.lse),
            *arguments.sizes,
            at.num_decode,
        )

    def _get_decode_kernels(self, shape: Shape, types: Types) -> tuple[Kernel, Kernel]:
        """Return the kernel that sums over the keys, and the kernel that merges the sums of splits."""
        names = f"decode_{shape.numbers_per_lane}_{shape.heads_per_group}", f"merge_{shape.numbers_per_lane}"
        decode, merge = (self._kernels.get("decode", name, **types) for name in names)
        return decode, merge

    def _get_prefill_kernel(self, shape: Shape, types: Types) -> Kernel:
        return self._kernels.get("prefill", f"prefill_{shape.numbers_per_lane}", **types)

    def _get_sinks(self, spec: LayerSpec, device: torch.device) -> Tensor:
        if spec.sink_logits is not None:
            return spec.sink_logits.to(device, torch.float32).contiguous()
        key = (device, spec.num_q_heads)
        if key not in self._empty_sinks:
            self._empty_sinks[key] = torch.full((spec.num_q_heads,), NO_SINK, device=device)
        return self._empty_sinks[key]

    def _get_scratch(self, numbers: int, device: torch.device) -> Tensor:
        """Return at least `numbers` float32 numbers of scratch memory."""
        sums = self._scratch_by_device.get(device)
        if sums is None or len(sums) < numbers:
            sums = self._scratch_by_device[device] = torch.empty(numbers, device=device)
        return sums
