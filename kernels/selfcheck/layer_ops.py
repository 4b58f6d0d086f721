"""The rows (`OpInfo`) of the operations' table for layers and the model around them: products, norms, RoPE, sampling.

Their samples, with which the self-check calls them, are small, with odd widths and slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from kernels.ops import Attention, AttentionWeights, DecoderLayer, DecoderLayers, GatedMLP, KVLocation, Ops, Weight
from kernels.sampling import SamplingRow
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout, Step
from kernels.selfcheck.cache_ops import chained_samples
from kernels.selfcheck.op_info import EXACT, INT8_INPUTS, ROUNDING, SUMS, OpInfo, Samples, random_tensors
from kernels.types import LayerSpec
from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.quantization import QuantizedTensor

SAMPLING_ROWS = (
    SamplingRow(),
    SamplingRow(1.0, noise=0.35),
    SamplingRow(0.6, top_k=5, noise=0.9),
    SamplingRow(1.5, top_p=0.8, noise=0.55),
    SamplingRow(0.8, 20, 0.9, 0.05, noise=0.7),
    SamplingRow(2.0, min_p=0.3, noise=0.1),
    SamplingRow(1e-30, noise=0.5),
)


# -------------------------------------------------------------------- products
def _linear_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    for rows in (1, 5, 33):
        x, weight, bias = (draw(*shape).to(dtype) for shape in ((rows, 48), (40, 48), (40,)))
        yield f"{rows} rows", ops.linear(x, weight)
        yield f"{rows} rows and a bias", ops.linear(x, weight, bias)
    x, weight = (draw(rows, 140).to(dtype)[:, 5:136] for rows in (3, 37))
    yield "slices of odd widths", ops.linear(x, weight)
    if device.type != "cpu":  # some Macs' products are wrong (pytorch#193487); elsewhere it would only delay the start
        x, weight = (draw(rows, 40_000).to(dtype) for rows in (17, 16))
        yield "long sums", ops.linear(x, weight)


def _quantized_linear_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    for bits, group in product((8, 4), (32, 64)):
        weight = _draw_quantized(draw, 37, 192, bits, group, dtype)
        for rows in (1, 5, 33):
            x, bias = draw(rows, 192).to(dtype), draw(37).to(dtype)
            what = f"{bits} bits, groups of {group}, {rows} rows"
            yield what, ops.linear(x, weight)
            yield f"{what} and a bias", ops.linear(x, weight, bias)
    weight = _draw_quantized(draw, 37, 320, 4, 32, dtype)
    yield "wide slices", ops.linear(draw(3, 330).to(dtype)[:, 5:325], weight)


def _draw_quantized(
    draw: Callable[..., Tensor], out: int, width: int, bits: int, group: int, dtype: torch.dtype
) -> QuantizedTensor:
    numbers = (draw(out, width * bits // 8) * 1000).to(torch.int64).to(torch.uint8)
    scale, offset = (draw(2, out, width // group) / 2**bits).to(dtype)
    return QuantizedTensor(numbers, scale, offset * 2 ** (bits - 1), bits, group)


def _block_linear_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    for format in FORMATS.values():
        count = 512 // format.columns
        blocks = (draw(37, count, format.nbytes) * 1000).to(torch.int64).to(torch.uint8)
        for place in format.halves:
            blocks[..., place : place + 2] = (draw(37, count, 1) / 256).to(torch.float16).view(torch.uint8)
        if not format.halves:  # MXFP4: exponents not far below that of 1
            blocks[..., 0] = 112 + blocks[..., 0] % 8
        weight = ops.pack(BlockTensor(blocks.flatten(1), format))
        for rows in (1, 5, 33):
            yield f"{format.name}, {rows} rows", ops.linear(draw(rows, 512).to(dtype), weight)


def _linear_bytes(x: Tensor, weight: Weight, bias: Tensor | None = None) -> int:
    return weight.nbytes + x.nbytes + len(x) * weight.shape[0] * x.itemsize


# -------------------------------------------------------------------- parts of a layer
def _attention_weights(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, AttentionWeights]]:
    """Yield (description, weights) for 4 query heads and 2 KV heads of dimension 16, in a model of width 48."""
    draw = random_tensors(device)
    norm, next_norm, qkv, bias, o = (draw(*shape).to(dtype) for shape in ((48,), (48,), (128, 48), (128,), (48, 64)))
    angle = draw(9, 8)
    plain = AttentionWeights(norm, qkv, bias, None, (angle.cos(), angle.sin()), 4, 2, o, None, None, next_norm, 1e-6)
    yield "plain", plain
    norms = draw(16).to(dtype), draw(16).to(dtype)
    yield "norms of heads", replace(plain, qk_norm=norms, qkv_bias=None, o_bias=draw(48).to(dtype), post_norm=norm)
    yield "half rotated", replace(plain, tables=(angle.cos()[:, :4], angle.sin()[:, :4]))
    yield "not rotated", replace(plain, tables=None)


def _qkv_proj_rope_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw, positions = random_tensors(device), torch.tensor([3, 0, 8, 8, 1], device=device)
    x, added = draw(5, 48).to(dtype), draw(5, 48).to(dtype)
    for what, weights in _attention_weights(dtype, device):
        for also in (None, added):
            for i, output in enumerate(ops.qkv_proj_rope(weights.pack(ops), x, also, positions)):
                yield f"{what}, {('sum', 'q', 'k', 'v')[i]}{'' if also is None else ', added'}", output


def _qkv_proj_rope_bytes(layer: AttentionWeights, x: Tensor, added: Tensor | None, positions: Tensor) -> int:
    entering = x.nbytes if added is None else x.nbytes + added.nbytes
    return layer.qkv.nbytes + entering + x.nbytes + len(x) * layer.qkv.shape[0] * x.itemsize


def _o_proj_add_norm_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    x, mixed = draw(5, 48).to(dtype), draw(5, 64).to(dtype)
    for what, weights in _attention_weights(dtype, device):
        total, normed = ops.o_proj_add_norm(weights.pack(ops), x, mixed)
        yield what, total
        yield f"{what}, normed", normed


def _o_proj_add_norm_bytes(layer: AttentionWeights, x: Tensor, mixed: Tensor) -> int:
    return layer.o.nbytes + mixed.nbytes + 3 * x.nbytes


def _mlp_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    h, gate_up, down, biases = draw(5, 48).to(dtype), draw(160, 48), draw(48, 80), draw(160).to(dtype)
    weights = GatedMLP(gate_up.to(dtype), biases, down.to(dtype), biases[:48], "silu")
    yield "silu", ops.mlp(weights.pack(ops), h)
    yield "gelu", ops.mlp(replace(weights, activation="gelu_tanh", down_bias=None).pack(ops), h)


def _mlp_bytes(weights: GatedMLP, h: Tensor) -> int:
    return weights.gate_up.nbytes + weights.down.nbytes + 2 * h.nbytes


def _forward_layers_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    """Yield (description, output) of three steps of four sequences, two with all keys and two with a ring of slots.

    The two layers differ in their window, scale, norms and feed-forward width. Yield those of a chain of launches, too.
    """
    draw = random_tensors(device)
    specs = [LayerSpec(2, 4, 16, 16, scale=0.25), LayerSpec(2, 4, 16, 16, window=5, scale=0.3)]
    attentions = [weights for what, weights in _attention_weights(dtype, device) if what != "half rotated"]
    layers = []
    for i, mlp_width in enumerate((64, 80)):
        mlp = GatedMLP(draw(2 * mlp_width, 48).to(dtype), None, draw(48, mlp_width).to(dtype) / 8, None, "silu").pack(
            ops
        )
        layers.append(DecoderLayer(specs[i], attentions[i].pack(ops), mlp, draw(48).to(dtype) if i else None))
    decoder = ops.pack_layers(layers, dtype)
    rows = CaseRow(0, 9), CaseRow(0, 9)
    cases = [
        AttentionCase(ops, layout, specs[1], rows, dtype, device, before=specs[:1])
        for layout in (Layout(4), Layout(4, 1, 4))
    ]
    for step in ([(0, 0, 4), (1, 0, 3)], [(0, 4, 1), (1, 3, 2)], [(1, 5, 1), (0, -1, 1)]):
        n = sum(tokens for _, _, tokens in step)
        stored = [
            (slice(i * n, i * n + n), KVLocation(case.store, case.make_slots(step), 4 if case.layout.ring else None))
            for i, case in enumerate(cases)
        ]
        x = draw(2 * n, 48).to(dtype)
        out = ops.forward_layers(decoder, x, Step(ops, specs, stored))
        yield f"{step}", out[[i for i in range(2 * n) if n > 2 or i % n == 0]]
    yield from chained_samples(ops, dtype, device)  # here, as faulty operations were replaced


def _forward_layers_bytes(layers: DecoderLayers, x: Tensor, attention: Attention) -> int:
    """Return the bytes that a call of forward_layers moves, without those of keys and values."""
    weights = sum(weight.nbytes for layer in layers.layers for weight in layer.tensors())
    return weights + 2 * x.nbytes


# -------------------------------------------------------------------- single operations
def _rms_norm_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    x, weight = (draw(5, 84) * 30).to(dtype), draw(84)
    yield "as in Llama", ops.rms_norm(x, weight.to(dtype), 1e-6)
    yield "as in Gemma", ops.rms_norm(x, weight, 1e-6)
    yield "of a slice", ops.rms_norm(x[:, 3:80], weight[:77].to(dtype), 1e-6)
    yield "with a large epsilon", ops.rms_norm(x, weight, 500.0)


def _add_rms_norm_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    x, delta, weight = draw(5, 84).to(dtype), draw(5, 90).to(dtype)[:, :84], draw(84)
    for what, each, n in (("as in Llama", weight.to(dtype), 84), ("as in Gemma", weight, 84), ("slices", weight, 77)):
        total, normed = ops.add_rms_norm(x[:, -n:], delta[:, :n], each[:n], 1e-6)
        yield f"{what}: sum", total
        yield f"{what}: norm", normed
    yield "with a large epsilon", ops.add_rms_norm(x, delta, weight, 0.5)[1]


def _rope_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    angles = 10 * draw(50, 12)
    positions = torch.tensor([0, 49, 7, 7], device=device)
    yield "heads of a slice", ops.rope(draw(4, 6, 24).to(dtype)[:, 1:4], angles.cos(), angles.sin(), positions)


def _silu_mul_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    yield "5 rows", ops.silu_mul(draw(5, 2 * 37).to(dtype))
    yield "of a slice", ops.silu_mul(draw(5, 80).to(dtype)[:, 3:77])


def _sample_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    logits = (3 * random_tensors(device)(len(SAMPLING_ROWS), 75)).to(dtype)
    params = torch.tensor(SAMPLING_ROWS, dtype=torch.float64)
    yield "numbers", ops.sample(logits, params)
    logits[:, 70] = logits[:, 11]
    logits[::3, 5], logits[1::3, 74] = torch.nan, torch.inf
    yield "equal logits, NaN and infinity", ops.sample(logits[:, 3:], params)


def _in_and_out(x: Tensor, *rest: object) -> int:
    return 2 * x.nbytes


def _both_in_and_out(x: Tensor, *rest: object) -> int:
    return 4 * x.nbytes


def _silu_mul_bytes(gate_up: Tensor) -> int:
    return gate_up.nbytes * 3 // 2


def _sample_bytes(logits: Tensor, params: Tensor) -> int:
    return logits.nbytes


ACTIVATIONS = "the activations, in and out"
WEIGHT = "the weight; the activations, in and out"
WEIGHTS = "the weights; the activations, in and out"

LAYER_OPS = (
    OpInfo("linear", SUMS, _linear_samples, WEIGHT, _linear_bytes, ("x",)),
    OpInfo("linear", INT8_INPUTS, _quantized_linear_samples, WEIGHT, _linear_bytes, ("x",), variant="quantized"),
    OpInfo("linear", INT8_INPUTS, _block_linear_samples, WEIGHT, _linear_bytes, ("x",), variant="blocks"),
    OpInfo("qkv_proj_rope", SUMS, _qkv_proj_rope_samples, WEIGHTS, _qkv_proj_rope_bytes, ("x", "added")),
    OpInfo("o_proj_add_norm", SUMS, _o_proj_add_norm_samples, WEIGHTS, _o_proj_add_norm_bytes, ("x", "mixed")),
    OpInfo("mlp", SUMS, _mlp_samples, WEIGHTS, _mlp_bytes, ("h",)),
    OpInfo("rms_norm", ROUNDING, _rms_norm_samples, ACTIVATIONS, _in_and_out, ("x",)),
    OpInfo("add_rms_norm", ROUNDING, _add_rms_norm_samples, "both, in and out", _both_in_and_out, ("x", "delta")),
    OpInfo("rope", ROUNDING, _rope_samples, ACTIVATIONS, _in_and_out, ("x",)),
    OpInfo("silu_mul", ROUNDING, _silu_mul_samples, ACTIVATIONS, _silu_mul_bytes, ("gate_up",)),
    OpInfo("sample", EXACT, _sample_samples, "the logits, once", _sample_bytes, ("logits",)),
)
FORWARD_LAYERS = OpInfo(
    "forward_layers",
    SUMS,
    _forward_layers_samples,
    "the weights; keys and values; x, in and out",
    _forward_layers_bytes,
    ("x",),
)
