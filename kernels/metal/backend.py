"""The operations in Metal as torch sees them: what is passed to a kernel, and with how many threads.

Tensors lie on Apple's device, or on the CPU if an emulator runs the kernels; which of both is load.py's business. Metal
is told neither shapes nor bounds, so all of it is checked here. Arguments stand in the order in which the kernels take
them, and a tuple is the struct that stands there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.metal.library import Grid, Kernels
from kernels.ops import LayerSpec, Slots
from kernels.quantised import Quantised
from kernels.reference import ReferenceOps
from kernels.store import KVStore

LANES, GROUP = 32, 256  # threads of a simdgroup, and of a threadgroup; common.h
OUTPUTS = 4 * GROUP // LANES  # of a threadgroup; linear.metal
FEW = 8  # rows that are multiplied faster here than by torch
STEP = 8  # quantised numbers that a lane takes at once; quantised.metal
EXPANDED = 64 << 20  # bytes of a quantised weight that torch multiplies at a time
WIDTHS = (2, 4, 8)  # numbers of a head that a lane holds; attend.h
MAX_DIM = LANES * WIDTHS[-1]  # of a head
SPLIT = 256  # positions that a threadgroup sums; decode.metal
PAIRS = 256  # of blocks that one launch copies: an argument has at most 4 KiB
EVERYTHING = 2**31 - 1  # positions: no window
NO_SINK = torch.finfo(torch.float32).min
TYPES = (torch.float32, torch.float16, torch.bfloat16)


class MetalOps(ReferenceOps):
    """Implements `kernels.ops.Ops`. Shapes and types that it does not know it leaves to the reference."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._sinks: dict[tuple[torch.device, int], Tensor] = {}  # of layers that have none
        self._sums: dict[torch.device, Tensor] = {}  # of splits: it grows to the largest size asked for, and then stays

    # ---------------------------------------------------------------- layers
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, (outputs, inputs) = len(x), weight.shape
        if rows > FEW or not _known(x, weight, bias):
            return super().linear(x, weight, bias)
        _expect(x.shape[1] == inputs, f"x {[*x.shape]} does not fit a weight {[*weight.shape]}")
        _expect(bias is None or bias.shape == (outputs,), f"a bias must have {outputs} numbers")
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
        if not _known(x, bias) or weight.scale.dtype not in TYPES or weight.group % STEP or inputs * weight.bits % 32:
            return super().quantised_linear(x, weight, bias)
        _expect(x.shape[1] == inputs, f"x {[*x.shape]} does not fit a weight {[*weight.shape]}")
        _expect(bias is None or bias.shape == (outputs,), f"a bias must have {outputs} numbers")
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
        expand = self._kernels.get(
            "quantised", f"dequantise_weight_{weight.bits}", T=x.dtype, S=weight.scale.dtype
        )
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
        if not _known(x) or weight.dtype not in (x.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        _expect(weight.shape == x.shape[1:], f"a norm's weight {[*weight.shape]} does not fit x {[*x.shape]}")
        out = x.new_empty(x.shape)
        self._kernels.get("norms", "rms_norm", T=x.dtype, W=weight.dtype)(
            _a_group_a_row(x), out, x, weight.contiguous(), (x.shape[1], x.stride(0), 0), eps
        )
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not _known(x, delta) or weight.dtype not in (x.dtype, torch.float32):
            return super().add_rms_norm(x, delta, weight, eps)
        _expect(x.shape == delta.shape, f"{[*x.shape]} and {[*delta.shape]} are to be added")
        _expect(weight.shape == x.shape[1:], f"a norm's weight {[*weight.shape]} does not fit x {[*x.shape]}")
        total, out = x.new_empty(x.shape), x.new_empty(x.shape)
        sizes = (x.shape[1], x.stride(0), delta.stride(0))
        self._kernels.get("norms", "add_rms_norm", T=x.dtype, W=weight.dtype)(
            _a_group_a_row(x), total, out, x, delta, weight.contiguous(), sizes, eps
        )
        return total, out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        if not _known(x) or cos.dtype is not torch.float32:
            return super().rope(x, cos, sin, positions)
        N, H, D = x.shape
        _expect(cos.shape == sin.shape and 2 * cos.shape[1] == D, f"tables {[*cos.shape]} do not fit x {[*x.shape]}")
        _expect(positions.shape == (N,) and positions.dtype is torch.int64, f"there must be {N} positions, in int64")
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
        if not _known(gate_up):
            return super().silu_mul(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        _expect(gate_up.shape[1] == 2 * width, "the gate must be as wide as what it is multiplied with")
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
        if not _known(x, mirror) or len(mirror) % H or mirror.shape[2] != D:
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
        if not _known(x):
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
        _expect(scale.shape == x.shape[:-1], f"scales {[*scale.shape]} do not fit vectors {[*x.shape]}")
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
        if not _known(k, v) or store.dtype not in (k.dtype, torch.int8):
            return super().write_kv(store, layer, k, v, at)
        _expect(len(k) == len(v), f"{len(k)} keys and {len(v)} values are to be written")
        for entering, plane in zip((k, v), store.planes(layer), strict=True):
            _expect(
                entering.shape[1:] == plane.numbers.shape[1::2],
                f"{[*entering.shape]} are to be written into a store of {[*plane.numbers.shape]}",
            )
        self._kernels.get("store", "write_kv", T=k.dtype, KV=store.dtype)(
            Grid((LANES, k.shape[1], len(k)), (LANES, 1, 1)),
            _memory(store),
            k,
            v,
            *_rows(at),
            _memory_sizes(store, layer, at),
            (k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        )
        return None

    def gather(self, store: KVStore, layer: int, at: Slots, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        plain = torch.float32 if store.dtype is torch.int8 else store.dtype
        kernel = self._kernels.get("store", "gather", T=plain, KV=store.dtype)
        places, sizes = positions.long().contiguous(), _memory_sizes(store, layer, at)
        found = []
        for part, plane in zip((sizes[3:8], sizes[8:13]), store.planes(layer), strict=True):
            _, H, _, dim = plane.numbers.shape
            out = torch.empty(len(places), H, dim, dtype=plain, device=places.device)
            kernel(
                Grid((LANES, H, len(places)), (LANES, 1, 1)),
                out,
                _memory(store),
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
        _expect(all(0 <= block < store.num_blocks for block in (*src, *dst)), "there is no such block")
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
        if not _known(q, out) or store.dtype not in (q.dtype, torch.int8) or _width(spec) is None:
            return super().attend(out, q, store, layer, at, spec, window=window)
        _expect(
            q.shape[1:] == (spec.num_q_heads, spec.head_dim) and out.shape == (*q.shape[:2], spec.v_head_dim),
            f"queries {[*q.shape]} and their results {[*out.shape]} do not fit {spec}",
        )
        sinks = self._sinks_of(spec, q.device)
        sizes = (
            _memory_sizes(store, layer, at),
            (
                spec.num_q_heads,
                spec.num_q_heads // spec.num_kv_heads,
                *(q.stride(0), q.stride(1), out.stride(0), out.stride(1)),
                EVERYTHING if spec.window is None else spec.window,
                EVERYTHING if window is None else window,
            ),
            (spec.scale, spec.softcap or 0.0),
        )
        if at.num_decode:
            self._decode(out, q, store, at, spec, sinks, sizes)
        if at.num_rows > at.num_decode:
            self._prefill(out, q, store, at, spec, sinks, sizes)
        return None

    def _decode(
        self, out: Tensor, q: Tensor, store: KVStore, at: Slots, spec: LayerSpec, sinks: Tensor, sizes: _Sizes
    ) -> None:
        """Rows of one token: in one pass over the keys, or, where a text is long, its splits and then their sum."""
        width, group = _width(spec), spec.num_q_heads // spec.num_kv_heads
        together = min(1 << (group - 1).bit_length(), 4 if width == WIDTHS[-1] else 8)  # heads of a threadgroup
        splits = -(-at.max_kv // SPLIT)
        count = at.num_decode * spec.num_q_heads * splits if splits > 1 else 1
        sums = self._scratch_for(count * (2 + spec.v_head_dim), q.device)
        partial, values = sums[: 2 * count], sums[2 * count :]
        types = {"T": q.dtype, "KV": store.dtype}
        self._kernels.get("decode", f"decode_{width}_{together}", **types)(
            Grid((GROUP * spec.num_kv_heads * -(-group // together), at.num_decode, splits), (GROUP, 1, 1)),
            *(out, partial, values, q, _memory(store), *_rows(at), sinks, *sizes, splits),
        )
        if splits > 1:
            self._kernels.get("decode", f"merge_{width}", **types)(
                Grid((LANES, spec.num_q_heads, at.num_decode), (LANES, 1, 1)),
                *(out, partial, values, at.q_start, at.start, sinks, sizes[1], splits, spec.v_head_dim),
            )

    def _prefill(
        self, out: Tensor, q: Tensor, store: KVStore, at: Slots, spec: LayerSpec, sinks: Tensor, sizes: _Sizes
    ) -> None:
        """Rows of several tokens."""
        width, group = _width(spec), spec.num_q_heads // spec.num_kv_heads
        tiles = -(-at.max_q * group // (GROUP // LANES * (WIDTHS[-1] // width)))
        self._kernels.get("prefill", f"prefill_{width}", T=q.dtype, KV=store.dtype)(
            Grid((GROUP * tiles, spec.num_kv_heads, at.num_rows - at.num_decode), (GROUP, 1, 1)),
            *(out, q, _memory(store), *_rows(at), sinks, *sizes, at.num_decode),
        )

    def _sinks_of(self, spec: LayerSpec, device: torch.device) -> Tensor:
        """[Hq] float32"""
        if spec.sink_logits is not None:
            return spec.sink_logits.to(device, torch.float32).contiguous()
        key = (device, spec.num_q_heads)
        if key not in self._sinks:
            self._sinks[key] = torch.full((spec.num_q_heads,), NO_SINK, device=device)
        return self._sinks[key]

    def _scratch_for(self, numbers: int, device: torch.device) -> Tensor:
        """[numbers] float32"""
        sums = self._sums.get(device)
        if sums is None or len(sums) < numbers:
            sums = self._sums[device] = torch.empty(numbers, device=device)
        return sums


_Sizes = tuple[Sequence[int], Sequence[int], Sequence[float]]  # structs Memory, Attending, Scoring


def _known(*tensors: Tensor | None) -> bool:
    """Whether all have one type that kernels are written for. Raises ValueError for what no kernel could be passed."""
    there = [tensor for tensor in tensors if tensor is not None]
    for tensor in there:
        _expect(tensor.device == there[0].device, f"tensors lie on {tensor.device} and {there[0].device}")
        _expect(tensor.stride(-1) == 1 or tensor.shape[-1] == 1, "the last dimension of a tensor must be dense")
    return there[0].dtype in TYPES and all(tensor.dtype is there[0].dtype for tensor in there)


def _parts(weight: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers as words of 32 bits, scale and offset, dense."""
    numbers = weight.numbers.contiguous()
    return numbers.view(torch.int32), weight.scale.contiguous(), weight.offset.contiguous()


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _width(spec: LayerSpec) -> int | None:
    """Numbers of a head that a lane holds; None: a head is too wide."""
    return next((width for width in WIDTHS if LANES * width >= max(spec.head_dim, spec.v_head_dim)), None)


def _a_group_a_row(x: Tensor) -> Grid:
    """No more threads than there are numbers, in whole simdgroups."""
    group = min(GROUP, -(-x.shape[1] // LANES) * LANES)
    return Grid((group * len(x), 1, 1), (group, 1, 1))


def _memory(store: KVStore) -> Tensor:
    """All of the arena, in numbers of the store's type."""
    return store.arena.memory.view(store.dtype)


def _rows(at: Slots) -> tuple[Tensor, ...]:
    """In the order in which kernels take them."""
    return at.table, at.row_seat, at.q_start, at.start


def _memory_sizes(store: KVStore, layer: int, at: Slots) -> tuple[int, ...]:
    """The struct Memory of slots.h."""
    k, v = (_plane_sizes(plane.numbers) for plane in store.planes(layer))
    return (at.block_size, at.sinks, at.ring, *k, *v, at.table.stride(0), at.num_rows)


def _plane_sizes(numbers: Tensor) -> tuple[int, ...]:
    """The struct Plane of slots.h, of [blocks, H, block_size, dim]."""
    block, head, vector, _ = numbers.stride()
    return numbers.shape[-1], numbers.storage_offset(), block, head, vector
