"""Every operation in plain torch, on any device: the specification that backends are compared with.

Arguments are checked here, too. The Metal kernels call the same functions (`check_linear` ...) before a launch; the C++
kernels have checks of their own (`kernels/cpu/check.h`). Attention is in attention.py. Knows no strategy.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import sampling
from kernels.arguments import (
    ANY,
    AT_LEAST_ONE,
    FLOATS,
    SlotsChecker,
    by_head,
    check,
    check_blocks_apart,
    check_slot_numbers,
    check_tensor,
    compute_indices,
)
from kernels.composite import CompositeOps
from kernels.kv_formats import KVFormats, Plane
from kernels.ops import PackedWeight, Weight
from kernels.products import multiply
from kernels.reference.attention import TiledAttention
from kernels.reference.block_selection import select_blocks
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots
from kernels.weights.quantization import count_tile_rows
from kernels.weights.stored import ConcatenatedWeight, QuantizedWeight, StoredWeight, dequantize_weight


class ReferenceOps(CompositeOps):
    """Implements `kernels.ops.Ops`. Keeps the index tensors of a step, which all layers share."""

    def __init__(self) -> None:
        self._addresses = SlotsChecker()
        self._tiled_attention = TiledAttention()
        self._writes: WeakKeyDictionary[Slots, tuple[Tensor | slice, Tensor, Tensor]] = WeakKeyDictionary()

    @property
    def batch_invariant_head_dim(self) -> int:
        return 0  # no head_dim: torch sums in another order for other numbers of rows

    @property
    def block_formats(self) -> Container[str]:
        return ()  # `linear` would dequantize them in each step

    def prepare(self, layers: Sequence[LayerSpec], dtype: torch.dtype, formats: KVFormats) -> None:
        pass  # plain torch compiles nothing

    def commit(self) -> None:
        pass  # on CPUs and CUDA, torch starts each operation at once

    # ---------------------------------------------------------------- layers
    def pack(self, weight: Weight) -> Weight:
        return weight.merge() if isinstance(weight, ConcatenatedWeight) else weight

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedWeight):
            raise ValueError("linear: the weight was packed by another backend; pack it with this backend's Ops.pack")
        check_linear(x, weight, bias)
        if isinstance(weight, ConcatenatedWeight):
            sizes = [part.shape[0] for part in weight.parts]
            biases = [None] * len(sizes) if bias is None else bias.split(sizes)
            return torch.cat([self.linear(x, *pair) for pair in zip(weight.parts, biases, strict=True)], 1)
        if not isinstance(weight, Tensor):
            return self._quantized_linear(x, weight, bias)
        multiplied, bias = x.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
        if weight.dtype is torch.bfloat16 and weight.shape[1] % 32 and weight.device.type == "cpu":
            # Multiply in float32: oneDNN's bfloat16 product (AMX) pads a row whose length is not a multiple of 32 with
            # the numbers after it, so a NaN in the next row would spread.
            wide = F.linear(multiplied.float(), weight.float(), None if bias is None else bias.float())
            return wide.to(weight.dtype).to(x.dtype)
        return multiply(multiplied, weight, bias).to(x.dtype)

    def _quantized_linear(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        """Multiply by a quantized weight: dequantize a few rows at a time to float32, which stay in the cache.

        Multiplies by `self.linear`, so that the result stays batch-invariant if the backend's `linear` is.
        """
        outputs, width = weight.shape
        out, wide = x.new_empty(len(x), outputs), x.float()
        rows = count_tile_rows(width)
        for first in range(0, outputs, rows):
            some = slice(first, first + rows)
            tile = dequantize_weight(weight.rows(some))
            out[:, some] = self.linear(wide, tile, None if bias is None else bias[some].float())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        check_rms_norm(x, weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if weight.dtype == torch.float32:
            return (normed * weight).to(x.dtype)
        return normed.to(x.dtype) * weight.to(x.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        check_add_rms_norm(x, delta, weight)
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        check_rope(x, cos, sin, positions)
        try:
            c, s = (table.index_select(0, positions)[:, None] for table in (cos, sin))  # [N, 1, D/2]
        except IndexError:
            raise ValueError(f"rope: positions must be from 0 to {len(cos) - 1}, and are {positions}") from None
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        check_silu_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def sample(self, logits: Tensor, params: Tensor) -> Tensor:
        check_sample(logits, params)
        return sampling.sample(logits, params)

    # ---------------------------------------------------------------- KV memory
    def check_slots(self, store: KVStore, layer: int, at: Slots, num_tokens: int) -> None:
        self._forget(at)
        heads, _, _ = store.heads(layer)
        check(
            not at.split_heads or (at.start.dim() == 2 and at.start.shape[1] == heads),
            "check_slots: start must have a column for each of {} heads, and is {}",
            *(heads, at.start.shape),
        )
        found = self._addresses.check("check_slots", at, store)
        check(found == num_tokens, "check_slots: the rows have {} tokens instead of {}", found, num_tokens)

    def _forget(self, at: Slots) -> None:
        """Forget what was computed from these addresses: a strategy may have changed their tensors since."""
        self._addresses.forget(at)
        self._writes.pop(at, None)
        self._tiled_attention.forget(at)

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        check_write_kv(store, layer, k, v)
        self._addresses.check("write_kv", at, store, len(k))
        if at not in self._writes:
            self._writes[at] = _compute_write_index(at)
        tokens, block, slot = self._writes[at]
        for new, plane in zip((k, v), store.planes(layer), strict=True):
            plane.write((block, _list_heads(plane), slot), plane.encode(new[tokens]))

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
        check_attend(out, q, store, layer, at, spec, window, lse)
        self._addresses.check("attend", at, store, len(q))
        self._tiled_attention.attend(out, q, store, layer, at, spec, window, lse)

    def gather(self, store: KVStore, layer: int, at: Slots, row: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        self._addresses.check("gather", at, store)
        check_gather(store, layer, at, row, indices)
        block, slot = at.locate(by_head(at.table_row)[row], by_head(indices))  # [S, 1 or H]
        k, v = (plane.select((block, _list_heads(plane), slot)).decode() for plane in store.planes(layer))
        return k, v

    def copy_blocks(self, store: KVStore, src: list[int], dst: list[int]) -> None:
        check_copy_blocks(store, src, dst)
        for a, b in zip(src, dst, strict=True):
            store.blocks[b].copy_(store.blocks[a])

    def copy_tokens(self, store: KVStore, layer: int, src: Tensor, dst: Tensor) -> None:
        check_copy_tokens(store, layer, src, dst)
        copies = []
        for plane in store.planes(layer):
            heads = _list_heads(plane)
            read, written = (
                (slots // store.block_size, heads, slots % store.block_size) for slots in (by_head(src), by_head(dst))
            )
            copies.append((plane, written, plane.select(read)))
        for plane, written, copied in copies:  # once all is read
            plane.write(written, copied)

    def repeat_kv_heads(self, x: Tensor, groups: int) -> Tensor:
        check_repeat_kv_heads(x, groups)
        S, H, D = x.shape
        repeated = x.new_empty(H * groups, S, D)
        _copy_repeated(repeated, x)
        return repeated

    def repeat_kv_heads_step(self, mirror: Tensor, x: Tensor, start: int) -> None:
        check_repeat_kv_heads_step(mirror, x, start)
        _copy_repeated(mirror.narrow(1, start, len(x)), x)

    def select_blocks(self, out: Tensor, q: Tensor, summaries: Tensor, candidates: Tensor, counts: Tensor) -> None:
        select_blocks(out, q, summaries, candidates, counts)


def _copy_repeated(columns: Tensor, x: Tensor) -> None:
    """Repeat each head of x [n,H,D] into `columns` [H * groups, n, D]; faster than torch's repeat_interleave."""
    columns.unflatten(0, (x.shape[1], -1)).copy_(x.transpose(0, 1)[:, None])


