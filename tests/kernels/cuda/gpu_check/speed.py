"""Measures decode attention and the steps of models beside a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.cuda.backend import CudaOps
from kernels.cuda.graphs import CudaGraphs, GraphOps
from kernels.metal import attention
from kernels.metal.library import Kernels
from kernels.ops import AttentionWeights, DecoderLayer, DecoderLayers, GatedMLP, KVLocation, Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import Step
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots
from tests.kernels.cuda.gpu_check.machine import Machine, Result

BLOCK_SIZE = 32


def make_location(
    machine: Machine, specs: Sequence[LayerSpec], rows: int, length: int, dtype: torch.dtype
) -> KVLocation:
    """Return where the keys of `rows` sequences of `length` tokens are, in blocks in random order."""
    page, width = compute_block_bytes(specs, BLOCK_SIZE, dtype), -(-length // BLOCK_SIZE)
    pages = Pages(rows * width, page, machine.device)
    pages.memory.random_(0, 60)  # as bfloat16, small numbers
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).int()

    def int32(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=machine.device)

    at = Slots(
        table=order.view(rows, width).to(machine.device),
        block_size=BLOCK_SIZE,
        table_row=int32(range(rows)),
        q_start=int32(range(rows + 1)),
        start=int32([length - 1] * rows),
        num_decode=rows,
        max_q=1,
        max_kv=length,
        num_tokens=rows,
    )
    return KVLocation(KVStore(pages, specs, BLOCK_SIZE, dtype), at, None)


def measure_copy(machine: Machine) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(1 << (20 if machine.small else 32), dtype=torch.uint8, device=machine.device)
    to = torch.empty_like(source)
    return 2 * len(source) / machine.measure(lambda: to.copy_(source))


def measure_attention(machine: Machine) -> Iterator[Result]:
    """Yield the bandwidth of decode attention as a share of a copy's; the aim is 0.6.

    For each number of query heads that a threadgroup may compute: more take more registers, fewer read keys again.
    """
    copy = measure_copy(machine)
    yield {"copy": copy}
    shapes = {
        "8B, groups of 4": LayerSpec(8, 32, 128, 128),
        "7B, groups of 7": LayerSpec(4, 28, 128, 128),
        "0.5B, groups of 7": LayerSpec(2, 14, 64, 64),
    }
    for name, spec in shapes.items():
        numbers_per_lane = spec.head_dim // attention.LANES
        for length, rows in ((300, 1),) if machine.small else ((4096, 32), (32768, 8), (32768, 1)):
            for kv_dtype in (torch.bfloat16, torch.int8):
                store, at, _ = make_location(machine, [spec], rows, length, kv_dtype)
                q = torch.randn(rows, spec.num_q_heads, spec.head_dim, device=machine.device).to(torch.bfloat16)
                out, used = torch.empty_like(q), rows * length * compute_block_bytes([spec], 1, kv_dtype)
                for heads in (2, 4, 8):
                    with patch.dict(attention.MAX_HEADS_PER_GROUP, {numbers_per_lane: heads}):
                        ops = machine.make_ops()
                        seconds = machine.measure(partial(ops.attend, out, q, store, 0, at, spec))
                    shown = {"shape": name, "tokens": length, "rows": rows, "kv": str(kv_dtype), "heads": heads}
                    yield {**shown, "us": 1e6 * seconds, "share_of_copy": used / seconds / copy}


class ModelShape(NamedTuple):
    """The sizes of a model's layers."""

    layers: int
    width: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int


MODELS = {
    "0.5B": ModelShape(24, 896, 14, 2, 64, 4864),
    "7B": ModelShape(28, 3584, 28, 4, 128, 18944),
}
TINY = {"tiny": ModelShape(2, 64, 4, 2, 32, 96)}


