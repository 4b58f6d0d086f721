"""Benchmark inputs: for each operation, calls over 1 GiB of data, which does not fit into a cache.

Shapes are those of Qwen2.5-0.5B, the smallest model that is commonly served. A function that makes calls has the name
of the operation. Measures nothing; kernels.py does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.kv_formats import INT4, INT8, KVFormats
from kernels.memory import allocate
from kernels.ops import AttentionWeights, DecoderLayer, DecoderLayers, GatedMLP, KVLocation, Ops
from kernels.reference.backend import ReferenceOps
from kernels.sampling import SamplingRow
from kernels.selfcheck.attention_case import Step
from kernels.selfcheck.op_info import OpInfo
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots
from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.quantization import QuantizedTensor

GIBIBYTE = 1 << 30
HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 896, 4864, 151_936
KV_HEADS, HEADS, HEAD_DIM = 2, 14, 64
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
QUANTIZED_BITS, QUANTIZED_GROUP = 4, 64  # what most checkpoints of MLX have
LAYERS = [LayerSpec(KV_HEADS, HEADS, HEAD_DIM, HEAD_DIM, scale=HEAD_DIM**-0.5)] * 24
BLOCK_SIZE = 32  # tokens

QUANTIZED = {"int8": KVFormats(INT8, INT8), "int8/int4": KVFormats(INT8, INT4), "int4": KVFormats(INT4, INT4)}

Stored = torch.dtype | KVFormats  # formats of keys and values
Layout = Literal["paged", "contiguous", "ring"]
Calls = Sequence[tuple[Any, ...]]  # the arguments of each call of one operation


def make_random_values(count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` random values: four million distinct ones, repeated."""
    distinct = torch.randn(min(count, 1 << 22)).to(dtype)
    values = allocate(count * dtype.itemsize).view(dtype)
    for part in values.split(len(distinct)):
        part.copy_(distinct[: len(part)])
    return values


def make_calls(op: OpInfo, dtype: torch.dtype, rows: int) -> Calls:
    """Return the calls to measure of an operation; `rows` of x, or tokens of the sequence if it reads one."""
    calls: Calls = globals()[op.full_name.replace(".", "_")](dtype, rows)
    return calls


