"""What is tried of each operation, small: its kinds of arguments, with odd widths, slices and ends of texts.

A backend's results are held against those of the reference, at start and in the tests. Knows neither a comparison nor
how near they must come, which the table says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from kernels.ops import AttentionWeights, DecoderLayer, GatedWeights, Ops, Stored
from kernels.quantization import quantize_weight
from kernels.reference import ReferenceOps
from kernels.sampling import Drawing
from kernels.selfcheck.attention_case import AttentionCase, Layout, RowOf, Step
from kernels.types import LayerSpec

Results = Iterator[tuple[str, Tensor]]  # what was tried, and what came of it

DRAWINGS = (
    Drawing(),
    Drawing(1.0, noise=0.35),
    Drawing(0.6, top_k=5, noise=0.9),
    Drawing(1.5, top_p=0.8, noise=0.55),
    Drawing(0.8, 20, 0.9, 0.05, noise=0.7),
    Drawing(2.0, min_p=0.3, noise=0.1),
    Drawing(1e-30, noise=0.5),
)
SCENES = (
    (LayerSpec(2, 8, 16, 16, scale=0.25), Layout(300)),
    (LayerSpec(2, 14, 8, 24, scale=0.35), Layout(16, sinks=4, ring=61)),
    (LayerSpec(2, 2, 80, 80, scale=0.11, window=40, softcap=5.0, sink_logits=torch.tensor([0.0, 3.0])), Layout(16)),
)
ROWS = (RowOf(0, 1), RowOf(200, 1), RowOf(-1, 1), RowOf(0, 9), RowOf(187, 6), RowOf(-1, 4))
LONG = (RowOf(300, 1), RowOf(-1, 1), RowOf(256, 1), RowOf(90, 1))  # a backend may cut such texts, and join its sums


def _numbers(device: torch.device) -> Callable[..., Tensor]:
    """Random numbers, the same at every call of this."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)