def _list_heads(plane: Plane) -> Tensor:
    """Return the numbers [H] of the heads in a block; blocks of split heads have head 0 only."""
    return torch.arange(plane.numbers.shape[1], device=plane.numbers.device)


def _compute_write_index(at: Slots) -> tuple[Tensor | slice, Tensor, Tensor]:
    """Return (tokens of the step that are written, block of each [N, h], slot of each [N, h]).

    h is 1 if all heads are in one block. Padding tokens are not written.
    """
    lengths = at.q_start.diff().long()
    row = torch.repeat_interleave(torch.arange(at.num_rows, device=lengths.device), lengths)  # [N]
    index = compute_indices(by_head(at.start), lengths, row)
    real = index[:, 0] >= 0
    tokens: Tensor | slice = slice(len(row)) if bool(real.all()) else real.nonzero()[:, 0]
    block, slot = at.locate(by_head(at.table_row)[row[tokens]], index[tokens])
    return tokens, block, slot


# -------------------------------------------------------------------- checks of arguments: layers
def check_linear(x: Tensor, weight: StoredWeight | ConcatenatedWeight, bias: Tensor | None) -> None:
    """Raise ValueError for wrong arguments of `Ops.linear`; a quantized weight was checked when it was made."""
    if isinstance(weight, Tensor):
        check_tensor("linear", "weight", weight, (AT_LEAST_ONE, AT_LEAST_ONE))
    check_tensor("linear", "x", x, (ANY, weight.shape[1]), device=weight.device)
    if bias is not None:
        check_tensor("linear", "bias", bias, weight.shape[:1], FLOATS, weight.device)