def make_layers(machine: Machine, shape: ModelShape) -> Sequence[DecoderLayer]:
    """Return the layers of a model with random weights in bfloat16."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device=machine.device) / 16

    ops, spec = ReferenceOps(), LayerSpec(shape.kv_heads, shape.q_heads, shape.head_dim, shape.head_dim)
    angles = torch.randn(4096, shape.head_dim // 2, device=machine.device)
    q_width, qkv_heads = shape.q_heads * shape.head_dim, shape.q_heads + 2 * shape.kv_heads
    layers = []
    for _ in range(shape.layers):
        weights = AttentionWeights(
            norm=draw(shape.width),
            qkv=draw(qkv_heads * shape.head_dim, shape.width),
            qkv_bias=draw(qkv_heads * shape.head_dim),
            qk_norm=None,
            tables=(angles.cos(), angles.sin()),
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            o=draw(shape.width, q_width),
            o_bias=None,
            post_norm=None,
            next_norm=draw(shape.width),
            eps=1e-6,
        )
        mlp = GatedMLP(draw(2 * shape.mlp_width, shape.width), None, draw(shape.width, shape.mlp_width), None, "silu")
        layers.append(DecoderLayer(spec, weights.pack(ops), mlp.pack(ops), None))
    return layers


def measure_steps(machine: Machine) -> Iterator[Result]:
    """Yield the time of a decode step of all layers, launched one by one and as a CUDA graph.

    Also yield the bandwidth of its weights as a share of a copy's; the aim for 7B at batch 1 is 0.75.
    """
    copy = measure_copy(machine)
    for name, shape in (TINY if machine.small else MODELS).items():
        layers = make_layers(machine, shape)
        weight_bytes = sum(weight.nbytes for layer in layers for weight in layer.tensors())
        specs, decoder = [layer.spec for layer in layers], DecoderLayers(layers)
        kernels, capture = Kernels(machine.compile_shader), repeat if machine.small else CudaGraphs()
        kinds: Mapping[str, Ops] = {
            "launches": CudaOps(kernels),
            "graph": GraphOps(kernels, capture),
            "plain torch": ReferenceOps(),
        }
        for rows in (1, 8):
            x = torch.randn(rows, shape.width, device=machine.device).to(torch.bfloat16)
            location = make_location(machine, specs, rows, 1024, torch.bfloat16)
            yield {"model": name, "rows": rows, "fault": compare_steps(kinds, decoder, x, location)}
            calls: dict[str, Callable[[], object]] = {}
            for kind, ops in kinds.items():
                calls[kind] = partial(ops.forward_layers, decoder, x, make_step(ops, specs, location))
            ops = machine.make_ops()
            step = make_step(ops, specs, location)
            _, calls["graph, Metal products"] = capture(partial(ops.forward_layers, decoder, x, step))
            for kind, call in calls.items():
                seconds = machine.measure(call)
                shown = {"model": name, "rows": rows, "kind": kind, "ms": 1e3 * seconds}
                yield {**shown, "share_of_copy": weight_bytes / seconds / copy}


def make_step(ops: Ops, specs: Sequence[LayerSpec], location: KVLocation) -> Step:
    """Return the attention of a step whose rows are all at a location."""
    return Step(ops, specs, [(slice(0, location.at.num_rows), location)])


def compare_steps(kinds: Mapping[str, Ops], decoder: DecoderLayers, x: Tensor, location: KVLocation) -> str | None:
    """Return what is wrong if steps one after the other have other bits in a graph than launched one by one."""
    specs = [layer.spec for layer in decoder.layers]
    outs = {}
    for kind in ("launches", "graph"):
        at = location.at
        at.start.fill_(at.max_kv - 5)
        steps = []
        for number in range(4):
            step = make_step(kinds[kind], specs, location)
            steps.append(kinds[kind].forward_layers(decoder, x + number, step))
            at.start.add_(1)
        outs[kind] = torch.stack(steps)
    return None if torch.equal(*outs.values()) else "a graph gives other results than its launches one by one"


def repeat(call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Stand for a CUDA graph on a CPU: make the call again."""
    out = call().clone()

    def replay() -> None:
        out.copy_(call())

    return out, replay