def linear(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    for rows in (1, 5, 33):
        x, weight, bias = (draw(*shape).to(dtype) for shape in ((rows, 48), (40, 48), (40,)))
        yield f"{rows} rows", ops.linear(x, weight)
        yield f"{rows} rows and a bias", ops.linear(x, weight, bias)
    x, weight = (draw(rows, 140).to(dtype)[:, 5:136] for rows in (3, 37))
    yield "slices of odd widths", ops.linear(x, weight)


def quantized_linear(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    for bits, group in product((8, 4), (32, 64)):
        weight = quantize_weight(draw(37, 192).to(dtype), bits, group)
        for rows in (1, 5, 33):
            x, bias = draw(rows, 192).to(dtype), draw(37).to(dtype)
            what = f"{bits} bits, groups of {group}, {rows} rows"
            yield what, ops.quantized_linear(x, weight)
            yield f"{what} and a bias", ops.quantized_linear(x, weight, bias)
    weight = quantize_weight(draw(37, 320).to(dtype), 4, 32)
    yield "wide slices", ops.quantized_linear(draw(3, 330).to(dtype)[:, 5:325], weight)


def _attention_weights(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, AttentionWeights]]:
    """Of 4 query heads and 2 of keys, 16 wide, in a model of width 48."""
    draw = _numbers(device)
    norm, next_norm, qkv, bias, o = (draw(*shape).to(dtype) for shape in ((48,), (48,), (128, 48), (128,), (48, 64)))
    angle = draw(9, 8)
    plain = AttentionWeights(norm, qkv, bias, None, (angle.cos(), angle.sin()), 4, 2, o, None, None, next_norm, 1e-6)
    yield "plain", plain
    norms = draw(16).to(dtype), draw(16).to(dtype)
    yield "norms of heads", replace(plain, qk_norm=norms, qkv_bias=None, o_bias=draw(48).to(dtype), post_norm=norm)
    yield "half turned", replace(plain, tables=(angle.cos()[:, :4], angle.sin()[:, :4]))
    yield "not turned", replace(plain, tables=None)


def enter_attention(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw, positions = _numbers(device), torch.tensor([3, 0, 8, 8, 1], device=device)
    x, added = draw(5, 48).to(dtype), draw(5, 48).to(dtype)
    for what, weights in _attention_weights(dtype, device):
        for also in (None, added):
            for i, found in enumerate(ops.enter_attention(weights.packed(ops), x, also, positions)):
                yield f"{what}, {('sum', 'q', 'k', 'v')[i]}{'' if also is None else ', added'}", found


def leave_attention(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    x, mixed = draw(5, 48).to(dtype), draw(5, 64).to(dtype)
    for what, weights in _attention_weights(dtype, device):
        total, normed = ops.leave_attention(weights.packed(ops), x, mixed)
        yield what, total
        yield f"{what}, normed", normed


def feed_forward(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    h, gate_up, down, biases = draw(5, 48).to(dtype), draw(160, 48), draw(48, 80), draw(160).to(dtype)
    weights = GatedWeights(gate_up.to(dtype), biases, down.to(dtype), biases[:48], "silu")
    yield "silu", ops.feed_forward(weights.packed(ops), h)
    yield "gelu", ops.feed_forward(replace(weights, activation="gelu_tanh", down_bias=None).packed(ops), h)


def run_layers(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    """Two steps of two sequences under each of two strategies, of layers that differ."""
    draw, specs = _numbers(device), [LayerSpec(2, 4, 16, 16, scale=0.25), LayerSpec(2, 4, 16, 16, window=5, scale=0.3)]
    around = [weights for what, weights in _attention_weights(dtype, device) if what != "half turned"]
    layers = []
    for i, inner in enumerate((64, 80)):
        fed = GatedWeights(draw(2 * inner, 48).to(dtype), None, draw(48, inner).to(dtype) / 8, None, "silu").packed(ops)
        layers.append(DecoderLayer(specs[i], around[i].packed(ops), fed, draw(48).to(dtype) if i else None))
    stack = ops.stacked(layers, dtype)
    rows = RowOf(0, 9), RowOf(0, 9)
    scenes = [
        AttentionCase(ops, layout, specs[1], rows, dtype, device, before=specs[:1])
        for layout in (Layout(4), Layout(4, 1, 4))
    ]
    for step in ([(0, 0, 4), (1, 0, 3)], [(0, 4, 1), (1, 3, 2)], [(1, 5, 1), (0, -1, 1)]):
        n = sum(tokens for _, _, tokens in step)
        stored = [
            (slice(i * n, i * n + n), Stored(scene.store, scene.slots(step), 4 if scene.layout.ring else None))
            for i, scene in enumerate(scenes)
        ]
        x = draw(2 * n, 48).to(dtype)
        after = ops.run_layers(stack, x, Step(ops, specs, stored))
        yield f"{step}", after[[i for i in range(2 * n) if n > 2 or i % n == 0]]


def rms_norm(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    x, weight = (draw(5, 84) * 30).to(dtype), draw(84)
    yield "as in Llama", ops.rms_norm(x, weight.to(dtype), 1e-6)
    yield "as in Gemma", ops.rms_norm(x, weight, 1e-6)
    yield "of a slice", ops.rms_norm(x[:, 3:80], weight[:77].to(dtype), 1e-6)
    yield "with a large epsilon", ops.rms_norm(x, weight, 500.0)


def add_rms_norm(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    x, delta, weight = draw(5, 84).to(dtype), draw(5, 90).to(dtype)[:, :84], draw(84)
    for what, each, n in (("as in Llama", weight.to(dtype), 84), ("as in Gemma", weight, 84), ("slices", weight, 77)):
        total, normed = ops.add_rms_norm(x[:, -n:], delta[:, :n], each[:n], 1e-6)
        yield f"{what}: sum", total
        yield f"{what}: norm", normed
    yield "with a large epsilon", ops.add_rms_norm(x, delta, weight, 0.5)[1]


def rope(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    angles = 10 * draw(50, 12)
    positions = torch.tensor([0, 49, 7, 7], device=device)
    yield "heads of a slice", ops.rope(draw(4, 6, 24).to(dtype)[:, 1:4], angles.cos(), angles.sin(), positions)


def silu_mul(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    yield "5 rows", ops.silu_mul(draw(5, 2 * 37).to(dtype))
    yield "of a slice", ops.silu_mul(draw(5, 80).to(dtype)[:, 3:77])


def sample(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    logits = (3 * _numbers(device)(len(DRAWINGS), 75)).to(dtype)
    how = torch.tensor(DRAWINGS, dtype=torch.float64)
    yield "numbers", ops.sample(logits, how)
    logits[:, 70] = logits[:, 11]
    logits[::3, 5], logits[1::3, 74] = torch.nan, torch.inf
    yield "equal ones, and what is no number", ops.sample(logits[:, 3:], how)


def _scenes(writer: Ops, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, AttentionCase]]:
    for spec, layout in SCENES:
        yield layout.kind, AttentionCase(writer, layout, _on(device, spec), ROWS, dtype, device)
    spec, layout = SCENES[0]
    yield "int8", AttentionCase(writer, layout, spec, ROWS, dtype, device, kv_dtype=torch.int8)


def _on(device: torch.device, spec: LayerSpec) -> LayerSpec:
    return spec if spec.sink_logits is None else spec._replace(sink_logits=spec.sink_logits.to(device))


def quantize(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    x = _numbers(device)(5, 3, 90).to(dtype)
    x[2] = 0
    x[0, 0, 23] = x[0, 0, 82] = 9  # the last number is the largest
    for what, each in (("narrow", x[..., :24].contiguous()), ("wide slice", x[..., 3:83])):
        numbers, scale = ops.quantize(each)
        yield f"{what}: numbers", numbers.float()
        yield f"{what}: scale", scale


def dequantize(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    numbers, scale = (100 * draw(5, 24)).clamp(-127, 127).to(torch.int8), draw(5).abs()
    yield "5 heads", ops.dequantize(numbers, scale)
    yield "of a slice", ops.dequantize(numbers[:, 2:20], scale)


def write_kv(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    for name, scene in _scenes(ops, dtype, device):
        ops.write_kv(scene.store, scene.layer, scene.entering(scene.k), scene.entering(scene.v), scene.at)
        yield name, scene.pages.memory.float()


def attend(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    for name, scene in _scenes(ReferenceOps(), dtype, device):
        scene.write()
        for row, out in zip(ROWS, scene.attend(ops, window=45 if scene.layout.ring else None), strict=True):
            yield f"{name}, {row.tokens} after {row.past}", out
    spec = SCENES[0][0]._replace(sink_logits=_numbers(device)(SCENES[0][0].num_q_heads))
    scene = AttentionCase(ReferenceOps(), Layout(16), spec, LONG, dtype, device)
    scene.write()
    for row, out in zip(LONG, scene.attend(ops), strict=True):
        yield f"long texts, {row.tokens} after {row.past}", out


def gather(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    for name, scene in _scenes(ReferenceOps(), dtype, device):
        scene.write()
        positions = torch.arange(187, 193, device=device)
        for plane in ops.gather(scene.store, scene.layer, scene.at, 4, positions):
            yield name, plane


def copy_blocks(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    for name, scene in _scenes(ReferenceOps(), dtype, device):
        ops.copy_blocks(scene.store, [3, 4], [0, 1])
        yield name, scene.pages.memory.float()


def repeat_kv_heads(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    for groups in (1, 7):
        yield f"groups of {groups}", ops.repeat_kv_heads(draw(9, 2, 24).to(dtype), groups)
    yield "of a slice", ops.repeat_kv_heads(draw(9, 6, 24).to(dtype)[2:, 1:4], 4)


def repeat_kv_heads_step(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    for start, n in ((0, 1), (4, 5)):
        whole = draw(14, 11, 30).to(dtype)
        ops.repeat_kv_heads_step(whole[1:13, :9, 3:27], draw(n, 6, 24).to(dtype)[:, 1:4], start)
        yield f"{n} columns of a slice", whole
