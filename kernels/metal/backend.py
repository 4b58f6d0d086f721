"""The operations in Metal as torch sees them: what is passed to a kernel, and with how many threads.

Tensors lie on Apple's device, or on the CPU if an emulator runs the kernels; which of both is load.py's business.
Shapes are checked here, for Metal is not told them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.metal.arguments import (
    GROUP,
    LANES,
    TYPES,
    addresses,
    expect,
    in_rows,
    known,
    memory,
    memory_sizes,
    plane_sizes,
)
from kernels.metal.attention import Attention, shape_of
from kernels.metal.library import Grid, Kernels
from kernels.ops import LayerSpec, Slots
from kernels.quantised import Quantised
from kernels.reference import ReferenceOps
from kernels.store import KVStore

OUTPUTS = 4 * GROUP // LANES  # of a threadgroup; linear.metal
FEW = 8  # rows that are multiplied faster here than by torch
STEP = 8  # quantised numbers that a lane takes at once; quantised.metal
EXPANDED = 64 << 20  # bytes of a quantised weight that torch multiplies at a time
PAIRS = 256  # of blocks that one launch copies: an argument has at most 4 KiB


class MetalOps(ReferenceOps):
    """Implements `kernels.ops.Ops`. Shapes and types that it does not know it leaves to the reference."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._attention = Attention(kernels)

    def prepare(self, layers: Sequence[LayerSpec], dtype: torch.dtype, stored: torch.dtype) -> None:
        if dtype in TYPES:
            for spec in layers:
                self._attention.prepare(spec, dtype, stored)

    # ---------------------------------------------------------------- layers
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, (outputs, inputs) = len(x), weight.shape
        if rows > FEW or not known(x, weight, bias):
            return super().linear(x, weight, bias)
        expect(x.shape[1] == inputs, f"x {[*x.shape]} does not fit a weight {[*weight.shape]}")
        expect(bias is None or bias.shape == (outputs,), f"a bias must have {outputs} numbers")
        at_once = min(4, 1 << (rows - 1).bit_length())
        out = x.new_empty(rows, outputs)
        self._kernels.get("linear", f"linear_{at_once}", T=x.dtype)(
            Grid((-(-outputs // OUTPUTS) * GROUP, -(-rows // at_once), 1), (GROUP, 1, 1)),
            out,
            x,
            weight,
            out if bias is None else bias,
            (rows, inputs, outputs, x.stride(0), weight.stride(0), int(bias is not None)),
        )
        return out

    def quantised_linear(self, x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
        rows, (outputs, inputs) = len(x), weight.shape
        if not known(x, bias) or weight.scale.dtype not in TYPES or weight.group % STEP or inputs * weight.bits % 32:
            return super().quantised_linear(x, weight, bias)
        expect(x.shape[1] == inputs, f"x {[*x.shape]} does not fit a weight {[*weight.shape]}")
        expect(bias is None or bias.shape == (outputs,), f"a bias must have {outputs} numbers")
        if rows > FEW:
            return self._quantised_linear_of_many(x, weight, bias)
        at_once = min(4, 1 << (rows - 1).bit_length())
        out = x.new_empty(rows, outputs)
        numbers, scale, offset = _parts(weight)
        self._kernels.get("quantised", f"quantised_linear_{weight.bits}_{at_once}", T=x.dtype, S=scale.dtype)(
            Grid((-(-outputs // OUTPUTS) * GROUP, -(-rows // at_once), 1), (GROUP, 1, 1)),
            *(out, x, numbers, scale, offset, out if bias is None else bias),
            (rows, inputs, outputs, x.stride(0), numbers.stride(0), int(bias is not None)),
            (weight.group, inputs // weight.group),
        )
        return out

    def _quantised_linear_of_many(self, x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
        """By torch, after so much of the weight as fits EXPANDED was given the type of x."""
        outputs, inputs = weight.shape
        out = x.new_empty(len(x), outputs)
        expand = self._kernels.get("quantised", f"dequantise_weight_{weight.bits}", T=x.dtype, S=weight.scale.dtype)
        at_once = max(1, EXPANDED // (inputs * x.itemsize))
        for first in range(0, outputs, at_once):
            some = slice(first, first + at_once)
            numbers, scale, offset = _parts(weight.rows(some))
            wide = x.new_empty(len(numbers), inputs)
            sizes = (0, inputs, len(numbers), 0, numbers.stride(0), 0)
            grid = Grid((inputs // STEP, len(numbers), 1), (min(inputs // STEP, GROUP), 1, 1))
            expand(grid, wide, numbers, scale, offset, sizes, (weight.group, inputs // weight.group))
            out[:, some] = super().linear(x, wide, None if bias is None else bias[some])
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not known(x) or weight.dtype not in (x.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        expect(weight.shape == x.shape[1:], f"a norm's weight {[*weight.shape]} does not fit x {[*x.shape]}")
        out = x.new_empty(x.shape)
        self._kernels.get("norms", "rms_norm", T=x.dtype, W=weight.dtype)(
            in_rows(x), out, x, weight.contiguous(), (x.shape[1], x.stride(0), 0), eps
        )
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not known(x, delta) or weight.dtype not in (x.dtype, torch.float32):
            return super().add_rms_norm(x, delta, weight, eps)
        expect(x.shape == delta.shape, f"{[*x.shape]} and {[*delta.shape]} are to be added")
        expect(weight.shape == x.shape[1:], f"a norm's weight {[*weight.shape]} does not fit x {[*x.shape]}")
        total, out = x.new_empty(x.shape), x.new_empty(x.shape)
        sizes = (x.shape[1], x.stride(0), delta.stride(0))
        self._kernels.get("norms", "add_rms_norm", T=x.dtype, W=weight.dtype)(
            in_rows(x), total, out, x, delta, weight.contiguous(), sizes, eps
        )
        return total, out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        if not known(x) or cos.dtype is not torch.float32:
            return super().rope(x, cos, sin, positions)
        N, H, D = x.shape
        expect(cos.shape == sin.shape and 2 * cos.shape[1] == D, f"tables {[*cos.shape]} do not fit x {[*x.shape]}")
        expect(positions.shape == (N,) and positions.dtype is torch.int64, f"there must be {N} positions, in int64")
        out = x.new_empty(x.shape)
        self._kernels.get("layers", "rope", T=x.dtype)(
            Grid((D // 2, H, N), (min(D // 2, LANES), 1, 1)),
            out,
            x,
            cos.contiguous(),
            sin.contiguous(),
            positions.contiguous(),
            (H, D // 2, x.stride(0), x.stride(1)),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if not known(gate_up):
            return super().silu_mul(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        expect(gate_up.shape[1] == 2 * width, "the gate must be as wide as what it is multiplied with")
        out = gate_up.new_empty(rows, width)
        self._kernels.get("layers", "silu_mul", T=gate_up.dtype)(
            Grid((width, rows, 1), (GROUP, 1, 1)), out, gate_up, (width, gate_up.stride(0))
        )
        return out

    # ---------------------------------------------------------------- repeated heads
    def repeat_kv_heads(self, x: Tensor, groups: int) -> Tensor:
        repeated = x.new_empty(x.shape[1] * groups, x.shape[0], x.shape[2])
        self.repeat_kv_heads_step(repeated, x, 0)
        return repeated

    def repeat_kv_heads_step(self, mirror: Tensor, x: Tensor, start: int) -> None:
        columns, (n, H, D) = mirror.narrow(1, start, len(x)), x.shape
        if not known(x, mirror) or len(mirror) % H or mirror.shape[2] != D:
            return super().repeat_kv_heads_step(mirror, x, start)
        self._kernels.get("layers", "repeat_kv_heads", T=x.dtype)(
            Grid((D, n, len(mirror)), (min(D, GROUP), 1, 1)),
            columns,
            x,
            (len(mirror) // H, x.stride(0), x.stride(1), columns.stride(0), columns.stride(1)),
        )
        return None

    # ---------------------------------------------------------------- KV memory
    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not known(x):
            return super().quantise(x)
        vectors = x.reshape(-1, x.shape[-1])
        out, scale = vectors.new_empty(vectors.shape, dtype=torch.int8), x.new_empty(len(vectors), dtype=torch.float32)
        self._kernels.get("store", "quantise", T=x.dtype, KV=x.dtype)(
            Grid((LANES, len(vectors), 1), (LANES, 1, 1)), out, scale, vectors, (vectors.shape[1], vectors.stride(0))
        )
        return out.view(x.shape), scale.view(x.shape[:-1])

    def dequantise(self, x: Tensor, scale: Tensor) -> Tensor:
        if x.dtype is not torch.int8 or scale.dtype is not torch.float32:
            return super().dequantise(x, scale)
        expect(scale.shape == x.shape[:-1], f"scales {[*scale.shape]} do not fit vectors {[*x.shape]}")
        vectors, dim = x.reshape(-1, x.shape[-1]), x.shape[-1]
        out = vectors.new_empty(vectors.shape, dtype=torch.float32)
        self._kernels.get("store", "dequantise", T=torch.float32, KV=torch.int8)(
            Grid((dim, len(vectors), 1), (min(dim, GROUP), 1, 1)),
            out,
            vectors,
            scale.reshape(-1),
            (dim, vectors.stride(0)),
        )
        return out.view(x.shape)

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        if not known(k, v) or store.dtype not in (k.dtype, torch.int8):
            return super().write_kv(store, layer, k, v, at)
        expect(len(k) == len(v), f"{len(k)} keys and {len(v)} values are to be written")
        for entering, plane in zip((k, v), store.planes(layer), strict=True):
            expect(
                entering.shape[1:] == plane.numbers.shape[1::2],
                f"{[*entering.shape]} are to be written into a store of {[*plane.numbers.shape]}",
            )
        self._kernels.get("store", "write_kv", T=k.dtype, KV=store.dtype)(
            Grid((LANES, k.shape[1], len(k)), (LANES, 1, 1)),
            memory(store),
            k,
            v,
            *addresses(at),
            memory_sizes(store, layer, at),
            (k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        )
        return None

    def gather(self, store: KVStore, layer: int, at: Slots, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        plain = torch.float32 if store.dtype is torch.int8 else store.dtype
        kernel = self._kernels.get("store", "gather", T=plain, KV=store.dtype)
        places, sizes = positions.long().contiguous(), memory_sizes(store, layer, at)
        found = []
        for part, plane in zip(plane_sizes(store, layer), store.planes(layer), strict=True):
            _, H, _, dim = plane.numbers.shape
            out = torch.empty(len(places), H, dim, dtype=plain, device=places.device)
            kernel(
                Grid((LANES, H, len(places)), (LANES, 1, 1)),
                out,
                memory(store),
                at.table,
                at.row_seat,
                places,
                sizes,
                part,
                row,
            )
            found.append(out)
        return found[0], found[1]

    def copy_blocks(self, store: KVStore, src: list[int], dst: list[int]) -> None:
        expect(all(0 <= block < store.num_blocks for block in (*src, *dst)), "there is no such block")
        memory, page, size = store.arena.memory.view(torch.int32), store.arena.page_bytes // 16, store.block_bytes // 16
        kernel = self._kernels.get("store", "copy_blocks", T=torch.float32, KV=torch.float32)
        pairs = list(zip(src, dst, strict=True))
        for first in range(0, len(pairs), PAIRS):
            some = [block for pair in pairs[first : first + PAIRS] for block in pair]
            kernel(Grid((size, len(some) // 2, 1), (GROUP, 1, 1)), memory, some, page)

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
    ) -> None:
        if not known(q, out) or store.dtype not in (q.dtype, torch.int8) or shape_of(spec) is None:
            return super().attend(out, q, store, layer, at, spec, window=window)
        return self._attention(out, q, store, layer, at, spec, window)


def _parts(weight: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers as words of 32 bits, scale and offset, dense."""
    numbers = weight.numbers.contiguous()
    return numbers.view(torch.int32), weight.scale.contiguous(), weight.offset.contiguous()
