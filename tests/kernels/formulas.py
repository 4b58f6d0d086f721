"""Each operation by its formula, in float64 or bit for bit, and the properties of a shape that it depends on.

A new operation of the table needs a formula here. Formulas share no code with kernels, except for the memory of keys
and values (kernels/selfcheck/attention_case.py). test_ops.py chooses the shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionWeights, DecoderLayer, GatedMLP, KVLocation, Ops
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout, Step
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec
from kernels.weights.block_formats import FORMATS
from kernels.weights.quantization import QuantizedTensor
from plugin_kit.driver.reference import attention, keep_all, visible_keys
from tests.kernels.block_weights import draw_weight

KV_HEADS = 2
OTHER = LayerSpec(3, 3, 40, 72)  # a layer before the one that is tried
APART = 1 << 32  # bytes


class Shape(NamedTuple):
    """The shape of the arguments of an operation."""

    dtype: torch.dtype
    head_dim: int = 64
    group: int = 1  # query heads of a KV head
    length: int = 1  # tokens
    lies: str = "dense"  # or sliced (between NaN), or apart: rows are more than 4 GiB from each other
    block_size: int = 16
    window: int | None = None
    layers_before: int = 0
    unused_blocks: int = 3


Pairs = Iterator[tuple[Tensor, Tensor]]  # what came of it, and what it should be


def laid(x: Tensor, lies: str) -> Tensor:
    """Return the same numbers in another memory layout."""
    if lies == "dense":
        return x
    if lies == "sliced":
        *outer, rows, width = x.shape
        nothing = torch.nan if x.is_floating_point() else 0
        around = x.new_full((*outer, rows + 3, width + 5), nothing)
        place = around[..., 1:-2, 2:-3]
    else:  # untouched memory costs nothing
        stride = APART // x.itemsize + 32
        around = torch.empty((len(x) - 1) * stride + x[0].numel(), dtype=x.dtype)
        place = around.as_strided(x.shape, (stride, *x.stride()[1:]))
    return place.copy_(x)


class Draw:
    """Draws random numbers in a shape's dtype and memory layout; each new instance draws the same."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self._generator = shape, torch.Generator().manual_seed(0)

    def dense(self, *size: int, times: float = 1.0) -> Tensor:
        return (times * torch.randn(*size, generator=self._generator)).to(self._shape.dtype)

    def __call__(self, *size: int, times: float = 1.0) -> Tensor:
        return laid(self.dense(*size, times=times), self._shape.lies)


# -------------------------------------------------------------------- layers
def _width(shape: Shape) -> int:
    """Return the width of a vector without heads, which depends on both numbers of the shape."""
    return shape.head_dim + 32 * shape.group


def linear(ops: Ops, shape: Shape) -> Pairs:
    draw = Draw(shape)
    x, weight = draw(shape.length, shape.head_dim), draw.dense(shape.group * 32, shape.head_dim)
    bias = draw.dense(shape.group * 32)
    product = x.double() @ weight.double().T
    yield ops.linear(x, weight), product
    yield ops.linear(x, weight, bias), product + bias.double()


