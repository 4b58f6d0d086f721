"""The operations as rows of one table, from which all follows that has to know every operation.

A row says what is tried of an operation, how near to the reference a backend must come, and the bytes that a call must
move. The self-check at start, the tests, the metrics and docs/kernels.md go through OPS, so that an operation joins
them by its row. What it means, its shapes and its errors stand in ops.py.

`python -m kernels.selfcheck.op_info` prints the table of docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops import Attention, AttentionWeights, DecoderLayers, GatedWeights, Ops
from kernels.quantization import Quantized
from kernels.selfcheck import sample_inputs
from kernels.selfcheck.sample_inputs import Results
from kernels.store import KVStore, vector_bytes
from kernels.types import LayerSpec, Slots

# By dtype, of the largest number of a result; halves are rounded once or twice on the way.
ROUNDING = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SUMS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ATTENTION = ROUNDING | {torch.float32: 1e-5}
WHOLE = dict.fromkeys(ROUNDING, 2e-2)  # x becomes whole numbers of 8 bits
EXACT = dict.fromkeys(ROUNDING, 0.0)
DTYPES = tuple(ROUNDING)  # of activations, keys and values


class Op(NamedTuple):
    """An operation, and how it is checked and measured."""

    name: str  # a method of Ops
    tolerance: Mapping[torch.dtype, float]
    tried: Callable[[Ops, torch.dtype, torch.device], Results]  # small, for the self-check
    moves: str  # what must be read and written, however it is computed
    bytes: Callable[..., int]  # the same as a number, of the arguments of a call
    by_row: tuple[str, ...]  # arguments whose rows, in the first dimension, do not affect each other


# -------------------------------------------------------------------- bytes that a call must move
def _in_and_out(x: Tensor, *rest: object) -> int:
    return 2 * x.nbytes


def _both_in_and_out(x: Tensor, *rest: object) -> int:
    return 4 * x.nbytes


def _linear_bytes(x: Tensor, weight: Tensor | Quantized, bias: Tensor | None = None) -> int:
    return weight.nbytes + x.nbytes + len(x) * weight.shape[0] * x.itemsize


def _enter_attention_bytes(layer: AttentionWeights, x: Tensor, added: Tensor | None, positions: Tensor) -> int:
    entering = x.nbytes if added is None else x.nbytes + added.nbytes
    return layer.qkv.nbytes + entering + x.nbytes + len(x) * layer.qkv.shape[0] * x.itemsize


def _leave_attention_bytes(layer: AttentionWeights, x: Tensor, mixed: Tensor) -> int:
    return layer.o.nbytes + mixed.nbytes + 3 * x.nbytes


def _feed_forward_bytes(weights: GatedWeights, h: Tensor) -> int:
    return weights.gate_up.nbytes + weights.down.nbytes + 2 * h.nbytes


def _run_layers_bytes(stack: DecoderLayers, x: Tensor, attention: Attention) -> int:
    """Return the bytes of a call without keys and values, which the attention alone knows."""
    weights = sum(weight.nbytes for layer in stack.layers for weight in layer.tensors())
    return weights + 2 * x.nbytes


def _quantize_bytes(x: Tensor) -> int:
    return x.nbytes + x.shape[:-1].numel() * vector_bytes(x.shape[-1], torch.int8)


def _dequantize_bytes(x: Tensor, scale: Tensor) -> int:
    return x.nbytes + scale.nbytes + x.numel() * torch.float32.itemsize


def _token_bytes(store: KVStore, layer: int, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values in one layer."""
    shapes = (plane.numbers.shape for plane in store.planes(layer))  # [blocks, H, block_size, dim]
    return sum(heads * vector_bytes(dim, dtype) for _, heads, _, dim in shapes)


