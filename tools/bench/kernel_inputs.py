"""Work that does not fit a cache: for each operation, calls over data of a gibibyte.

Shapes are those of Qwen2.5-0.5B, the smallest model that people serve. Knows neither what a call must move, which the
table says, nor a clock; kernels.py has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.memory import allocate
from kernels.ops import AttentionWeights, DecoderLayer, DecoderLayers, GatedMLP, Ops, Stored
from kernels.quantization import QuantizedTensor
from kernels.reference.backend import ReferenceOps
from kernels.sampling import Drawing
from kernels.selfcheck.attention_case import Step
from kernels.selfcheck.op_info import Op
from kernels.store import KVStore, Pages, block_bytes
from kernels.types import LayerSpec, Slots

GIBIBYTE = 1 << 30
WIDTH, INNER, VOCABULARY = 896, 4864, 151_936
KV_HEADS, HEADS, DIM = 2, 14, 64
QKV = (HEADS + 2 * KV_HEADS) * DIM
QUANTIZED_BITS, QUANTIZED_GROUP = 4, 64  # what most checkpoints of MLX have
LAYERS = [LayerSpec(KV_HEADS, HEADS, DIM, DIM, scale=DIM**-0.5)] * 24
BLOCK = 32  # tokens


Calls = Sequence[tuple[Any, ...]]  # the arguments of each call of one operation


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    """So many random numbers, a few million of them over and over."""
    few = torch.randn(min(count, 1 << 22)).to(dtype)
    many = allocate(count * dtype.itemsize).view(dtype)
    for part in many.split(len(few)):
        part.copy_(few[: len(part)])
    return many


def calls_of(op: Op, dtype: torch.dtype, rows: int) -> Calls:
    """Return the calls to measure of an operation; `rows` of x, or tokens of the text where it reads one."""
    calls: Calls = globals()[op.full_name.replace(".", "_")](dtype, rows)
    return calls


def linear(dtype: torch.dtype, rows: int) -> Calls:
    """x [rows, 896] times gate and up of one layer after the other."""
    count = -(-GIBIBYTE // (2 * INNER * WIDTH * dtype.itemsize))
    weights = numbers(count * 2 * INNER * WIDTH, dtype).view(count, 2 * INNER, WIDTH)
    x = numbers(rows * WIDTH, dtype).view(rows, WIDTH)
    return [(x, weight) for weight in weights]


def linear_quantized(dtype: torch.dtype, rows: int) -> Calls:
    """The same of weights of 4 bits a number; scale and offset in the dtype."""
    width, groups = WIDTH * QUANTIZED_BITS // 8, WIDTH // QUANTIZED_GROUP
    count = -(-GIBIBYTE // (2 * INNER * (width + 2 * groups * dtype.itemsize)))
    packed = numbers(count * 2 * INNER * width // dtype.itemsize, dtype).view(torch.uint8).view(count, 2 * INNER, width)
    scale, offset = numbers(2 * count * 2 * INNER * groups, dtype).view(2, count, 2 * INNER, groups)
    x = numbers(rows * WIDTH, dtype).view(rows, WIDTH)
    return [
        (x, QuantizedTensor(*of, QUANTIZED_BITS, QUANTIZED_GROUP)) for of in zip(packed, scale, offset, strict=True)
    ]


def qkv_proj_rope(dtype: torch.dtype, rows: int) -> Calls:
    """One layer after the other, each after what the one before adds."""
    x, positions = numbers(rows * WIDTH, dtype).view(rows, WIDTH), torch.arange(rows)
    return [(layer, x, x, positions) for layer in _layers(dtype, rows)]


def o_proj_add_norm(dtype: torch.dtype, rows: int) -> Calls:
    x = numbers(rows * WIDTH, dtype).view(rows, WIDTH)
    return [(layer, x, x) for layer in _layers(dtype, rows)]


def _layers(dtype: torch.dtype, positions: int) -> Iterator[AttentionWeights]:
    """Projections of q, k, v and of what attention finds, a gibibyte in all."""
    both = QKV * WIDTH + WIDTH * WIDTH
    norm, angle = numbers(WIDTH, dtype), torch.rand(positions, DIM // 2)
    for weights in numbers(-(-GIBIBYTE // (both * dtype.itemsize)) * both, dtype).split(both):
        qkv, o = weights[: QKV * WIDTH].view(QKV, WIDTH), weights[QKV * WIDTH :].view(WIDTH, WIDTH)
        tables = angle.cos(), angle.sin()
        yield AttentionWeights(norm, qkv, None, None, tables, HEADS, KV_HEADS, o, None, None, norm, 1e-6)


def mlp(dtype: torch.dtype, rows: int) -> Calls:
    h, each = numbers(rows * WIDTH, dtype).view(rows, WIDTH), 3 * INNER * WIDTH
    weights = numbers(-(-GIBIBYTE // (each * dtype.itemsize)) * each, dtype).split(each)
    parts = (some.split_with_sizes((2 * INNER * WIDTH, INNER * WIDTH)) for some in weights)
    return [(GatedMLP(up.view(2 * INNER, WIDTH), None, down.view(WIDTH, INNER), None, "silu"), h) for up, down in parts]


def forward_layers(dtype: torch.dtype, rows: int) -> Calls:
    """A step of so many sequences, each of which begins."""
    fed = (weights for weights, _ in mlp(dtype, rows))
    layers = [DecoderLayer(*parts, None) for parts in zip(LAYERS, _layers(dtype, rows), fed, strict=False)]
    specs = LAYERS[: len(layers)]
    arena = Pages(rows, block_bytes(specs, BLOCK, dtype))
    table, ones = torch.arange(rows, dtype=torch.int32), torch.arange(rows + 1, dtype=torch.int32)
    nothing = torch.zeros(rows, dtype=torch.int32)
    at = Slots(table.view(-1, 1), BLOCK, table, ones, nothing, nothing, num_decode=rows, max_q=1, max_kv=1)
    stored = [(slice(0, rows), Stored(KVStore(arena, specs, BLOCK, dtype), at, None))]
    x = numbers(rows * WIDTH, dtype).view(rows, WIDTH)
    return [(DecoderLayers(layers), x, Step(ReferenceOps(), specs, stored))]


def packed(ops: Ops, op: str, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call with its weights as these operations multiply them fastest."""
    first, second, *rest = *call, None
    if isinstance(first, DecoderLayers):
        return ops.pack_layers([layer.pack(ops) for layer in first.layers], second.dtype), *call[1:]
    if isinstance(first, AttentionWeights | GatedMLP):
        return first.pack(ops), *call[1:]
    return (first, ops.pack(second), *rest[:-1]) if op == "linear" else call