def linear_quantized(ops: Ops, shape: Shape) -> Pairs:
    """With 8 and with 4 bits, in groups of 32, or 16 if 32 does not divide a row; scales of both signs."""
    draw, outputs, width = Draw(shape), 32 * shape.group - 1, shape.head_dim
    x, bias = draw(shape.length, width), draw.dense(outputs)
    group = 16 if width % 32 else 32
    scale, offset = draw.dense(2, outputs, width // group)
    for bits in (8, 4):
        whole = draw.dense(outputs, width, times=2.0**bits).double().clamp(0, 2**bits - 1).floor()
        value = whole * scale.double().repeat_interleave(group, 1) + offset.double().repeat_interleave(group, 1)
        numbers = whole if bits == 8 else whole[:, ::2] + 16 * whole[:, 1::2]
        weight = QuantizedTensor(numbers.to(torch.uint8), scale, offset, bits, group)
        yield ops.linear(x, weight), x.double() @ value.T
        yield ops.linear(x, weight, bias), x.double() @ value.T + bias.double()


def linear_blocks(ops: Ops, shape: Shape) -> Pairs:
    """In some block formats, drawn anew each time."""
    draw, rng = Draw(shape), random.Random(int(torch.randint(1 << 31, ())))
    x, bias = draw(shape.length, 256), draw.dense(32 * shape.group - 1)
    for format in rng.sample([*FORMATS.values()], 3):
        weight = draw_weight(rng, format, len(bias), 256 // format.columns, spread=0.1)
        value = torch.from_numpy(gguf.quants.dequantize(weight.blocks.numpy(), format.kind)).double()
        packed = ops.pack(weight)
        yield ops.linear(x, packed), x.double() @ value.T
        yield ops.linear(x, packed, bias), x.double() @ value.T + bias.double()


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def rms_norm(ops: Ops, shape: Shape) -> Pairs:
    draw, width = Draw(shape), _width(shape)
    x, weight = draw(shape.length, width, times=30), draw.dense(width)
    for each in (weight, weight.float()):  # as in Llama, as in Gemma
        yield ops.rms_norm(x, each, 1e-6), _normed(x, each)


def add_rms_norm(ops: Ops, shape: Shape) -> Pairs:
    draw, width = Draw(shape), _width(shape)
    x, delta, weight = draw(shape.length, width), draw(shape.length, width), draw.dense(width)
    for each in (weight, weight.float()):
        total, normed = ops.add_rms_norm(x, delta, each, 1e-6)
        yield total, x.double() + delta.double()
        yield normed, _normed(total, each)


@cache
def _turns(half: int) -> Tensor:
    """Return the complex numbers by which the pairs of a vector are multiplied, at 9,000 positions."""
    angles = torch.arange(9000).double()[:, None] * 10_000.0 ** -(torch.arange(half).double() / half)
    return torch.polar(torch.ones(1).double(), angles)


def _turned(x: Tensor, turns: Tensor, positions: Tensor) -> Tensor:
    first, second = x.double().chunk(2, -1)
    turned = torch.complex(first, second) * turns[positions][:, None]
    return torch.cat((turned.real, turned.imag), -1)


def rope(ops: Ops, shape: Shape) -> Pairs:
    x, turns = Draw(shape)(shape.length, shape.group, shape.head_dim), _turns(shape.head_dim // 2)
    positions = (torch.arange(shape.length) * 7919) % len(turns)
    yield ops.rope(x, turns.real.float(), turns.imag.float(), positions), _turned(x, turns, positions)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def silu_mul(ops: Ops, shape: Shape) -> Pairs:
    gate_up = Draw(shape)(shape.length, 2 * _width(shape))
    yield ops.silu_mul(gate_up), _gated(gate_up)


# -------------------------------------------------------------------- around attention
MODEL = 64  # width


def _around(draw: Draw, shape: Shape) -> AttentionWeights:
    """Return a layer of one KV head and a group of query heads."""
    turns, dim = _turns(shape.head_dim // 2), shape.head_dim
    norm, next_norm, qkv = draw.dense(MODEL), draw.dense(MODEL), draw.dense((shape.group + 2) * dim, MODEL)
    o, bias = draw.dense(MODEL, shape.group * dim), draw.dense((shape.group + 2) * dim)
    tables = turns.real.float(), turns.imag.float()
    return AttentionWeights(norm, qkv, bias, None, tables, shape.group, 1, o, None, None, next_norm, 1e-6)


def qkv_proj_rope(ops: Ops, shape: Shape) -> Pairs:
    draw = Draw(shape)
    layer, x, added = _around(draw, shape), draw(shape.length, MODEL), draw(shape.length, MODEL)
    turns = _turns(shape.head_dim // 2)
    positions = (torch.arange(shape.length) * 7919) % len(turns)
    total, q, k, v = ops.qkv_proj_rope(layer.pack(ops), x, added, positions)
    qkv = _normed(total, layer.norm) @ layer.qkv.double().T + layer.qkv_bias.double()
    heads = qkv.unflatten(1, (shape.group + 2, shape.head_dim)).split_with_sizes((shape.group, 1, 1), 1)
    yield total, x.double() + added.double()
    yield from zip((q, k), (_turned(each, turns, positions) for each in heads[:2]), strict=True)
    yield v, heads[2]


def forward_layers(ops: Ops, shape: Shape) -> Pairs:
    """One layer: a prompt, then a token after it."""
    draw, inner, spec = Draw(shape), _width(shape), _spec(shape)._replace(num_kv_heads=1, num_q_heads=shape.group)
    weights = _around(draw, shape)
    weights = replace(weights, qkv=weights.qkv / 8, o=weights.o / 16)  # as in models: what passes stays of one size
    gate_up, down = draw.dense(2 * inner, MODEL) / 8, draw.dense(MODEL, inner) / 16
    layer = DecoderLayer(spec, weights, GatedMLP(gate_up, None, down, None, "silu"), None)
    stack = ops.pack_layers([layer.pack(ops)], shape.dtype)
    length = min(shape.length, 200)
    case = AttentionCase(ops, Layout(shape.block_size), spec, [CaseRow(0, length + 1)], shape.dtype)
    xs = draw(length, MODEL), draw(1, MODEL)
    got = []
    for start, x in zip((0, length), xs, strict=True):
        at = case.make_slots([(0, start, len(x))])
        stored = slice(0, len(x)), KVLocation(case.store, at, shape.window)
        got.append(ops.forward_layers(stack, x, Step(ops, [spec], [stored])))
    x, turns = torch.cat(xs).double(), _turns(shape.head_dim // 2)
    qkv = _normed(x, weights.norm) @ weights.qkv.double().T + weights.qkv_bias.double()
    q, k, v = qkv.unflatten(1, (shape.group + 2, shape.head_dim)).split_with_sizes((shape.group, 1, 1), 1)
    q, k = (_turned(each, turns, torch.arange(length + 1)) for each in (q, k))
    keeps = keep_all if shape.window is None else lambda i, j: i - j < shape.window
    found = attention(q, k, v, spec, visible_keys(spec, length + 1, keeps)).flatten(1)
    x = x + found @ weights.o.double().T
    x = x + _gated(_normed(x, weights.next_norm) @ gate_up.double().T) @ down.double().T
    yield from zip(got, x.split_with_sizes((length, 1)), strict=True)


def o_proj_add_norm(ops: Ops, shape: Shape) -> Pairs:
    draw = Draw(shape)
    layer, x, mixed = _around(draw, shape), draw(shape.length, MODEL), draw(shape.length, shape.group * shape.head_dim)
    total, normed = ops.o_proj_add_norm(layer.pack(ops), x, mixed)
    yield total, x.double() + mixed.double() @ layer.o.double().T
    yield normed, _normed(total, layer.next_norm)


def mlp(ops: Ops, shape: Shape) -> Pairs:
    draw, inner = Draw(shape), _width(shape)
    h, gate_up, down = draw(shape.length, MODEL), draw.dense(2 * inner, MODEL), draw.dense(MODEL, inner)
    weights = GatedMLP(gate_up, None, down, None, "silu").pack(ops)
    yield ops.mlp(weights, h), _gated(h.double() @ gate_up.double().T) @ down.double().T


def sample(ops: Ops, shape: Shape) -> Pairs:
    """Many logits of 16 bits are equal; the first of them must be chosen."""
    draw, rows = Draw(shape), min(shape.length, 9)
    logits = draw(rows, 8 * _width(shape) + 3, times=2)
    params = torch.rand(rows, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    params[:, 1] = (params[:, 1] * 60).floor()  # top-k
    params[:, 3] /= 10  # min-p
    for off in (0, 1, 2, 3):  # so that each filter is the last, too, and the first row greedy
        params[off::4, off] = float(off == 2)
    yield ops.sample(logits, params), torch.tensor([_drawn(*row) for row in zip(logits, params.tolist(), strict=True)])


def _drawn(logits: Tensor, params: Sequence[float]) -> int:
    temperature, top_k, top_p, min_p, noise = params
    numbers = logits.double().numpy()
    if not temperature:
        return int(numbers.argmax())
    weights = np.exp((numbers - numbers.max()) / temperature)
    in_line = np.argsort(-weights, kind="stable")
    in_line = in_line[weights[in_line] >= min_p][: int(top_k) or None]
    before = weights[in_line].cumsum() - weights[in_line]
    kept = np.sort(in_line[before < top_p * weights[in_line].sum()])
    stretches = weights[kept].cumsum()
    return int(kept[(stretches <= noise * stretches[-1]).sum()])


# -------------------------------------------------------------------- stored keys and values
def _spec(shape: Shape) -> LayerSpec:
    dim = shape.head_dim
    return LayerSpec(KV_HEADS, KV_HEADS * shape.group, dim, dim, scale=dim**-0.5)


def _make_case(ops: Ops, shape: Shape) -> AttentionCase:
    """Return a case with a decode row and a chunk."""
    chunk = min(9, shape.length)
    rows = [CaseRow(shape.length - 1, 1), CaseRow(shape.length - chunk, chunk)]
    return AttentionCase(
        ops,
        Layout(shape.block_size),
        _spec(shape),
        rows if chunk > 1 else rows[:1],
        shape.dtype,
        before=[OTHER] * shape.layers_before,
        unused_blocks=shape.unused_blocks,
    )


def _enter(case: AttentionCase, shape: Shape) -> None:
    k, v = (laid(case.get_step_inputs(part), shape.lies) for part in (case.k, case.v))
    case.ops.write_kv(case.store, case.layer, k, v, case.at)


def write_kv(ops: Ops, shape: Shape) -> Pairs:
    case = _make_case(ops, shape)
    _enter(case, shape)
    for i in range(len(case.rows)):
        position = torch.arange(shape.length)
        block, slot = case.table[i].long()[position // shape.block_size], position % shape.block_size
        for plane, part in ((case.store.k(case.layer), case.k), (case.store.v(case.layer), case.v)):
            yield plane[block, :, slot], part[i]
            as_bits = {2: torch.int16, 4: torch.int32}[shape.dtype.itemsize]
            plane.view(as_bits)[block, :, slot] = -1
    assert _untouched(case.pages.memory), "something else was written"


def _untouched(memory: Tensor) -> bool:
    """Return memory of 0xFF, which is NaN, as in a new case."""
    return int(memory.min()) == 0xFF


def attend(ops: Ops, shape: Shape) -> Pairs:
    case = _make_case(ops, shape)
    _enter(case, shape)
    q = laid(case.get_step_inputs(case.q), shape.lies)
    out = laid(torch.zeros_like(q), shape.lies)
    ops.attend(out, q, case.store, case.layer, case.at, case.spec, window=shape.window)
    window = shape.window
    keeps = keep_all if window is None else lambda i, j: i - j < window
    for i, got in enumerate(out.split([row.tokens for row in case.rows])):
        past = case.rows[i].past
        mask = visible_keys(case.spec, shape.length, keeps, first=past)
        yield got, attention(case.q[i][past:], case.k[i], case.v[i], case.spec, mask)


def gather(ops: Ops, shape: Shape) -> Pairs:
    case = _make_case(ops, shape)
    _enter(case, shape)
    positions = (torch.arange(min(50, shape.length)) * 7919) % shape.length
    for row in range(len(case.rows)):
        k, v = ops.gather(case.store, case.layer, case.at, row, positions)
        yield k, case.k[row][positions]
        yield v, case.v[row][positions]


def copy_blocks(ops: Ops, shape: Shape) -> Pairs:
    """Copies the first block to the last, and the last but one to the second."""
    layers = [OTHER] * shape.layers_before + [_spec(shape)]
    pages = Pages(4 + shape.unused_blocks, compute_block_bytes(layers, shape.block_size, shape.dtype))
    pages.memory.fill_(0xFF)
    store = KVStore(pages, layers, shape.block_size, shape.dtype)
    src, dst = [0, store.num_blocks - 2], [store.num_blocks - 1, 1]
    width = store.blocks.shape[1]
    numbers = torch.randint(0, 255, (2, 1021), dtype=torch.uint8).repeat(1, -(-width // 1021))[:, :width]
    store.blocks[src] = numbers
    ops.copy_blocks(store, src, dst)
    yield store.blocks[dst], numbers
    store.blocks[src + dst] = 0xFF
    assert _untouched(pages.memory), "another block was written"


def copy_tokens(ops: Ops, shape: Shape) -> Pairs:
    """Copies tokens of the first block, in reverse order, to every third slot of the last block."""
    layers = [OTHER] * shape.layers_before + [_spec(shape)]
    pages = Pages(2 + shape.unused_blocks, compute_block_bytes(layers, shape.block_size, shape.dtype))
    pages.memory.fill_(0xFF)
    store = KVStore(pages, layers, shape.block_size, shape.dtype)
    layer, last = shape.layers_before, store.num_blocks - 1
    dst = torch.arange(last * shape.block_size, (last + 1) * shape.block_size, 3)
    src = torch.arange(len(dst)).flip(0)
    draw = Draw(shape)
    for plane in (store.k(layer), store.v(layer)):
        plane[0] = draw.dense(*plane.shape[1:])
    ops.copy_tokens(store, layer, src, dst)
    as_bits = {2: torch.int16, 4: torch.int32}[shape.dtype.itemsize]
    for plane in (store.k(layer), store.v(layer)):
        yield plane[last, :, ::3], plane[0, :, : len(dst)].flip(1)
        plane.view(as_bits)[0] = -1
        plane.view(as_bits)[last, :, ::3] = -1
    assert _untouched(pages.memory), "something else was written"


# -------------------------------------------------------------------- repeated heads
def _repeated(x: Tensor, groups: int) -> Tensor:
    return torch.stack([x[:, head // groups] for head in range(groups * x.shape[1])])


def repeat_kv_heads(ops: Ops, shape: Shape) -> Pairs:
    x = Draw(shape)(shape.length, KV_HEADS, shape.head_dim)
    yield ops.repeat_kv_heads(x, shape.group), _repeated(x, shape.group)


def repeat_kv_heads_step(ops: Ops, shape: Shape) -> Pairs:
    """Writes into the middle of a mirror, which has the layout of the shape, too."""
    draw = Draw(shape)
    x = draw(shape.length, 1, shape.head_dim)
    mirror = draw(shape.group, shape.length + 5, shape.head_dim)
    want = mirror.clone()
    want[:, 3 : 3 + shape.length] = _repeated(x, shape.group)
    ops.repeat_kv_heads_step(mirror, x, 3)
    yield mirror, want


# -------------------------------------------------------------------- selection of blocks
def select_blocks(ops: Ops, shape: Shape) -> Pairs:
    """Selects every third of some blocks, of which each bound is another whole number."""
    count = 20 + shape.length % 50
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    q = torch.zeros(1, KV_HEADS * shape.group, shape.head_dim, dtype=shape.dtype)
    q[:, shape.group - 1 :: shape.group, -1] = torch.tensor([1, -1])  # of each group one query that is not 0
    summaries = torch.zeros(count, 2 * shape.head_dim, dtype=shape.dtype)
    summaries[order, shape.head_dim - 1] = torch.arange(count).to(shape.dtype)  # the largest numbers
    summaries[order, -1] = torch.arange(count).to(shape.dtype) - count  # the smallest
    out = torch.zeros(1, KV_HEADS, count // 3, dtype=torch.int32)
    candidates = torch.arange(count, dtype=torch.int32).expand(1, KV_HEADS, count)
    counts = torch.tensor([[count, count // 3]], dtype=torch.int32)
    ops.select_blocks(out, laid(q, shape.lies), laid(summaries, shape.lies), candidates, counts)
    yield out[0, 0], order[-(count // 3) :].sort().values.int()  # the query 1 is multiplied by the largest
    yield out[0, 1], order[: count // 3].sort().values.int()  # the query -1 by the smallest


# By the full name of a row of the table.
FORMULAS: Mapping[str, Callable[[Ops, Shape], Pairs]] = {
    each.__name__.replace("linear_", "linear."): each
    for each in (
        *(forward_layers, linear, linear_quantized, linear_blocks, qkv_proj_rope, o_proj_add_norm, mlp),
        *(rms_norm, add_rms_norm, rope, silu_mul, sample),
        *(write_kv, attend, gather, copy_blocks, copy_tokens, repeat_kv_heads, repeat_kv_heads_step),
        select_blocks,
    )
}
# What is varied of a shape: this, unless VARIED says otherwise.
ACTIVATIONS = ("dtype", "head_dim", "group", "length", "lies")
VARIED: Mapping[str, Sequence[str]] = {
    "write_kv": ("dtype", "head_dim", "length", "lies", "block_size", "layers_before"),
    "forward_layers": ("dtype", "head_dim", "group", "length", "block_size", "window"),
    "attend": (*ACTIVATIONS, "block_size", "window", "layers_before"),
    "gather": ("dtype", "head_dim", "length", "block_size", "layers_before"),
    "copy_blocks": ("dtype", "head_dim", "block_size", "layers_before"),
    "copy_tokens": ("dtype", "head_dim", "block_size", "layers_before"),
}
