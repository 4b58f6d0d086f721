"""Work that does not fit a cache: for each operation, calls over data of a gibibyte, and the bytes they must move.

Shapes are those of Qwen2.5-0.5B, the smallest model that people serve. Knows no clock; bench.py has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
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
    return Load([methodcaller("linear", x, weight) for weight in weights], weights.nbytes)


def _rows(dtype: torch.dtype, tokens: int, width: int) -> Tensor:
    """[calls, tokens, width]"""
    calls = -(-GIBIBYTE // (tokens * width * dtype.itemsize))
    return numbers(calls * tokens * width, dtype).view(calls, tokens, width)


def rms_norm(dtype: torch.dtype, tokens: int) -> Load:
    x, weight = _rows(dtype, tokens, WIDTH), numbers(WIDTH, dtype)
    return Load([methodcaller("rms_norm", each, weight, 1e-6) for each in x], 2 * x.nbytes)


def add_rms_norm(dtype: torch.dtype, tokens: int) -> Load:
    x, delta = _rows(dtype, tokens, 2 * WIDTH).chunk(2, -1)
    weight = numbers(WIDTH, dtype)
    return Load(
        [methodcaller("add_rms_norm", *pair, weight, 1e-6) for pair in zip(x, delta, strict=True)], 4 * x.nbytes
    )


def rope(dtype: torch.dtype, tokens: int) -> Load:
    x, angles = _rows(dtype, tokens, 16 * 64).unflatten(-1, (16, 64)), torch.rand(tokens, 32)
    turn = angles.cos(), angles.sin(), torch.arange(tokens)
    return Load([methodcaller("rope", each, *turn) for each in x], 2 * x.nbytes)


def quantise(dtype: torch.dtype, tokens: int) -> Load:
    x = _rows(dtype, tokens, WIDTH)
    return Load([methodcaller("quantise", each) for each in x], x.nbytes + x.numel())


def dequantise(dtype: torch.dtype, tokens: int) -> Load:
    """Into float32, whatever the dtype of the model."""
    x = _rows(torch.int8, tokens, WIDTH)
    scale = torch.rand(tokens)
    return Load([methodcaller("dequantise", each, scale) for each in x], 5 * x.nbytes)


def silu_mul(dtype: torch.dtype, tokens: int) -> Load:
    x = _rows(dtype, tokens, 2 * INNER)
    return Load([methodcaller("silu_mul", each) for each in x], x.nbytes * 3 // 2)


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
        self.bytes = self.count * context * per_token

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
    calls = [methodcaller("attend", out, q, texts.store, layer, at, LAYERS[layer]) for at, layer in texts.rows()]
    return Load(calls, texts.bytes)


def write_kv(dtype: torch.dtype, context: int) -> Load:
    """One token of one sequence a call."""
    texts = Texts(dtype, context)
    k = numbers(2 * 64, dtype).view(1, 2, 64)
    calls = [methodcaller("write_kv", texts.store, layer, k, k, at) for at, layer in texts.rows()]
    return Load(calls, 4 * k.nbytes * len(calls))


def gather(dtype: torch.dtype, context: int) -> Load:
    texts, positions = Texts(dtype, context), torch.arange(context)
    calls = [methodcaller("gather", texts.store, layer, at, 0, positions) for at, layer in texts.rows()]
    return Load(calls, 2 * texts.bytes)


def copy_blocks(dtype: torch.dtype, context: int) -> Load:
    """One block a call, all layers."""
    texts = Texts(dtype, context)
    half = texts.store.num_blocks // 2
    calls = [methodcaller("copy_blocks", texts.store, [i], [half + i]) for i in range(half)]
    return Load(calls, 2 * half * texts.store.block_bytes)


LOADS: Mapping[str, Callable[[torch.dtype, int], Load]] = {
    each.__name__: each
    for each in (
        *(linear, rms_norm, add_rms_norm, rope, silu_mul, quantise, dequantise),
        *(write_kv, attend, gather, copy_blocks),
    )
}