def sample(dtype: torch.dtype, rows: int) -> Calls:
    """Greedy tokens, from logits [rows, 151936]."""
    count = -(-GIBIBYTE // (rows * VOCABULARY * dtype.itemsize))
    logits = numbers(count * rows * VOCABULARY, dtype).view(count, rows, VOCABULARY)
    how = torch.tensor([Drawing()] * rows, dtype=torch.float64)
    return [(each, how) for each in logits]


def _rows(dtype: torch.dtype, tokens: int, width: int) -> Tensor:
    """[calls, tokens, width]"""
    calls = -(-GIBIBYTE // (tokens * width * dtype.itemsize))
    return numbers(calls * tokens * width, dtype).view(calls, tokens, width)


def rms_norm(dtype: torch.dtype, tokens: int) -> Calls:
    weight = numbers(WIDTH, dtype)
    return [(x, weight, 1e-6) for x in _rows(dtype, tokens, WIDTH)]


def add_rms_norm(dtype: torch.dtype, tokens: int) -> Calls:
    weight = numbers(WIDTH, dtype)
    return [(*both.chunk(2, -1), weight, 1e-6) for both in _rows(dtype, tokens, 2 * WIDTH)]


def rope(dtype: torch.dtype, tokens: int) -> Calls:
    angles = torch.rand(tokens, DIM // 2)
    turn = angles.cos(), angles.sin(), torch.arange(tokens)
    return [(x.unflatten(-1, (HEADS + KV_HEADS, DIM)), *turn) for x in _rows(dtype, tokens, (HEADS + KV_HEADS) * DIM)]


def silu_mul(dtype: torch.dtype, tokens: int) -> Calls:
    return [(gate_up,) for gate_up in _rows(dtype, tokens, 2 * INNER)]


def quantize(dtype: torch.dtype, tokens: int) -> Calls:
    return [(x,) for x in _rows(dtype, tokens, WIDTH)]


def dequantize(dtype: torch.dtype, tokens: int) -> Calls:
    """Into float32, whatever the dtype of the model."""
    scale = torch.rand(tokens)
    return [(x, scale) for x in _rows(torch.int8, tokens, WIDTH)]


class Texts:
    """Sequences of `context` tokens, a gibibyte in all, in blocks that lie anywhere. The last tokens are to enter."""

    def __init__(self, dtype: torch.dtype, context: int) -> None:
        per_token = block_bytes(LAYERS, BLOCK, dtype) // BLOCK
        self.count = max(1, -(-GIBIBYTE // (per_token * context)))
        self.context, self.dtype = context, dtype
        width = -(-context // BLOCK)
        page = block_bytes(LAYERS, BLOCK, dtype)
        arena = Pages(self.count * width, page)
        arena.memory.view(dtype).copy_(numbers(arena.memory.nbytes // dtype.itemsize, dtype))
        self.store = KVStore(arena, LAYERS, BLOCK, dtype)
        self.table = torch.randperm(self.count * width).int().view(self.count, width)

    def rows(self, queries: int = 1) -> Iterator[tuple[Slots, int]]:
        """The last tokens of each sequence, in each layer."""
        for sequence in range(self.count):
            at = self.slots(sequence, queries)
            yield from ((at, layer) for layer in range(len(LAYERS)))

    def slots(self, sequence: int, queries: int) -> Slots:
        assert queries <= self.context
        start = torch.tensor([self.context - queries], dtype=torch.int32)
        return Slots(
            self.table,
            BLOCK,
            row_seat=torch.tensor([sequence], dtype=torch.int32),
            q_start=torch.tensor([0, queries], dtype=torch.int32),
            start=start,
            kept=start,
            num_decode=int(queries == 1),
            max_q=queries,
            max_kv=self.context,
        )


def attend(dtype: torch.dtype, context: int, queries: int = 1) -> Calls:
    """The last queries of one sequence a call."""
    texts = Texts(dtype, context)
    q = numbers(queries * HEADS * DIM, dtype).view(queries, HEADS, DIM)
    out = torch.empty_like(q)
    return [(out, q, texts.store, layer, at, LAYERS[layer]) for at, layer in texts.rows(queries)]


def write_kv(dtype: torch.dtype, context: int) -> Calls:
    """One token of one sequence a call."""
    texts = Texts(dtype, context)
    k = numbers(KV_HEADS * DIM, dtype).view(1, KV_HEADS, DIM)
    return [(texts.store, layer, k, k, at) for at, layer in texts.rows()]


def gather(dtype: torch.dtype, context: int) -> Calls:
    texts, positions = Texts(dtype, context), torch.arange(context)
    return [(texts.store, layer, at, 0, positions) for at, layer in texts.rows()]


def repeat_kv_heads(dtype: torch.dtype, context: int) -> Calls:
    """All keys of one text a call."""
    return [(x.unflatten(-1, (KV_HEADS, DIM)), HEADS // KV_HEADS) for x in _rows(dtype, context, KV_HEADS * DIM)]


def repeat_kv_heads_step(dtype: torch.dtype, context: int) -> Calls:
    """The last key of one text a call, into a mirror of all of them."""
    x = numbers(KV_HEADS * DIM, dtype).view(1, KV_HEADS, DIM)
    mirrors = _rows(dtype, HEADS * context, DIM).unflatten(1, (HEADS, context))
    return [(mirror, x, context - 1) for mirror in mirrors]


def copy_blocks(dtype: torch.dtype, context: int) -> Calls:
    """One block a call, all layers."""
    store = Texts(dtype, context).store
    half = store.num_blocks // 2
    return [(store, [i], [half + i]) for i in range(half)]