def linear(dtype: torch.dtype, rows: int) -> Calls:
    """Return products of x [rows, 896] with gate and up of one layer after the other."""
    count = -(-GIBIBYTE // (2 * INTERMEDIATE_SIZE * HIDDEN_SIZE * dtype.itemsize))
    weights = make_random_values(count * 2 * INTERMEDIATE_SIZE * HIDDEN_SIZE, dtype).view(
        count, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE
    )
    x = make_random_values(rows * HIDDEN_SIZE, dtype).view(rows, HIDDEN_SIZE)
    return [(x, weight) for weight in weights]


def linear_quantized(dtype: torch.dtype, rows: int) -> Calls:
    """Return the same products with weights of 4 bits; scale and offset have the dtype."""
    width, groups = HIDDEN_SIZE * QUANTIZED_BITS // 8, HIDDEN_SIZE // QUANTIZED_GROUP
    count = -(-GIBIBYTE // (2 * INTERMEDIATE_SIZE * (width + 2 * groups * dtype.itemsize)))
    packed = (
        make_random_values(count * 2 * INTERMEDIATE_SIZE * width // dtype.itemsize, dtype)
        .view(torch.uint8)
        .view(count, 2 * INTERMEDIATE_SIZE, width)
    )
    scale, offset = make_random_values(2 * count * 2 * INTERMEDIATE_SIZE * groups, dtype).view(
        2, count, 2 * INTERMEDIATE_SIZE, groups
    )
    x = make_random_values(rows * HIDDEN_SIZE, dtype).view(rows, HIDDEN_SIZE)
    return [
        (x, QuantizedTensor(*parts, QUANTIZED_BITS, QUANTIZED_GROUP))
        for parts in zip(packed, scale, offset, strict=True)
    ]


def linear_blocks(dtype: torch.dtype, rows: int) -> Calls:
    """Return the same products with weights in Q5_0, which files in Q4_K have for rows that 256 does not divide."""
    format = FORMATS["Q5_0"]
    width = HIDDEN_SIZE // format.columns * format.nbytes
    count = -(-GIBIBYTE // (2 * INTERMEDIATE_SIZE * width))
    blocks = make_random_values(count * 2 * INTERMEDIATE_SIZE * width // 2, torch.float16).view(torch.uint8)
    x = make_random_values(rows * HIDDEN_SIZE, dtype).view(rows, HIDDEN_SIZE)
    return [(x, BlockTensor(each, format)) for each in blocks.view(count, 2 * INTERMEDIATE_SIZE, width)]


def qkv_proj_rope(dtype: torch.dtype, rows: int) -> Calls:
    """Return a call for one layer after the other, each adding the output of the layer before."""
    x, positions = make_random_values(rows * HIDDEN_SIZE, dtype).view(rows, HIDDEN_SIZE), torch.arange(rows)
    return [(layer, x, x, positions) for layer in _make_attention_weights(dtype, rows)]


def o_proj_add_norm(dtype: torch.dtype, rows: int) -> Calls:
    x = make_random_values(rows * HIDDEN_SIZE, dtype).view(rows, HIDDEN_SIZE)
    return [(layer, x, x) for layer in _make_attention_weights(dtype, rows)]


def _make_attention_weights(dtype: torch.dtype, positions: int) -> Iterator[AttentionWeights]:
    """Yield projections of q, k, v and of attention's output, 1 GiB in all."""
    both = QKV * HIDDEN_SIZE + HIDDEN_SIZE * HIDDEN_SIZE
    norm, angle = make_random_values(HIDDEN_SIZE, dtype), torch.rand(positions, HEAD_DIM // 2)
    for weights in make_random_values(-(-GIBIBYTE // (both * dtype.itemsize)) * both, dtype).split(both):
        qkv, o = (
            weights[: QKV * HIDDEN_SIZE].view(QKV, HIDDEN_SIZE),
            weights[QKV * HIDDEN_SIZE :].view(HIDDEN_SIZE, HIDDEN_SIZE),
        )
        tables = angle.cos(), angle.sin()
        yield AttentionWeights(norm, qkv, None, None, tables, HEADS, KV_HEADS, o, None, None, norm, 1e-6)


def mlp(dtype: torch.dtype, rows: int) -> Calls:
    h, layer_size = (
        make_random_values(rows * HIDDEN_SIZE, dtype).view(rows, HIDDEN_SIZE),
        3 * INTERMEDIATE_SIZE * HIDDEN_SIZE,
    )
    weights = make_random_values(-(-GIBIBYTE // (layer_size * dtype.itemsize)) * layer_size, dtype).split(layer_size)
    parts = (
        layer_weights.split_with_sizes((2 * INTERMEDIATE_SIZE * HIDDEN_SIZE, INTERMEDIATE_SIZE * HIDDEN_SIZE))
        for layer_weights in weights
    )
    return [
        (
            GatedMLP(
                up.view(2 * INTERMEDIATE_SIZE, HIDDEN_SIZE),
                None,
                down.view(HIDDEN_SIZE, INTERMEDIATE_SIZE),
                None,
                "silu",
            ),
            h,
        )
        for up, down in parts
    ]


def forward_layers(dtype: torch.dtype, rows: int) -> Calls:
    """Return a step of the first tokens of `rows` sequences."""
    mlps = (weights for weights, _ in mlp(dtype, rows))
    layers = [
        DecoderLayer(*parts, None) for parts in zip(LAYERS, _make_attention_weights(dtype, rows), mlps, strict=False)
    ]
    specs = LAYERS[: len(layers)]
    pages = Pages(rows, compute_block_bytes(specs, BLOCK_SIZE, dtype))
    table, ones = torch.arange(rows, dtype=torch.int32), torch.arange(rows + 1, dtype=torch.int32)
    zeros = torch.zeros(rows, dtype=torch.int32)
    at = Slots(table.view(-1, 1), BLOCK_SIZE, table, ones, zeros, num_decode=rows, max_q=1, max_kv=1)
    stored = [(slice(0, rows), KVLocation(KVStore(pages, specs, BLOCK_SIZE, dtype), at, None))]
    x = make_random_values(rows * HIDDEN_SIZE, dtype).view(rows, HIDDEN_SIZE)
    return [(DecoderLayers(layers), x, Step(ReferenceOps(), specs, stored))]


def pack_weights(ops: Ops, op: str, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a call with its weights in the layout that these operations multiply fastest."""
    first, second, *rest = *call, None
    if isinstance(first, DecoderLayers):
        return ops.pack_layers([layer.pack(ops) for layer in first.layers], second.dtype), *call[1:]
    if isinstance(first, AttentionWeights | GatedMLP):
        return first.pack(ops), *call[1:]
    return (first, ops.pack(second), *rest[:-1]) if op == "linear" else call


def sample(dtype: torch.dtype, rows: int) -> Calls:
    """Return greedy sampling from logits [rows, 151936]."""
    count = -(-GIBIBYTE // (rows * VOCAB_SIZE * dtype.itemsize))
    logits = make_random_values(count * rows * VOCAB_SIZE, dtype).view(count, rows, VOCAB_SIZE)
    params = torch.tensor([SamplingRow()] * rows, dtype=torch.float64)
    return [(each, params) for each in logits]


def _make_rows(dtype: torch.dtype, tokens: int, width: int) -> Tensor:
    """Return random inputs [calls, tokens, width], 1 GiB in all."""
    calls = -(-GIBIBYTE // (tokens * width * dtype.itemsize))
    return make_random_values(calls * tokens * width, dtype).view(calls, tokens, width)


def rms_norm(dtype: torch.dtype, tokens: int) -> Calls:
    weight = make_random_values(HIDDEN_SIZE, dtype)
    return [(x, weight, 1e-6) for x in _make_rows(dtype, tokens, HIDDEN_SIZE)]


def add_rms_norm(dtype: torch.dtype, tokens: int) -> Calls:
    weight = make_random_values(HIDDEN_SIZE, dtype)
    return [(*both.chunk(2, -1), weight, 1e-6) for both in _make_rows(dtype, tokens, 2 * HIDDEN_SIZE)]


def rope(dtype: torch.dtype, tokens: int) -> Calls:
    angles = torch.rand(tokens, HEAD_DIM // 2)
    rope_arguments = angles.cos(), angles.sin(), torch.arange(tokens)
    return [
        (x.unflatten(-1, (HEADS + KV_HEADS, HEAD_DIM)), *rope_arguments)
        for x in _make_rows(dtype, tokens, (HEADS + KV_HEADS) * HEAD_DIM)
    ]


def silu_mul(dtype: torch.dtype, tokens: int) -> Calls:
    return [(gate_up,) for gate_up in _make_rows(dtype, tokens, 2 * INTERMEDIATE_SIZE)]


def fill_at_random(store: KVStore, blocks: Sequence[int]) -> None:
    """Fill blocks of a store with keys and values drawn at random, in its formats; all blocks have the same ones."""
    for layer in store.layers:
        for plane, dim in zip(store.planes(layer), store.heads(layer)[1:], strict=True):
            vectors = torch.randn(plane.numbers.shape[1], store.block_size, dim, device=store.device)
            plane.write(torch.tensor(blocks), plane.format.encode(vectors))


class Sequences:
    """The keys and values of sequences of `context` tokens, 1 GiB in all, in blocks at random places.

    In the layout "paged" blocks have 32 tokens; in the others each sequence has one block. A "ring" keeps the latest
    tokens of a longer sequence, and the newest one lies in the middle of its block.
    """

    def __init__(self, stored: Stored, context: int, layout: Layout = "paged", batch: int = 1) -> None:
        """Fill memory with random keys and values, for calls with `batch` sequences each."""
        self.context, self.layout, self.batch = context, layout, batch
        self.block_size = BLOCK_SIZE if layout == "paged" else context
        width, page = -(-context // self.block_size), compute_block_bytes(LAYERS, self.block_size, stored)
        self.num_sequences = -(-GIBIBYTE // (width * page * batch)) * batch
        pages = Pages(self.num_sequences * width, page)
        self.store = KVStore(pages, LAYERS, self.block_size, stored)
        fill_at_random(self.store, list(range(self.store.num_blocks)))
        self.block_table = torch.randperm(self.num_sequences * width).int().view(self.num_sequences, width)

    def iter_slots(self, queries: int = 1) -> Iterator[tuple[Slots, int]]:
        """Yield the addresses of the last `queries` tokens of `batch` sequences, and a layer, for all of them."""
        for first in range(0, self.num_sequences, self.batch):
            at = self.make_slots(first, queries)
            yield from ((at, layer) for layer in range(len(LAYERS)))

    def make_slots(self, first: int, queries: int) -> Slots:
        """Return the addresses of the last `queries` tokens of the sequences from number `first` on."""
        assert queries <= self.context
        ring = self.context if self.layout == "ring" else 0
        end = self.context + ring // 2
        return Slots(
            self.block_table,
            self.block_size,
            table_row=torch.arange(first, first + self.batch, dtype=torch.int32),
            q_start=torch.arange(self.batch + 1, dtype=torch.int32) * queries,
            start=torch.full((self.batch,), end - queries, dtype=torch.int32),
            num_decode=self.batch if queries == 1 else 0,
            max_q=queries,
            max_kv=end,
            ring=ring,
        )


def attend(stored: Stored, context: int, queries: int = 1, batch: int = 1, layout: Layout = "paged") -> Calls:
    """Return calls that attend from the last queries of `batch` sequences each; over integers these are bfloat16."""
    sequences = Sequences(stored, context, layout, batch)
    rows, q_dtype = batch * queries, stored if isinstance(stored, torch.dtype) else torch.bfloat16
    q = make_random_values(rows * HEADS * HEAD_DIM, q_dtype).view(rows, HEADS, HEAD_DIM)
    out, spec = torch.empty_like(q), LAYERS[0]._replace(window=context if layout == "ring" else None)
    return [(out, q, sequences.store, layer, at, spec) for at, layer in sequences.iter_slots(queries)]


def write_kv(dtype: torch.dtype, context: int) -> Calls:
    """Return calls that write the last token of one sequence each."""
    sequences = Sequences(dtype, context)
    k = make_random_values(KV_HEADS * HEAD_DIM, dtype).view(1, KV_HEADS, HEAD_DIM)
    return [(sequences.store, layer, k, k, at) for at, layer in sequences.iter_slots()]


def gather(dtype: torch.dtype, context: int) -> Calls:
    sequences, positions = Sequences(dtype, context), torch.arange(context)
    return [(sequences.store, layer, at, 0, positions) for at, layer in sequences.iter_slots()]


def repeat_kv_heads(dtype: torch.dtype, context: int) -> Calls:
    """Return calls that repeat all keys of one sequence each."""
    return [
        (x.unflatten(-1, (KV_HEADS, HEAD_DIM)), HEADS // KV_HEADS)
        for x in _make_rows(dtype, context, KV_HEADS * HEAD_DIM)
    ]


def repeat_kv_heads_step(dtype: torch.dtype, context: int) -> Calls:
    """Return calls that repeat the last key of one sequence each, into a mirror of all its keys."""
    x = make_random_values(KV_HEADS * HEAD_DIM, dtype).view(1, KV_HEADS, HEAD_DIM)
    mirrors = _make_rows(dtype, HEADS * context, HEAD_DIM).unflatten(1, (HEADS, context))
    return [(mirror, x, context - 1) for mirror in mirrors]


def select_blocks(dtype: torch.dtype, context: int) -> Calls:
    """Return calls that select an eighth of a sequence's blocks in one layer, whose summaries lie within the blocks."""
    num_candidates = context // BLOCK_SIZE
    numbers = len(LAYERS) * 2 * HEAD_DIM  # of the summaries of a block
    num_texts = max(1, GIBIBYTE // (KV_HEADS * num_candidates * numbers * dtype.itemsize))
    blocks = torch.arange(num_texts * KV_HEADS * num_candidates, dtype=torch.int32)
    summaries = make_random_values(len(blocks) * numbers, dtype).view(len(blocks), len(LAYERS), 2 * HEAD_DIM)
    counts = torch.tensor([[num_candidates, num_candidates // 8]], dtype=torch.int32)
    q = make_random_values(HEADS * HEAD_DIM, dtype).view(1, HEADS, HEAD_DIM)
    out = torch.empty(1, KV_HEADS, num_candidates // 8, dtype=torch.int32)
    return [
        (out, q, summaries[:, layer], candidates, counts)
        for candidates in blocks.view(-1, 1, KV_HEADS, num_candidates)
        for layer in range(len(LAYERS))
    ]


def copy_blocks(dtype: torch.dtype, context: int) -> Calls:
    """Return calls that copy one block each, in all layers."""
    store = Sequences(dtype, context).store
    half = store.num_blocks // 2
    return [(store, [i], [half + i]) for i in range(half)]


def copy_tokens(dtype: torch.dtype, context: int) -> Calls:
    """Return calls that copy every other token of a sequence to the blocks of another one, in one layer each."""
    sequences = Sequences(dtype, 2 * context)
    sources, targets = sequences.block_table.long().chunk(2) if sequences.num_sequences > 1 else _halves(sequences)
    slots = [(table[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1) for table in (sources, targets)]
    pairs = [(src[: 2 * context : 2].contiguous(), dst[:context]) for src, dst in zip(*slots, strict=False)]
    return [(sequences.store, layer, src, dst) for src, dst in pairs for layer in range(len(LAYERS))]


def _halves(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return the block tables of two sequences, if there is memory for one only."""
    first, second = sequences.block_table.long().chunk(2, 1)
    return first, second
