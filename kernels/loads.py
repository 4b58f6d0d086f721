"""Work that does not fit a cache: for each operation, calls over data of a gibibyte, and the bytes they must move.

Shapes are those of Qwen2.5-0.5B, the smallest model that people serve. Knows no clock; bench.py has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.arena import Arena
from kernels.ops import LayerSpec, Ops, Slots
from kernels.store import KVStore, block_bytes

GIBIBYTE = 1 << 30
WIDTH, INNER = 896, 4864
LAYERS = [LayerSpec(2, 14, 64, 64, scale=0.125)] * 24
BLOCK = 32  # tokens


class Load(NamedTuple):
    """Calls of one operation, each over other data."""

    calls: Sequence[Callable[[Ops], object]]
    bytes: int  # that all of them together have to read and write


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    """So many random numbers, a few million of them over and over."""
    few = torch.randn(min(count, 1 << 22)).to(dtype)
    return few.repeat(-(-count // len(few)))[:count]


def linear(dtype: torch.dtype, rows: int) -> Load:
    """x [rows, 896] times gate and up of one layer after the other."""
    count = -(-GIBIBYTE // (2 * INNER * WIDTH * dtype.itemsize))
    weights = numbers(count * 2 * INNER * WIDTH, dtype).view(count, 2 * INNER, WIDTH)
    x = numbers(rows * WIDTH, dtype).view(rows, WIDTH)
    return Load([partial(_linear, x, weight) for weight in weights], weights.nbytes)


def _linear(x: Tensor, weight: Tensor, ops: Ops) -> None:
    ops.linear(x, weight)


def _rows(dtype: torch.dtype, tokens: int, width: int) -> Tensor:
    """[calls, tokens, width]"""
    calls = -(-GIBIBYTE // (tokens * width * dtype.itemsize))
    return numbers(calls * tokens * width, dtype).view(calls, tokens, width)


def rms_norm(dtype: torch.dtype, tokens: int) -> Load:
    x, weight = _rows(dtype, tokens, WIDTH), numbers(WIDTH, dtype)
    return Load([partial(_rms_norm, weight, each) for each in x], 2 * x.nbytes)


def _rms_norm(weight: Tensor, x: Tensor, ops: Ops) -> None:
    ops.rms_norm(x, weight, 1e-6)


def add_rms_norm(dtype: torch.dtype, tokens: int) -> Load:
    x, delta = _rows(dtype, tokens, 2 * WIDTH).chunk(2, -1)
    weight = numbers(WIDTH, dtype)
    return Load([partial(_add_rms_norm, weight, *pair) for pair in zip(x, delta, strict=True)], 4 * x.nbytes)


def _add_rms_norm(weight: Tensor, x: Tensor, delta: Tensor, ops: Ops) -> None:
    ops.add_rms_norm(x, delta, weight, 1e-6)


def rope(dtype: torch.dtype, tokens: int) -> Load:
    x, angles = _rows(dtype, tokens, 16 * 64).unflatten(-1, (16, 64)), torch.rand(tokens, 32)
    turn = partial(_rope, angles.cos(), angles.sin(), torch.arange(tokens))
    return Load([partial(turn, each) for each in x], 2 * x.nbytes)


def _rope(cos: Tensor, sin: Tensor, positions: Tensor, x: Tensor, ops: Ops) -> None:
    ops.rope(x, cos, sin, positions)


def quantise(dtype: torch.dtype, tokens: int) -> Load:
    x = _rows(dtype, tokens, WIDTH)
    return Load([partial(_quantise, each) for each in x], x.nbytes + x.numel())


def _quantise(x: Tensor, ops: Ops) -> None:
    ops.quantise(x)


def dequantise(dtype: torch.dtype, tokens: int) -> Load:
    """Into float32, whatever the dtype of the model."""
    x = _rows(torch.int8, tokens, WIDTH)
    scale = torch.rand(tokens)
    return Load([partial(_dequantise, scale, each) for each in x], 5 * x.nbytes)


def _dequantise(scale: Tensor, x: Tensor, ops: Ops) -> None:
    ops.dequantise(x, scale)


def silu_mul(dtype: torch.dtype, tokens: int) -> Load:
    x = _rows(dtype, tokens, 2 * INNER)
    return Load([partial(_silu_mul, each) for each in x], x.nbytes * 3 // 2)


def _silu_mul(x: Tensor, ops: Ops) -> None:
    ops.silu_mul(x)


class Texts:
    """Sequences of `context` tokens, a gibibyte in all, in blocks that lie anywhere. The last token is to enter."""

    def __init__(self, dtype: torch.dtype, context: int) -> None:
        per_token = block_bytes(LAYERS, BLOCK, dtype) // BLOCK
        self.count = max(1, -(-GIBIBYTE // (per_token * context)))
        self.context, self.dtype = context, dtype
        width = -(-context // BLOCK)
        page = block_bytes(LAYERS, BLOCK, dtype)
        arena = Arena(self.count * width, page)
        arena.memory.view(dtype).copy_(numbers(arena.memory.nbytes // dtype.itemsize, dtype))
        self.store = KVStore(arena, LAYERS, BLOCK, dtype)
        self.table = torch.randperm(self.count * width).int().view(self.count, width)
        self.bytes = self.count * len(LAYERS) * context * per_token // len(LAYERS)

    def rows(self) -> Iterator[tuple[Slots, int]]:
        """The last token of each sequence, in each layer."""
        for sequence in range(self.count):
            at = self.slots(sequence)
            yield from ((at, layer) for layer in range(len(LAYERS)))

    def slots(self, sequence: int) -> Slots:
        start = torch.tensor([self.context - 1], dtype=torch.int32)
        return Slots(
            self.table,
            BLOCK,
            row_seat=torch.tensor([sequence], dtype=torch.int32),
            q_start=torch.tensor([0, 1], dtype=torch.int32),
            start=start,
            kept=start,
            num_decode=1,
            max_q=1,
            max_kv=self.context,
        )


def attend(dtype: torch.dtype, context: int) -> Load:
    """One query of one sequence a call."""
    texts = Texts(dtype, context)
    q = numbers(14 * 64, dtype).view(1, 14, 64)
    out = torch.empty_like(q)
    return Load([partial(_attend, out, q, texts.store, at, layer) for at, layer in texts.rows()], texts.bytes)


def _attend(out: Tensor, q: Tensor, store: KVStore, at: Slots, layer: int, ops: Ops) -> None:
    ops.attend(out, q, store, layer, at, LAYERS[layer])


def write_kv(dtype: torch.dtype, context: int) -> Load:
    """One token of one sequence a call."""
    texts = Texts(dtype, context)
    k = numbers(2 * 64, dtype).view(1, 2, 64)
    calls = [partial(_write, k, texts.store, at, layer) for at, layer in texts.rows()]
    return Load(calls, 4 * k.nbytes * len(calls))


def _write(k: Tensor, store: KVStore, at: Slots, layer: int, ops: Ops) -> None:
    ops.write_kv(store, layer, k, k, at)


def gather(dtype: torch.dtype, context: int) -> Load:
    texts, positions = Texts(dtype, context), torch.arange(context)
    calls = [partial(_gather, positions, texts.store, at, layer) for at, layer in texts.rows()]
    return Load(calls, 2 * texts.bytes)


def _gather(positions: Tensor, store: KVStore, at: Slots, layer: int, ops: Ops) -> None:
    ops.gather(store, layer, at, 0, positions)


def copy_blocks(dtype: torch.dtype, context: int) -> Load:
    """One block a call, all layers."""
    texts = Texts(dtype, context)
    half = texts.store.num_blocks // 2
    calls = [partial(_copy, texts.store, i, half + i) for i in range(half)]
    return Load(calls, 2 * half * texts.store.block_bytes)


def _copy(store: KVStore, src: int, dst: int, ops: Ops) -> None:
    ops.copy_blocks(store, [src], [dst])


LOADS: Mapping[str, Callable[[torch.dtype, int], Load]] = {
    each.__name__: each
    for each in (
        *(linear, rms_norm, add_rms_norm, rope, silu_mul, quantise, dequantise),
        *(write_kv, attend, gather, copy_blocks),
    )
}
