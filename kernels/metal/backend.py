"""The backend for GPUs: launches Metal kernels with their arguments and grids.

Tensors are on an Apple GPU, or on an NVIDIA GPU if the kernels are translated (kernels/cuda), or on the CPU if the
emulator runs them. Arguments are checked before each launch, as Metal kernels get no shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.kv_formats import KVFormats
from kernels.metal.arguments import (
    COPY_UNIT,
    GROUP,
    LANES,
    check_same_device,
    has_format_kernels,
    has_kernel_dtype,
    has_kv_kernels,
    kv_types,
    make_row_grid,
    make_token_buffer,
    memory_sizes,
    planes,
    slot_tensors,
)
from kernels.metal.attention import MetalAttention, get_kernel_shape
from kernels.metal.library import Grid, Kernels, Longs
from kernels.ops import Weight
from kernels.reference import backend as reference
from kernels.reference.backend import ReferenceOps
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots
from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.quantization import QuantizedTensor

OUTPUTS = 4 * GROUP // LANES  # outputs that a threadgroup computes; as in linear.metal
MAX_ROWS_PER_GROUP = 4  # most rows of x that a threadgroup computes; as in linear.metal
MAX_GEMV_ROWS = 8  # most rows of x for Metal kernels; torch multiplies more rows faster
STEP = 8  # number of quantized numbers that a lane takes in one step; as in quantized.metal and blocks.metal
MAX_DEQUANTIZED_BYTES = 64 << 20  # size of the part of a quantized weight that is dequantized for torch at a time
COPY_UNIT_BYTES = 16  # bytes that one thread copies; as in store.metal
MAX_COPY_PAIRS = 256  # block pairs that one launch copies: an argument has at most 4 KiB
MAX_COPY_UNITS = 1 << 30  # 16-byte units of a block that one launch copies: a grid is counted in 32 bits
ANY_TYPES = dict.fromkeys("TKV", torch.float32)  # of kernels that copy bytes


class MetalOps(ReferenceOps):
    """Implements `kernels.ops.Ops`; calls the reference for shapes and dtypes without a kernel."""

    def __init__(self, kernels: Kernels, commit: Callable[[], None] = lambda: None) -> None:
        """Launch these kernels; `commit` lets the device begin with what was launched so far."""
        super().__init__()
        self._kernels, self._commit = kernels, commit
        self._attention = MetalAttention(kernels)

    @property
    def block_formats(self) -> Container[str]:
        return FORMATS

    def prepare(self, layers: Sequence[LayerSpec], dtype: torch.dtype, formats: KVFormats) -> None:
        if has_format_kernels(formats, dtype):
            for spec in layers:
                self._attention.prepare(spec, dtype, formats)

    def commit(self) -> None:
        self._commit()

    # ---------------------------------------------------------------- layers
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        match weight:
            case QuantizedTensor() if _has_quantized_kernel(x, weight, bias):
                reference.check_linear(x, weight, bias)
                check_same_device(x, weight.numbers, weight.scale, weight.offset, bias)
                return self._multiply_quantized(x, weight, bias)
            case BlockTensor() if has_kernel_dtype(x, bias):
                reference.check_linear(x, weight, bias)
                check_same_device(x, weight.blocks, bias)
                return self._multiply_blocks(x, weight, bias)
            case Tensor() if has_kernel_dtype(x, weight, bias):
                reference.check_linear(x, weight, bias)
                if len(x) <= MAX_GEMV_ROWS:
                    return self._linear_of_few(x, weight, bias)
        return super().linear(x, weight, bias)

    def _linear_of_few(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        check_same_device(x, weight, bias)
        call = _make_gemv_call(x, len(weight), weight.stride(0), bias)
        kernel = self._kernels.get("linear", f"linear_{call.rows_per_group}", T=x.dtype)
        kernel(call.grid, call.out, x, weight, call.bias, call.sizes)
        return call.out

    def _multiply_quantized(self, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        types = {"T": x.dtype, "S": weight.scale.dtype}
        if len(x) > MAX_GEMV_ROWS:
            dequantize = self._kernels.get("quantized", f"dequantize_weight_{weight.bits}", **types)

            def dequantize_rows(out: Tensor, rows: slice) -> None:
                numbers, scale, offset = _weight_tensors(weight.rows(rows))
                sizes = (out.shape[1], numbers.stride(0))  # WeightSizes
                dequantize(_make_step_grid(out), out, numbers, scale, offset, sizes, _group_sizes(weight))

            return self._dequantize_and_multiply(x, len(weight.numbers), dequantize_rows, bias)
        numbers, scale, offset = _weight_tensors(weight)
        call = _make_gemv_call(x, len(numbers), numbers.stride(0), bias)
        kernel = self._kernels.get("quantized", f"quantized_linear_{weight.bits}_{call.rows_per_group}", **types)
        kernel(call.grid, call.out, x, numbers, scale, offset, call.bias, call.sizes, _group_sizes(weight))
        return call.out

    def _multiply_blocks(self, x: Tensor, weight: BlockTensor, bias: Tensor | None) -> Tensor:
        blocks, name = weight.blocks, weight.format.name
        if len(x) > MAX_GEMV_ROWS:
            dequantize = self._kernels.get("blocks", f"dequantize_{name}", T=x.dtype)

            def dequantize_rows(out: Tensor, rows: slice) -> None:
                sizes = (out.shape[1], blocks.stride(0))  # BlockSizes
                dequantize(_make_step_grid(out), out, blocks[rows], sizes)

            return self._dequantize_and_multiply(x, len(blocks), dequantize_rows, bias)
        call = _make_gemv_call(x, len(blocks), blocks.stride(0), bias)
        kernel = self._kernels.get("blocks", f"linear_{name}_{call.rows_per_group}", T=x.dtype)
        kernel(call.grid, call.out, x, blocks, call.bias, call.sizes)
        return call.out

    def _dequantize_and_multiply(
        self, x: Tensor, outputs: int, dequantize_rows: Callable[[Tensor, slice], None], bias: Tensor | None
    ) -> Tensor:
        """Multiply by torch, with parts of the weight of at most MAX_DEQUANTIZED_BYTES in the dtype of x.

        `dequantize_rows` writes some rows of the weight to a tensor [rows, inputs].
        """
        out = x.new_empty(len(x), outputs)
        rows_at_once = max(1, MAX_DEQUANTIZED_BYTES // (x.shape[1] * x.itemsize))
        for first in range(0, outputs, rows_at_once):
            rows = slice(first, min(first + rows_at_once, outputs))
            wide = x.new_empty(rows.stop - first, x.shape[1])
            dequantize_rows(wide, rows)
            out[:, rows] = super().linear(x, wide, None if bias is None else bias[rows])
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not has_kernel_dtype(x) or weight.dtype not in (x.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        reference.check_rms_norm(x, weight)
        check_same_device(x, weight)
        out = x.new_empty(x.shape)
        sizes = (x.shape[1], x.stride(0), 0)  # NormSizes
        self._kernels.get("norms", "rms_norm", T=x.dtype, W=weight.dtype)(make_row_grid(x), out, x, weight, sizes, eps)
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not has_kernel_dtype(x, delta) or weight.dtype not in (x.dtype, torch.float32):
            return super().add_rms_norm(x, delta, weight, eps)
        reference.check_add_rms_norm(x, delta, weight)
        check_same_device(x, delta, weight)
        total, out = x.new_empty(x.shape), x.new_empty(x.shape)
        sizes = (x.shape[1], x.stride(0), delta.stride(0))  # NormSizes
        kernel = self._kernels.get("norms", "add_rms_norm", T=x.dtype, W=weight.dtype)
        kernel(make_row_grid(x), total, out, x, delta, weight, sizes, eps)
        return total, out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        if not has_kernel_dtype(x) or not cos.dtype is sin.dtype is torch.float32:
            return super().rope(x, cos, sin, positions)
        reference.check_rope(x, cos, sin, positions)
        check_same_device(x, cos, sin, positions)
        N, H, D = x.shape
        out = x.new_empty(x.shape)
        self._kernels.get("layers", "rope", T=x.dtype)(
            Grid((D // 2, H, N), (min(D // 2, LANES), 1, 1)),
            *(out, x, cos.contiguous(), sin.contiguous(), positions),
            (H, D // 2, x.stride(0), x.stride(1)),  # RopeSizes
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if not has_kernel_dtype(gate_up):
            return super().silu_mul(gate_up)
        reference.check_silu_mul(gate_up)
        check_same_device(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        sizes = (width, gate_up.stride(0))  # GateSizes
        kernel = self._kernels.get("layers", "silu_mul", T=gate_up.dtype)
        kernel(Grid((width, rows, 1), (GROUP, 1, 1)), out, gate_up, sizes)
        return out

    # ---------------------------------------------------------------- repeated heads
    def repeat_kv_heads(self, x: Tensor, groups: int) -> Tensor:
        reference.check_repeat_kv_heads(x, groups)
        repeated = x.new_empty(x.shape[1] * groups, x.shape[0], x.shape[2])
        self.repeat_kv_heads_step(repeated, x, 0)
        return repeated

    def repeat_kv_heads_step(self, mirror: Tensor, x: Tensor, start: int) -> None:
        if not has_kernel_dtype(x, mirror):
            return super().repeat_kv_heads_step(mirror, x, start)
        reference.check_repeat_kv_heads_step(mirror, x, start)
        check_same_device(x, mirror)
        columns, (n, H, D) = mirror.narrow(1, start, len(x)), x.shape
        self._kernels.get("layers", "repeat_kv_heads", T=x.dtype)(
            Grid((D, n, len(mirror)), (min(D, GROUP), 1, 1)),
            *(columns, x),
            (len(mirror) // H, x.stride(0), x.stride(1), columns.stride(0), columns.stride(1)),  # RepeatSizes
        )
        return None

    # ---------------------------------------------------------------- KV memory
    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        center = store.k_center(layer)
        # Centered keys enter as float, and values then, too
        is_readable = center is None or store.formats.v.is_quantized
        if not has_kernel_dtype(k, v) or not has_kv_kernels(store, layer, k.dtype) or not is_readable:
            return super().write_kv(store, layer, k, v, at)
        reference.check_write_kv(store, layer, k, v)
        if center is not None:
            k, v = k.float() - center, v.float()
        self._addresses.check("write_kv", at, store, len(k))
        tensors = (store.memory, k, v, *slot_tensors(at))
        check_same_device(*tensors)
        self._kernels.get("store", "write_kv", **kv_types(store.formats, k.dtype))(
            Grid((LANES, k.shape[1], len(k)), (LANES, 1, 1)),
            *tensors,
            memory_sizes(at),
            planes(store, layer),
            (k.stride(0), k.stride(1), v.stride(0), v.stride(1)),  # Entering
        )
        return None

    def gather(self, store: KVStore, layer: int, at: Slots, row: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        plain = next((each.dtype for each in store.formats if not each.is_quantized), torch.float32)
        if not has_kv_kernels(store, layer, plain) or store.k_center(layer) is not None:
            return super().gather(store, layer, at, row, indices)
        self._addresses.check("gather", at, store)
        reference.check_gather(store, layer, at, row, indices)
        table, table_row, *_ = slot_tensors(at)
        tensors = (store.memory, table, table_row, indices.long().contiguous())
        check_same_device(*tensors)
        heads, *dims = store.heads(layer)
        dtypes = (torch.float32 if each.is_quantized else each.dtype for each in store.formats)
        k, v = (
            torch.empty(len(indices), heads, dim, dtype=dtype, device=indices.device)
            for dim, dtype in zip(dims, dtypes, strict=True)
        )
        self._kernels.get("store", "gather", **kv_types(store.formats, plain))(
            Grid((LANES, heads, len(indices)), (LANES, 1, 1)),
            *(k, v, *tensors),
            memory_sizes(at),
            planes(store, layer),
            row,
        )
        return k, v

    def copy_blocks(self, store: KVStore, src: list[int], dst: list[int]) -> None:
        reference.check_copy_blocks(store, src, dst)
        page, block = store.page_bytes // COPY_UNIT_BYTES, store.block_bytes // COPY_UNIT_BYTES
        kernel = self._kernels.get("store", "copy_blocks", **ANY_TYPES)
        pairs = list(zip(src, dst, strict=True))
        for first, begin in product(range(0, len(pairs), MAX_COPY_PAIRS), range(0, block, MAX_COPY_UNITS)):
            block_ids = [each for pair in pairs[first : first + MAX_COPY_PAIRS] for each in pair]
            grid = Grid((min(MAX_COPY_UNITS, block - begin), len(block_ids) // 2, 1), (GROUP, 1, 1))
            kernel(grid, store.memory[begin * COPY_UNIT_BYTES :].view(torch.int32), block_ids, Longs((page,)))

    def copy_tokens(self, store: KVStore, layer: int, src: Tensor, dst: Tensor) -> None:
        reference.check_copy_tokens(store, layer, src, dst)
        memory, layout = store.memory.view(COPY_UNIT), planes(store, layer, COPY_UNIT)
        check_same_device(memory, src, dst)
        heads, count = store.k(layer).shape[1], len(src)
        kernel = self._kernels.get("store", "copy_tokens", **ANY_TYPES)
        grid = Grid((LANES, heads, count), (LANES, 1, 1))
        # A GPU copies all tokens at the same time, so what is read goes to other memory first.
        scratch, dense, order = make_token_buffer(store, layer, count)
        to_scratch = Longs((*_copied_slots(store.block_size, src), *_copied_slots(count, order)))
        kernel(grid, scratch, memory, src, order, dense, layout, to_scratch)
        to_store = Longs((*_copied_slots(count, order), *_copied_slots(store.block_size, dst)))
        kernel(grid, memory, scratch, order, dst, layout, dense, to_store)
        return None

    # ---------------------------------------------------------------- attention
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
        lse: Tensor | None = None,
    ) -> None:
        reference.check_attend(out, q, store, layer, at, spec, window, lse)
        self._addresses.check("attend", at, store, len(q))
        known = has_kernel_dtype(q, out) and has_kv_kernels(store, layer, q.dtype)
        if not known or get_kernel_shape(spec) is None:
            return super().attend(out, q, store, layer, at, spec, window=window, lse=lse)
        return self._attention(out, q, store, layer, at, spec, window, lse)


class GemvCall(NamedTuple):
    """The arguments of the kernels that multiply few rows by a weight, without the weight itself."""

    grid: Grid
    rows_per_group: int  # rows of a threadgroup
    out: Tensor  # [rows, outputs]
    bias: Tensor  # [outputs]; if there is no bias, `out` is passed in its place and not read
    sizes: tuple[int, ...]  # LinearSizes


def _make_gemv_call(x: Tensor, outputs: int, weight_stride: int, bias: Tensor | None) -> GemvCall:
    """Return the arguments for x [rows, inputs]; `weight_stride` is in numbers, or in words of a quantized one."""
    rows, inputs = x.shape
    rows_per_group = min(MAX_ROWS_PER_GROUP, 1 << (rows - 1).bit_length())
    grid = Grid((-(-outputs // OUTPUTS) * GROUP, -(-rows // rows_per_group), 1), (GROUP, 1, 1))
    out = x.new_empty(rows, outputs)
    sizes = (rows, inputs, outputs, x.stride(0), weight_stride, int(bias is not None))
    return GemvCall(grid, rows_per_group, out, out if bias is None else bias, sizes)


def _has_quantized_kernel(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> bool:
    """Return whether quantized.metal has a kernel for these dtypes and for rows of whole 32-bit words and groups."""
    fills_words = weight.group % STEP == 0 and weight.shape[1] * weight.bits % 32 == 0
    return fills_words and has_kernel_dtype(x, bias) and has_kernel_dtype(weight.scale, weight.offset)


def _make_step_grid(out: Tensor) -> Grid:
    """Return the grid of a kernel that dequantizes a weight to out [rows, inputs]: a thread for STEP numbers."""
    rows, inputs = out.shape
    return Grid((inputs // STEP, rows, 1), (min(inputs // STEP, GROUP), 1, 1))


def _group_sizes(weight: QuantizedTensor) -> tuple[int, int]:
    """Return the struct Groups of quantized.metal: (numbers per group, groups per row)."""
    return weight.group, weight.scale.shape[1]


def _weight_tensors(weight: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (numbers as 32-bit words, scale, offset) of a quantized weight, all contiguous."""
    numbers = weight.numbers.contiguous()
    return numbers.view(torch.int32), weight.scale.contiguous(), weight.offset.contiguous()


def _copied_slots(block_size: int, slots: Tensor) -> tuple[int, int, int]:
    """Return half a struct CopiedSlots of store.metal, for slots [N] or [N, H]."""
    return block_size, slots.stride(0), slots.dim() - 1
