"""Calls every operation of a backend with wrong arguments, in a process of its own, as an invalid read may end it.

`python -m tests.kernels.wrong_arguments BACKEND SEED` prints each call before it is made, and at the end the calls
that failed: a call must raise ValueError, or compute the same as the reference.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.ops import DTYPES, DecoderLayers
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import Step
from kernels.selfcheck.check import compute_error
from kernels.selfcheck.layer_ops import FORWARD_LAYERS
from kernels.selfcheck.op_db import OPS
from kernels.selfcheck.op_info import OpInfo
from kernels.store import KVStore
from tests.kernels.backend_matrix import BACKENDS
from tests.kernels.recorded_calls import Call, calls, real_tokens

EACH = 3  # calls of an operation
LEFT_OUT = {"rotate", "eps", "scale", "softcap", "hook"}  # any number is right
HUGE = (1 << 31, 1 << 62, (1 << 63) - 1)
UNCHECKED_ON_GPU = {"positions"}  # its numbers; test_arguments.py tests them on CPUs
OTHER = {
    torch.float32: (torch.float64, torch.bfloat16, torch.int32),
    torch.bfloat16: (torch.float32, torch.float16, torch.int16),
    torch.float16: (torch.float32, torch.bfloat16, torch.int16),
    torch.float64: (torch.float32,),
    torch.int64: (torch.int32, torch.float64),
    torch.int32: (torch.int64, torch.float32),
    torch.int8: (torch.uint8, torch.float32),
    torch.uint8: (torch.int8, torch.int32),
}

Change = Callable[[Any], Any]
Wrong = tuple[str, Any]  # what is wrong with it, and the argument


def tensors_instead(name: str, t: Tensor) -> Iterator[Wrong]:
    """Yield wrong tensors instead of a right one."""
    sized = name != "table"  # whether its sizes follow from other arguments
    yield "empty", t.new_empty((0,) * t.dim())
    for d in range(t.dim()):
        if sized and t.shape[d] > 0:
            yield f"shorter in dimension {d}", t.narrow(d, 0, t.shape[d] - 1)
            yield f"longer in dimension {d}", torch.cat((t, t.narrow(d, 0, 1)), d)
    for dtype in OTHER[t.dtype]:
        yield f"{dtype}", t.to(dtype)
    yield "one dimension more", t[None]
    yield "a last dimension of one", t[..., None]
    if t.numel():
        yield "a number alone", t.flatten()[0]
    if t.dim():
        yield "every second number", torch.stack((t, t), -1).flatten(-2)[..., ::2]
    if t.dim() > 1 and sized:
        yield "transposed", t.transpose(-1, -2)
    if t.dim() > 1:
        yield "lying transposed", t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if t.dim() and t.shape[0] > 1 and t.is_floating_point():
        yield "the first row again and again", t[:1].expand(t.shape)
    if t.dtype in (torch.int32, torch.int64) and t.numel() and name not in UNCHECKED_ON_GPU:
        yield from numbers_instead(t)
    if name in ("src", "dst"):
        yield "with the first number everywhere", t[:1].expand(t.shape).contiguous()
    yield "on another device", t.to("meta")


def numbers_instead(t: Tensor) -> Iterator[Wrong]:
    """Yield a tensor of integers with one wrong number in it, at a random place."""
    limits = torch.iinfo(t.dtype)
    for wrong in (-1, limits.min, limits.max, limits.max // 2):
        changed = t.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[random.randrange(t.numel())] = wrong
        yield f"{wrong} in it", changed


def integers_instead(n: int) -> Iterator[Wrong]:
    """Yield wrong integers instead of a right one."""
    for wrong in (-1, 0, *HUGE, n - 1, n + 1):
        if wrong != n:
            yield str(wrong), wrong


def lists_instead(values: list[Any]) -> Iterator[Wrong]:
    """Yield wrong lists instead of a right one."""
    yield "nothing", []
    yield "one fewer", values[:-1]
    yield "the first one again", [*values, values[0]]
    yield "the first one everywhere", [values[0]] * len(values)


def instead(name: str, value: Any) -> Iterator[Wrong]:
    """Yield descriptions of faults, and the value with each fault in it or in one part of it. May raise ValueError."""
    if isinstance(value, Tensor):
        yield from tensors_instead(name, value)
    elif isinstance(value, bool | KVStore | str | slice) or value is None or name in LEFT_OUT:
        return
    elif isinstance(value, int):
        yield from integers_instead(value)
    else:
        if isinstance(value, list) and value and isinstance(value[0], int):
            yield from lists_instead(value)
        for part, inner, put in parts_of(value):
            for what, wrong in instead(part, inner):
                yield f"{part}: {what}", Later(put, wrong)


class Later:
    """A value that is made only when it is used, as making it may raise ValueError."""

    def __init__(self, put: Change, part: Any) -> None:
        self._put, self._part = put, part

    def made(self) -> Any:
        return self._put(made(self._part))


def made(value: Any) -> Any:
    return value.made() if isinstance(value, Later) else value


def parts_of(value: Any) -> Iterator[tuple[str, Any, Change]]:
    """Yield the parts of a value, and a function that replaces each part."""
    if isinstance(value, DecoderLayers):
        yield "layers", value.layers, DecoderLayers
    elif isinstance(value, Step):
        for name in ("positions", "slices"):
            yield name, getattr(value, name), lambda new, name=name: with_attribute(value, name, new)
    elif hasattr(value, "_replace"):  # a named tuple
        for name in value._fields:
            yield name, getattr(value, name), lambda new, name=name: value._replace(**{name: new})
    elif is_dataclass(value) and not isinstance(value, type):
        for name in (field.name for field in fields(value)):
            yield name, getattr(value, name), lambda new, name=name: replace(value, **{name: new})
    elif isinstance(value, Sequence):
        for i, part in enumerate(value):
            yield f"{i}", part, lambda new, i=i: type(value)([*value[:i], new, *value[i + 1 :]])


def with_attribute(value: Any, name: str, new: Any) -> Any:
    changed = copy(value)
    setattr(changed, name, new)
    return changed


# -------------------------------------------------------------------- checks of addresses, which are not in the table
WRITE_KV = next(op for op in OPS if op.name == "write_kv")
CHECK_SLOTS = WRITE_KV._replace(name="check_slots")


def address_checks(ops: Any, dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of `Ops.check_slots` for the addresses of other calls."""
    for call in calls(WRITE_KV, ops, dtype):
        store, layer, k, at = (call.arguments[name] for name in ("store", "layer", "k", "at"))
        yield Call(CHECK_SLOTS, {"store": store, "layer": layer, "at": at, "num_tokens": len(k)})


