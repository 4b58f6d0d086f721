"""A tracer passes every operation and span to the recorders that are attached, and operations compute the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kernels.ops import OP_NAMES, Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.layer_ops import FORWARD_LAYERS
from kernels.selfcheck.op_counter import OpCounter
from kernels.selfcheck.op_db import OPS
from kernels.selfcheck.op_info import OpInfo
from kernels.tracing import OpTimer, Recorder, Tracer, trace_ops
from tests.kernels.backend_matrix import BACKENDS

CPU = torch.device("cpu")


class Log(Recorder):
    """Logs every report."""

    def __init__(self, log: list[str], name: str = "", *, needs_every_op: bool = False) -> None:
        self.needs_every_op = needs_every_op
        self._log, self._name = log, name

    @contextmanager
    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        self._log.append(f"{self._name}+{name}")
        yield
        self._log.append(f"{self._name}-{name}")

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with self.op(name, (), {}):
            yield

    @contextmanager
    def layers(self) -> Iterator[None]:
        with self.op("layers", (), {}):
            yield

    def add_seconds(self, name: str, seconds: float) -> None:
        self._log.append(f"{self._name}={name}")


def samples(op: OpInfo, ops: Ops) -> list[torch.Tensor]:
    return [result.clone() for _, result in op.samples(ops, torch.float32, CPU)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)
def test_traced_or_not_results_are_the_same(backend: str, op: OpInfo) -> None:
    ops, tracer = BACKENDS[backend](), Tracer()
    traced, expected = trace_ops(ops, tracer), samples(op, ops)
    untraced = samples(op, traced)
    with tracer.record(OpCounter()) as counter:
        counted = samples(op, traced)
    for found in (untraced, counted):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert counter.calls[op.name] or op is FORWARD_LAYERS
    assert counter.bytes.keys() == counter.calls.keys()


def test_everything_of_a_backend_can_be_reached() -> None:
    traced = trace_ops(ReferenceOps(), Tracer())
    for name in vars(Ops):
        assert name.startswith("_") or hasattr(traced, name), name


def test_what_an_operation_calls_itself_is_a_part_of_it() -> None:
    tracer, log = Tracer(), list[str]()
    x = torch.ones(2, 8)
    with tracer.record(Log(log)):
        trace_ops(ReferenceOps(), tracer).add_rms_norm(x, x, torch.ones(8), 1e-6)  # by rms_norm
    assert log == ["+add_rms_norm", "-add_rms_norm"]


def test_recorders_come_and_go() -> None:
    tracer, log = Tracer(), list[str]()
    traced, x = trace_ops(ReferenceOps(), tracer), torch.ones(2, 8)
    with tracer.record(Log(log, "a")):
        with tracer.record(Log(log, "b")), tracer.span("part"):
            traced.silu_mul(x)
        with tracer.span("another"):
            pass
    with tracer.span("no longer"):
        traced.silu_mul(x)
    both = ["a+part", "b+part", "a+silu_mul", "b+silu_mul", "b-silu_mul", "a-silu_mul", "b-part", "a-part"]
    assert log == [*both, "a+another", "a-another"]


def test_layers_that_were_timed_in_one_call_are_reported_afterwards() -> None:
    """If a backend runs them in one call; a recorder that needs every operation makes them run one by one."""
    for backend in BACKENDS:
        for every in (False, True):
            tracer, log = Tracer(), list[str]()
            with tracer.record(Log(log, needs_every_op=every)):
                samples(FORWARD_LAYERS, trace_ops(BACKENDS[backend](), tracer))
            assert log.count("+layers") == log.count("-layers") == 3
            assert "=attend" not in log or not every
            assert "=attend" in log or "+qkv_proj_rope" in log
            if backend.startswith("cpu") and not every:
                assert log.count("=attend") == log.count("=mlp") == 3


def test_seconds_are_those_of_each_operation() -> None:
    tracer, x = Tracer(), torch.ones(2, 8)
    traced = trace_ops(ReferenceOps(), tracer)
    with tracer.record(OpTimer()) as timer:
        traced.rms_norm(x, torch.ones(8), 1e-6)
        with pytest.raises(ValueError, match="silu_mul"):
            traced.silu_mul(x[:, :3])
    assert timer.seconds.keys() == {*OP_NAMES} - {FORWARD_LAYERS.name}
    assert {name for name, seconds in timer.seconds.items() if seconds} == {"rms_norm", "silu_mul"}