def check_rms_norm(x: Tensor, weight: Tensor, operation: str = "rms_norm") -> None:
    """Raise ValueError for wrong arguments of `Ops.rms_norm`."""
    check_tensor(operation, "x", x, (ANY, AT_LEAST_ONE))
    check_tensor(operation, "weight", weight, x.shape[1:], device=x.device)


def check_add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor) -> None:
    """Raise ValueError for wrong arguments of `Ops.add_rms_norm`."""
    check_rms_norm(x, weight, "add_rms_norm")
    check_tensor("add_rms_norm", "delta", delta, x.shape, (x.dtype,), x.device)


def check_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Raise ValueError for wrong arguments of `Ops.rope`; the values of `positions`, on the device, are not checked."""
    check_tensor("rope", "x", x, (ANY, AT_LEAST_ONE, AT_LEAST_ONE))
    N, _, D = x.shape
    check(D % 2 == 0, "rope: x must have heads of an even dimension, and is {}", x.shape)
    check_tensor("rope", "cos", cos, (ANY, D // 2), (torch.float32,), x.device)
    check_tensor("rope", "sin", sin, cos.shape, (torch.float32,), x.device)
    check_tensor("rope", "positions", positions, (N,), (torch.int64,), x.device)


def check_silu_mul(gate_up: Tensor) -> None:
    """Raise ValueError for a wrong argument of `Ops.silu_mul`."""
    check_tensor("silu_mul", "gate_up", gate_up, (ANY, AT_LEAST_ONE))
    check(gate_up.shape[1] % 2 == 0, "silu_mul: gate_up must be two halves of one width, and is {}", gate_up.shape)


def check_sample(logits: Tensor, params: Tensor) -> None:
    """Raise ValueError for wrong arguments of `Ops.sample`."""
    check_tensor("sample", "logits", logits, (ANY, AT_LEAST_ONE))
    check_tensor("sample", "params", params, (len(logits), 5), (torch.float64,), torch.device("cpu"))


def check_repeat_kv_heads(x: Tensor, groups: int) -> None:
    """Raise ValueError for wrong arguments of `Ops.repeat_kv_heads`."""
    check_tensor("repeat_kv_heads", "x", x, (ANY, AT_LEAST_ONE, AT_LEAST_ONE))
    check(0 < groups < 1 << 20, "repeat_kv_heads: there must be at least one group, not {}", groups)


def check_repeat_kv_heads_step(mirror: Tensor, x: Tensor, start: int) -> None:
    """Raise ValueError for wrong arguments of `Ops.repeat_kv_heads_step`."""
    check_tensor("repeat_kv_heads_step", "x", x, (ANY, AT_LEAST_ONE, AT_LEAST_ONE))
    n, H, D = x.shape
    check_tensor("repeat_kv_heads_step", "mirror", mirror, (AT_LEAST_ONE, ANY, D), (x.dtype,), x.device)
    heads, columns, _ = mirror.shape
    check(heads % H == 0, "repeat_kv_heads_step: {} heads of the mirror are not a multiple of {}", heads, H)
    check(
        0 <= start <= columns - n,
        "repeat_kv_heads_step: columns {} + {} are beyond the {} columns of the mirror",
        start,
        n,
        columns,
    )


# -------------------------------------------------------------------- checks of arguments: KV memory
def check_write_kv(store: KVStore, layer: int, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for wrong arguments of `Ops.write_kv`, except its addresses, which `SlotsChecker` checks."""
    H, D, Dv = store.heads(layer)
    device = store.device
    check_tensor("write_kv", "k", k, (ANY, H, D), device=device)
    check_tensor("write_kv", "v", v, (len(k), H, Dv), (k.dtype,), device)


