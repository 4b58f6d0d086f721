"""The second self-check: runs the operations in the actual KV memory, with its large offsets, before it is used.

The first one (check.py) uses small memory, in which no offset is large. This one writes a few tokens at both ends of a
block, in all layers, and reads them again. What it writes stays in the block, but nothing reads it later. Knows no
strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

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
    written_at = cache(lambda heads: _make_slots(store, heads, blocks, [(start, n) for start in starts]))
    read_at = cache(lambda heads: _make_slots(store, heads, blocks, [(0, starts[-1] + n)]))
    indices = torch.cat([torch.arange(start, start + n, device=store.device) for start in starts])
    generator = torch.Generator().manual_seed(0)
    written = {i: _draw_kv(generator, layers[i], len(indices), store.device, dtype) for i in store.layers}
    # All layers are written before any is read, to find a layer that overwrites another.
    for layer, kv in written.items():
        ops.write_kv(store, layer, *kv, written_at(_count_tables(store, layer)))
    for layer, kv in written.items():
        heads = _count_tables(store, layer)
        where = indices[:, None].repeat(1, heads) if store.split_heads else indices
        gathered = ops.gather(store, layer, read_at(heads), 0, where)
        kept = (plane.encode(each).decode() for plane, each in zip(store.planes(layer), kv, strict=True))
        pairs = [(ours.to(dtype), theirs.to(dtype)) for ours, theirs in zip(gathered, kept, strict=True)]
        if not all(torch.equal(*pair) for pair in pairs):
            differs = torch.stack([(ours != theirs).flatten(1).any(1) for ours, theirs in pairs]).any(0)
            start = starts[int(differs.nonzero()[0]) // n]
            yield f"layer {layer} of block {block} does not keep what is written at positions from {start} on"
    for layer in {min(written), max(written)}:
        keys, values = written[layer]
        error = _compute_attention_error(ops, store, blocks, layer, layers[layer], (keys[:n], values[:n]))
        if not error <= ATTENTION[dtype]:  # NaN, too
            yield f"attend: off by {error:.1e} of the largest number in layer {layer} of block {block}"


def _compute_attention_error(
    ops: Ops, store: KVStore, blocks: Sequence[int], layer: int, spec: LayerSpec, kv: KV
) -> float:
    """Return the error of attention over the blocks' first tokens, compared with that over a copy in small memory.

    The last token is a decode row, and all tokens are a chunk: most backends have a kernel for each.
    """
    n, device = len(kv[0]), store.device
    near = KVStore(Pages(1, compute_block_bytes([spec], n, store.formats), device), [spec], n, store.formats)
    ops.write_kv(near, 0, *kv, _make_slots(near, 1, [0], [(0, n)]))
    q = torch.randn(n, spec.num_q_heads, spec.head_dim, generator=torch.Generator().manual_seed(1)) / MAX_NUMBER
    q = torch.cat((q[-1:], q)).to(device, kv[0].dtype)
    both = []
    for memory, number, where in ((store, layer, blocks), (near, 0, [0])):
        out = q.new_zeros(len(q), spec.num_q_heads, spec.v_head_dim)
        at = _make_slots(memory, _count_tables(memory, number), where, [(n - 1, 1), (0, n)], decode=1)
        ops.attend(out, q, memory, number, at, spec)
        both.append(out)
    return compute_error(*both)


def _count_tables(store: KVStore, layer: int) -> int:
    """Return the number of blocks in which a layer keeps a token: one for each of its heads if heads are split."""
    return store.heads(layer)[0] if store.split_heads else 1


def _make_slots(
    store: KVStore, heads: int, blocks: Sequence[int], rows: Sequence[tuple[int, int]], decode: int = 0
) -> Slots:
    """Return the addresses of rows, each from an index on and of a length; the first `decode` are decode rows.

    All rows are in the same block or, if heads are split, in the same block for each of `heads` KV heads.
    """

    def integers(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=store.device)

    def by_head(numbers: Sequence[Sequence[int]]) -> Tensor:
        """Return numbers [B, H] of rows and heads as a tensor; if heads are not split, only the first head's [B]."""
        return integers(numbers if store.split_heads else [row[0] for row in numbers])

    return Slots(
        table=integers([[block] for block in blocks[:heads]]),
        block_size=store.block_size,
        table_row=by_head([range(heads)] * len(rows)),
        q_start=integers([0, *accumulate(length for _, length in rows)]),
        start=by_head([[start] * heads for start, _ in rows]),
        num_decode=decode,
        max_q=max(length for _, length in rows),
        max_kv=max(start + length for start, length in rows),
    )


def _draw_kv(generator: torch.Generator, spec: LayerSpec, n: int, device: torch.device, dtype: torch.dtype) -> KV:
    """Return random integers as keys and values of n tokens; the first number of each vector is the largest."""
    drawn = []
    for dim in (spec.head_dim, spec.v_head_dim):
        numbers = torch.randint(-MAX_NUMBER, MAX_NUMBER + 1, (n, spec.num_kv_heads, dim), generator=generator)
        numbers[..., 0] = MAX_NUMBER
        drawn.append(numbers.to(device, dtype))
    return drawn[0], drawn[1]
