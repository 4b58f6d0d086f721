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

from kernels.ops import DecoderLayers
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import Step
from kernels.selfcheck.check import compute_error
from kernels.selfcheck.layer_ops import FORWARD_LAYERS
from kernels.selfcheck.op_db import OPS
from kernels.selfcheck.op_info import DTYPES, OpInfo
from kernels.store import KVStore
from kernels.types import Slots
from tests.kernels.backend_matrix import BACKENDS
from tests.kernels.recorded_calls import Call, calls, real_tokens

EACH = 3  # calls of an operation
# What is for a backend to choose a kernel by, and what tells where rows lie, of which sizes alone are checked.
LEFT_OUT = {"max_q", "max_kv", "rotate", "eps", "scale", "softcap", "hook"}
HUGE = (1 << 31, 1 << 62)
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


def tensors_instead(t: Tensor, *, sized: bool = True) -> Iterator[Wrong]:
    """Yield wrong tensors instead of a right one; `sized`: its sizes follow from other arguments."""
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
    yield "on another device", t.to("meta")


def integers_instead(name: str, n: int) -> Iterator[Wrong]:
    """Yield wrong integers instead of a right one."""
    if name in ("sinks", "ring"):
        yield "negative", -1
        return
    for wrong in (-1, 0, *HUGE, n - 1, n + 1):
        if wrong != n:
            yield str(wrong), wrong


def instead(name: str, value: Any) -> Iterator[Wrong]:
    """Yield descriptions of faults, and the value with each fault in it or in one part of it. May raise ValueError."""
    if isinstance(value, Tensor):
        yield from tensors_instead(value, sized=name != "table")
    elif isinstance(value, bool | KVStore | str | slice) or value is None or name in LEFT_OUT:
        return
    elif isinstance(value, int):
        yield from integers_instead(name, value)
    else:
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
            small = isinstance(value, Slots) and name == "num_decode"
            if not small:
                yield name, getattr(value, name), lambda new, name=name: replace(value, **{name: new})
    elif isinstance(value, Sequence):
        for i, part in enumerate(value):
            yield f"{i}", part, lambda new, i=i: type(value)([*value[:i], new, *value[i + 1 :]])


def with_attribute(value: Any, name: str, new: Any) -> Any:
    changed = copy(value)
    setattr(changed, name, new)
    return changed


# -------------------------------------------------------------------- what comes of a call
def fault_of(call: Call, ops: Any, name: str, wrong: Any) -> str | None:
    """Make the call with the wrong argument; return what is wrong with its outcome, or None."""
    try:
        argument = made(wrong)
        found = call.run(ops, **{name: argument})
    except ValueError:
        return None
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error).splitlines()[0]}"
    try:
        wanted = call.run(ReferenceOps(), **{name: argument})
    except Exception as error:
        return f"raised nothing, and the reference {type(error).__name__}: {str(error).splitlines()[0]}"
    if call.op.name == FORWARD_LAYERS.name:  # without the memory, as keys are rounded
        real = real_tokens(call.arguments["attention"])
        found, wanted = ([outs[0][real]] for outs in (found, wanted))
    return next(filter(None, map(off, [call.op] * len(found), found, wanted)), None)


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
    for op in OPS:
        dtype = rng.choice(DTYPES)
        found = list(calls(op, ops, dtype))
        for i in sorted(rng.sample(range(len(found)), min(EACH, len(found)))):
            for name, value in found[i].arguments.items():
                for what, wrong in instead(name, value):
                    yield f"{backend}: {op.name} in {dtype}, call {i}: {name}: {what}", found[i], name, wrong


def main(backend: str, seed: int) -> int:
    """Make all wrong calls; return the number of failures."""
    torch.set_num_threads(1)
    ops = BACKENDS[backend]()
    faults, count = [], 0
    for what, call, name, wrong in wrong_calls(backend, random.Random(seed), ops):
        print(what, flush=True)
        count += 1
        fault = fault_of(call, ops, name, wrong)
        if fault is not None:
            faults.append(f"{what}: {fault}")
    print(f"FAULTS: {len(faults)} of {count}", *faults, sep="\n", flush=True)
    return len(faults)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1], int(sys.argv[2]))))
