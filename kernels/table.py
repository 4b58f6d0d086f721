"""The operations as rows of one table: what is tried of each, and how near to the reference a backend must come.

The self-check at start, the matrix of tests and the documentation go through OPS, so that an operation or a backend
joins all of them by being registered. What an operation means, its shapes and its errors stand in ops.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops import LayerSpec, Ops
from kernels.reference import ReferenceOps
from kernels.scene import Layout, RowOf, Scene

Results = Iterator[tuple[str, Tensor]]  # what was tried, and what came of it

# By dtype, of the largest number of a result; halves are rounded once or twice on the way.
ROUNDING = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SUMS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EXACT = dict.fromkeys(ROUNDING, 0.0)
DTYPES = tuple(ROUNDING)  # of activations, keys and values


class Op(NamedTuple):
    """One operation."""

    name: str  # a method of Ops
    tolerance: Mapping[torch.dtype, float]
    tried: Callable[[Ops, torch.dtype, torch.device], Results]


def _numbers(device: torch.device) -> Callable[..., Tensor]:
    """Random numbers, the same at every call of this."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)


def _linear(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    for rows in (1, 5, 33):
        x, weight, bias = (draw(*shape).to(dtype) for shape in ((rows, 48), (40, 48), (40,)))
        yield f"{rows} rows", ops.linear(x, weight)
        yield f"{rows} rows and a bias", ops.linear(x, weight, bias)


def _rms_norm(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    x, weight = (draw(5, 84) * 30).to(dtype), draw(84)
    yield "as in Llama", ops.rms_norm(x, weight.to(dtype), 1e-6)
    yield "as in Gemma", ops.rms_norm(x, weight, 1e-6)
    yield "of a slice", ops.rms_norm(x[:, 3:80], weight[:77].to(dtype), 1e-6)


def _add_rms_norm(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    x, delta, weight = draw(5, 84).to(dtype), draw(5, 84).to(dtype), draw(84)
    for what, each in (("as in Llama", weight.to(dtype)), ("as in Gemma", weight)):
        total, normed = ops.add_rms_norm(x, delta, each, 1e-6)
        yield f"{what}: sum", total
        yield f"{what}: norm", normed


def _rope(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    angles = 10 * draw(50, 12)
    positions = torch.tensor([0, 49, 7, 7], device=device)
    yield "heads of a slice", ops.rope(draw(4, 6, 24).to(dtype)[:, 1:4], angles.cos(), angles.sin(), positions)


def _silu_mul(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    yield "5 rows", ops.silu_mul(_numbers(device)(5, 2 * 37).to(dtype))


LAYERS = (
    (LayerSpec(2, 8, 16, 16, scale=0.25), Layout(300)),
    (LayerSpec(2, 14, 8, 24, scale=0.35), Layout(54, sinks=4, ring=50)),
    (LayerSpec(2, 2, 80, 80, scale=0.11, window=40, softcap=5.0), Layout(16)),
)
ROWS = (RowOf(0, 1), RowOf(200, 1), RowOf(-1, 1), RowOf(0, 9), RowOf(175, 6), RowOf(-1, 4))


def _scenes(writer: Ops, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Scene]]:
    for spec, layout in LAYERS:
        yield layout.kind, Scene(writer, layout, spec, ROWS, dtype, device)
    spec, layout = LAYERS[0]
    yield "int8", Scene(writer, layout, spec, ROWS, dtype, device, kv_dtype=torch.int8)


def _quantise(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    x = _numbers(device)(5, 3, 24).to(dtype)
    x[2] = 0
    numbers, scale = ops.quantise(x)
    yield "numbers", numbers.float()
    yield "scale", scale


def _dequantise(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    draw = _numbers(device)
    yield "5 heads", ops.dequantise((100 * draw(5, 24)).clamp(-127, 127).to(torch.int8), draw(5).abs())


def _write_kv(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    for name, scene in _scenes(ops, dtype, device):
        ops.write_kv(scene.store, scene.layer, scene.entering(scene.k), scene.entering(scene.v), scene.at)
        yield name, scene.arena.memory.float()


def _attend(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    for name, scene in _scenes(ReferenceOps(), dtype, device):
        scene.write()
        for row, out in zip(ROWS, scene.attend(ops, window=45 if scene.layout.ring else None), strict=True):
            yield f"{name}, {row}", out


def _gather(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    for name, scene in _scenes(ReferenceOps(), dtype, device):
        scene.write()
        positions = torch.arange(175, 181, device=device)
        for plane in ops.gather(scene.store, scene.layer, scene.at, 4, positions):
            yield name, plane


def _copy_blocks(ops: Ops, dtype: torch.dtype, device: torch.device) -> Results:
    for name, scene in _scenes(ReferenceOps(), dtype, device):
        ops.copy_blocks(scene.store, [3, 4], [0, 1])
        yield name, scene.arena.memory.float()


OPS: tuple[Op, ...] = (
    Op("linear", SUMS, _linear),
    Op("rms_norm", ROUNDING, _rms_norm),
    Op("add_rms_norm", ROUNDING, _add_rms_norm),
    Op("rope", ROUNDING, _rope),
    Op("silu_mul", ROUNDING, _silu_mul),
    Op("quantise", EXACT, _quantise),
    Op("dequantise", ROUNDING, _dequantise),
    Op("write_kv", EXACT, _write_kv),
    Op("attend", ROUNDING, _attend),
    Op("gather", EXACT, _gather),
    Op("copy_blocks", EXACT, _copy_blocks),
)
