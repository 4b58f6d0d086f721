"""The second self-check: runs the operations in the actual KV memory, with its large offsets, before it is used.

The first one (check.py) uses small memory, in which no offset is large. This one writes a few tokens at both ends of a
block, in all layers, and reads them again. What it writes stays in the block, but nothing reads it later. Knows no
strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.ops import Ops
from kernels.selfcheck.check import compute_error
from kernels.selfcheck.op_info import ATTENTION
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots

MAX_TOKENS = 3  # most tokens written at each end of a block
MAX_NUMBER = 127  # integers up to this magnitude are written: every dtype stores them exactly, int8 with a scale of 1

KV = tuple[Tensor, Tensor]  # (keys, values) of a layer, both [n, H, dim]


def find_memory_fault(
    ops: Ops, store: KVStore, blocks: Sequence[int], layers: Sequence[LayerSpec], dtype: torch.dtype
) -> str | None:
    """Try the operations in unused blocks; return what is wrong with them, in words, or None if nothing is.

    There must be `store.blocks_per_token` blocks. `layers` are all layers of the model, of which the store may hold
    some only.
    """
    try:
        return next(_iter_faults(ops, store, blocks, layers, dtype), None)
    except Exception as error:  # a backend may raise anything
        return f"{type(error).__name__}: {error}"


def _iter_faults(
    ops: Ops, store: KVStore, blocks: Sequence[int], layers: Sequence[LayerSpec], dtype: torch.dtype
) -> Iterator[str]:
    n, block = min(MAX_TOKENS, store.block_size), blocks[0]
    starts = [0, store.block_size - n] if store.block_size >= 2 * n else [0]
    at = {i: _make_slots(store, i, blocks, starts, n) for i in store.layers}
    generator = torch.Generator().manual_seed(0)
    written = {i: _draw_kv(generator, layers[i], len(starts) * n, store.device, dtype) for i in store.layers}
    # All layers are written before any is read, to find a layer that overwrites another.
    for layer, kv in written.items():
        ops.write_kv(store, layer, *kv, at[layer])
    for layer, kv in written.items():
        for row, start in enumerate(starts):
            indices = torch.arange(start, start + n, device=store.device)
            if store.split_heads:
                indices = indices[:, None].repeat(1, layers[layer].num_kv_heads)
            gathered = ops.gather(store, layer, at[layer], row, indices)
            there = (
                torch.equal(ours.to(dtype), whole[row * n :][:n]) for ours, whole in zip(gathered, kv, strict=True)
            )
            if not all(there):
                yield f"layer {layer} of block {block} does not keep what is written at positions from {start} on"
    for layer in {min(written), max(written)}:
        keys, values = written[layer]
        error = _compute_attention_error(ops, store, blocks, layer, layers[layer], (keys[:n], values[:n]))
        if not error <= ATTENTION[dtype]:  # NaN, too
            yield f"attend: off by {error:.1e} of the largest number in layer {layer} of block {block}"


def _compute_attention_error(
    ops: Ops, store: KVStore, blocks: Sequence[int], layer: int, spec: LayerSpec, kv: KV
) -> float:
    """Return the error of attention over the blocks' first tokens, compared with that over a copy in small memory."""
    n, device = len(kv[0]), store.device
    near = KVStore(Pages(1, compute_block_bytes([spec], n, store.dtype), device), [spec], n, store.dtype)
    ops.write_kv(near, 0, *kv, _make_slots(near, 0, [0], [0], n))
    q = torch.randn(n, spec.num_q_heads, spec.head_dim, generator=torch.Generator().manual_seed(1)) / MAX_NUMBER
    q, errors = q.to(device, kv[0].dtype), []
    for first, decode in ((n - 1, 1), (0, 0)):  # the last token alone as a decode row; all tokens as a chunk
        both = []
        for memory, number, where in ((store, layer, blocks), (near, 0, [0])):
            out = q.new_zeros(n - first, spec.num_q_heads, spec.v_head_dim)
            at = _make_slots(memory, number, where, [first], n - first, decode)
            ops.attend(out, q[first:], memory, number, at, spec)
            both.append(out)
        errors.append(compute_error(*both))
    return max(errors)


def _make_slots(
    store: KVStore, layer: int, blocks: Sequence[int], starts: Sequence[int], n: int, decode: int = 0
) -> Slots:
    """Return the addresses of rows of n tokens, from each of `starts` on; `decode` are decode rows.

    All rows are in the same block or, if heads are split, in the same block for each KV head of the layer.
    """
    heads = store.heads(layer)[0] if store.split_heads else 1

    def integers(numbers: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=store.device)

    def by_head(numbers: Tensor) -> Tensor:
        return numbers if store.split_heads else numbers[:, 0].contiguous()

    return Slots(
        table=integers([[block] for block in blocks[:heads]]),
        block_size=store.block_size,
        table_row=by_head(integers([range(heads)] * len(starts))),
        q_start=integers([range(0, (len(starts) + 1) * n, n)])[0],
        start=by_head(integers([[start] * heads for start in starts])),
        num_decode=decode,
        max_q=n,
        max_kv=max(starts) + n,
    )


def _draw_kv(generator: torch.Generator, spec: LayerSpec, n: int, device: torch.device, dtype: torch.dtype) -> KV:
    """Return random integers as keys and values of n tokens; the first number of each vector is the largest."""
    drawn = []
    for dim in (spec.head_dim, spec.v_head_dim):
        numbers = torch.randint(-MAX_NUMBER, MAX_NUMBER + 1, (n, spec.num_kv_heads, dim), generator=generator)
        numbers[..., 0] = MAX_NUMBER
        drawn.append(numbers.to(device, dtype))
    return drawn[0], drawn[1]