def _write_kv_bytes(store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> int:
    return k.nbytes + v.nbytes + len(k) * _token_bytes(store, layer, store.dtype)


def _attend_bytes(
    out: Tensor, q: Tensor, store: KVStore, layer: int, at: Slots, spec: LayerSpec, *, window: int | None = None
) -> int:
    """Of a row: the keys that lie within both windows of a query, and sinks that the model's own leaves in sight."""
    reaches = [at.max_kv if each is None else each for each in (spec.window, window)]
    keys = 0
    for start, queries in zip(at.start.tolist(), at.q_start.diff().tolist(), strict=True):
        if start >= 0:
            oldest = max(0, start + 1 - min(reaches))
            oldest_sink = max(0, start + 1 - reaches[0])
            keys += start + queries - oldest + max(0, min(at.sinks, oldest) - oldest_sink)
    return keys * _token_bytes(store, layer, store.dtype)


def _gather_bytes(store: KVStore, layer: int, at: Slots, row: int, positions: Tensor) -> int:
    out = torch.float32 if store.dtype is torch.int8 else store.dtype
    return len(positions) * (_token_bytes(store, layer, store.dtype) + _token_bytes(store, layer, out))


def _repeat_kv_heads_bytes(x: Tensor, groups: int) -> int:
    return (1 + groups) * x.nbytes


def _repeat_kv_heads_step_bytes(mirror: Tensor, x: Tensor, start: int) -> int:
    return (1 + len(mirror) // x.shape[1]) * x.nbytes


def _copy_blocks_bytes(store: KVStore, src: list[int], dst: list[int]) -> int:
    return 2 * len(src) * store.block_bytes


# -------------------------------------------------------------------- the table
ACTIVATIONS = "the activations, in and out"

WEIGHT = "the weight; the activations, in and out"
LAYERS = "run_layers"  # is made of other operations
WEIGHTS = "the weights; the activations, in and out"

OPS: tuple[Op, ...] = (
    Op("linear", SUMS, sample_inputs.linear, WEIGHT, _linear_bytes, ("x",)),
    Op(
        "quantized_linear",
        WHOLE,
        sample_inputs.quantized_linear,
        WEIGHT,
        _linear_bytes,
        ("x",),
    ),
    Op(
        "enter_attention",
        SUMS,
        sample_inputs.enter_attention,
        WEIGHTS,
        _enter_attention_bytes,
        ("x", "added"),
    ),
    Op(
        "leave_attention",
        SUMS,
        sample_inputs.leave_attention,
        WEIGHTS,
        _leave_attention_bytes,
        ("x", "mixed"),
    ),
    Op(
        "feed_forward",
        SUMS,
        sample_inputs.feed_forward,
        WEIGHTS,
        _feed_forward_bytes,
        ("h",),
    ),
    Op("rms_norm", ROUNDING, sample_inputs.rms_norm, ACTIVATIONS, _in_and_out, ("x",)),
    Op(
        "add_rms_norm",
        ROUNDING,
        sample_inputs.add_rms_norm,
        "both, in and out",
        _both_in_and_out,
        ("x", "delta"),
    ),
    Op("rope", ROUNDING, sample_inputs.rope, ACTIVATIONS, _in_and_out, ("x",)),
    Op(
        "silu_mul",
        ROUNDING,
        sample_inputs.silu_mul,
        ACTIVATIONS,
        lambda gate_up: gate_up.nbytes * 3 // 2,
        ("gate_up",),
    ),
    Op(
        "sample",
        EXACT,
        sample_inputs.sample,
        "the logits, once",
        lambda logits, how: logits.nbytes,
        ("logits",),
    ),
    Op(
        "quantize",
        EXACT,
        sample_inputs.quantize,
        "the vectors, in and out",
        _quantize_bytes,
        ("x",),
    ),
    Op(
        "dequantize",
        ROUNDING,
        sample_inputs.dequantize,
        "the vectors, in and out",
        _dequantize_bytes,
        ("scale",),
    ),
    Op(
        "write_kv",
        EXACT,
        sample_inputs.write_kv,
        "what enters, in and out",
        _write_kv_bytes,
        ("k", "v"),
    ),
    Op(
        "attend",
        ATTENTION,
        sample_inputs.attend,
        "all keys and values that a row sees, once",
        _attend_bytes,
        ("q",),
    ),
    Op("gather", EXACT, sample_inputs.gather, "what is asked for, in and out", _gather_bytes, ()),
    Op(
        "copy_blocks",
        EXACT,
        sample_inputs.copy_blocks,
        "the blocks, in and out",
        _copy_blocks_bytes,
        (),
    ),
    Op(
        "repeat_kv_heads",
        EXACT,
        sample_inputs.repeat_kv_heads,
        "the whole text, read once and written `groups` times",
        _repeat_kv_heads_bytes,
        ("x",),
    ),
    Op(
        "repeat_kv_heads_step",
        EXACT,
        sample_inputs.repeat_kv_heads_step,
        "the new columns alone, read once and written `groups` times",
        _repeat_kv_heads_step_bytes,
        ("x",),
    ),
    Op(
        LAYERS,
        SUMS,
        sample_inputs.run_layers,
        "the weights; keys and values; x, in and out",
        _run_layers_bytes,
        ("x",),
    ),
)


# -------------------------------------------------------------------- docs/kernels.md
def markdown() -> str:
    """Return the table of docs/kernels.md: what the docstrings of Ops and the rows say."""
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    head = f"| operation | what it does | must move | off by at most ({dtypes}) |"
    return "\n".join([head, "|---|---|---|---|", *map(_markdown_row, OPS)])


def _markdown_row(op: Op) -> str:
    method = getattr(Ops, op.name)
    assert method.__doc__, f"Ops.{op.name} has no docstring: its first line is what docs/kernels.md says of it"
    call = f"`{op.name}({', '.join([*signature(method).parameters][1:])})`"
    exact = not any(op.tolerance.values())
    tolerance = "exact" if exact else ", ".join(f"{op.tolerance[dtype]:g}" for dtype in DTYPES)
    return f"| {call} | {method.__doc__.splitlines()[0]} | {op.moves} | {tolerance} |"


if __name__ == "__main__":
    print(markdown())