# -------------------------------------------------------------------- what comes of a call
def fault_of(call: Call, ops: Any, name: str, wrong: Any) -> str | bool | None:
    """Make the call with the wrong argument; return what is wrong with its outcome, or None."""
    try:
        argument = made(wrong)
        found = call.run(ops, **{name: argument})
    except ValueError as error:
        return is_too_strict(call, name, wrong) and f"raised, and the reference does not: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error).splitlines()[0]}"
    try:
        wanted = call.run(ReferenceOps(), **{name: argument})
    except Exception as error:
        return f"raised nothing, and the reference {type(error).__name__}: {str(error).splitlines()[0]}"
    if call.op.name == FORWARD_LAYERS.name:  # without the memory, as keys are rounded
        real = real_tokens(argument if name == "attention" else call.arguments["attention"])
        found, wanted = ([outs[0][real]] for outs in (found, wanted))
    return next(filter(None, map(off, [call.op] * len(found), found, wanted)), None)


def is_too_strict(call: Call, name: str, wrong: Any) -> bool:
    """Return whether the reference accepts addresses that a backend refused: a strategy must work on every backend."""
    if call.op is not CHECK_SLOTS:
        return False
    try:
        call.run(ReferenceOps(), **{name: made(wrong)})
    except ValueError:
        return False
    return True


def off(op: OpInfo, ours: Tensor, theirs: Tensor) -> str | None:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"gave {ours.dtype} {[*ours.shape]} where the reference gives {theirs.dtype} {[*theirs.shape]}"
    if ours.is_meta or ours.numel() == 0:
        return None
    error = compute_error(ours.double().nan_to_num(), theirs.double().nan_to_num())
    worst = 4 * max(op.tolerance.values())  # where types are mixed, more is rounded
    return None if error <= worst else f"was off by {error:.1e} of the largest number"


def wrong_calls(backend: str, rng: random.Random, ops: Any) -> Iterator[tuple[str, Call, str, Any]]:
    """Yield a name for each wrong call, the right call, and the argument to change."""
    for op in (*OPS, CHECK_SLOTS):
        dtype = rng.choice(DTYPES)
        found = list(address_checks(ops, dtype) if op is CHECK_SLOTS else calls(op, ops, dtype))
        for i in sorted(rng.sample(range(len(found)), min(EACH, len(found)))):
            for name, value in found[i].arguments.items():
                for what, wrong in instead(name, value):
                    yield f"{backend}: {op.name} in {dtype}, call {i}: {name}: {what}", found[i], name, wrong


def main(backend: str, seed: int) -> int:
    """Make all wrong calls; return the number of failures."""
    torch.set_num_threads(1)
    random.seed(seed)
    ops = BACKENDS[backend]()
    faults, count = [], 0
    for what, call, name, wrong in wrong_calls(backend, random.Random(seed), ops):
        print(what, flush=True)
        count += 1
        fault = fault_of(call, ops, name, wrong)
        if fault:
            faults.append(f"{what}: {fault}")
    print(f"FAULTS: {len(faults)} of {count}", *faults, sep="\n", flush=True)
    return len(faults)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1], int(sys.argv[2]))))