def check_attend(
    out: Tensor,
    q: Tensor,
    store: KVStore,
    layer: int,
    at: Slots,
    spec: LayerSpec,
    window: int | None,
    lse: Tensor | None = None,
) -> None:
    """Raise ValueError for wrong arguments of `Ops.attend`, except its addresses, which `SlotsChecker` checks."""
    H, D, Dv = store.heads(layer)
    heads, device = spec.num_q_heads, store.device
    check(
        (spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (H, D, Dv) and heads > 0 and heads % H == 0,
        "attend: {} does not fit a store of {} heads of {} and {}",
        *(spec, H, D, Dv),
    )
    check(
        (spec.window is None or spec.window > 0) and (window is None or window > 0),
        "attend: a window must have at least one token, not {} or {}",
        *(spec.window, window),
    )
    check(
        at.split_heads == store.split_heads, "attend: a store has split heads, and its addresses do not, or vice versa"
    )
    check_tensor("attend", "q", q, (ANY, heads, D), device=device)
    check_tensor("attend", "out", out, (len(q), heads, Dv), (q.dtype,), device)
    if lse is not None:
        check_tensor("attend", "lse", lse, (len(q), heads), (torch.float32,), device)
    if spec.sink_logits is not None:
        check_tensor("attend", "sink_logits", spec.sink_logits, (heads,), device=device)


def check_gather(store: KVStore, layer: int, at: Slots, row: int, indices: Tensor) -> None:
    """Raise ValueError for wrong arguments of `Ops.gather`, except its addresses, which were checked before."""
    H, _, _ = store.heads(layer)
    check(0 <= row < at.num_rows, "gather: there is no row {} among {}", row, at.num_rows)
    sizes = (ANY, H) if store.split_heads else (ANY,)
    check_tensor("gather", "indices", indices, sizes, (torch.int64, torch.int32), store.device)
    start, length = by_head(at.start)[row], at.q_start[row + 1] - at.q_start[row]
    there = bool(((by_head(indices) >= 0) & (by_head(indices) < start + length) & (start >= 0)).all())
    check(there, "gather: indices must be from 0 to the row's last, and are {}", indices)


def check_copy_blocks(store: KVStore, src: Sequence[int], dst: Sequence[int]) -> None:
    """Raise ValueError for wrong arguments of `Ops.copy_blocks`."""
    check(len(src) == len(dst), "copy_blocks: src has {} blocks and dst {}; they must be as many", len(src), len(dst))
    inside = all(0 <= block < store.num_blocks for block in (*src, *dst))
    check(inside, "copy_blocks: blocks must be from 0 to {}", store.num_blocks - 1)
    written = set(dst)  # no block may be read and written, as a GPU copies all at the same time
    is_separate = len(written) == len(dst) and written.isdisjoint(src)
    check(is_separate, "copy_blocks: a block is written twice, or read and written; copy it in another call")
    check_blocks_apart("copy_blocks", torch.tensor([*src, *dst], dtype=torch.int64), store.pages_per_block)


def check_copy_tokens(store: KVStore, layer: int, src: Tensor, dst: Tensor) -> None:
    """Raise ValueError for wrong arguments of `Ops.copy_tokens`."""
    heads = store.k(layer).shape[1]  # of a block
    for name, slots, size in (("src", src, ANY), ("dst", dst, src.shape[0] if src.dim() else ANY)):
        sizes = (size, heads) if slots.dim() == 2 else (size,)
        check_tensor("copy_tokens", name, slots, sizes, (torch.int64,), store.device)
        check(slots.stride(-1) == 1 or slots.shape[-1] <= 1, "copy_tokens: {} must be dense", name)
    if len(src):
        read, written = by_head(src), by_head(dst)
        check_slot_numbers("copy_tokens", read, written, store.num_blocks * store.block_size)
        blocks = torch.cat((read.flatten(), written.flatten())) // store.block_size
        check_blocks_apart("copy_tokens", blocks, store.pages_per_block)
