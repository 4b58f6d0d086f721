"""The self-check finds wrong operations before anything is served, and the reference replaces them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import backends as loading
from kernels.backends import list_backends, load_ops
from kernels.cpu import library as cpu
from kernels.cpu.instruction_sets import INSTRUCTION_SETS
from kernels.device import KernelsMissing, device_of
from kernels.ops import DTYPES, NO_OPERATIONS, OP_NAMES, Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.check import Verdict, check_ops, replace_faulty
from kernels.selfcheck.layer_ops import FORWARD_LAYERS
from kernels.selfcheck.op_db import OPS
from server.engine.info import make_engine_info, summarize_engine
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import random_prompt
from tests.kernels.backend_matrix import BACKENDS

CPU = torch.device("cpu")
NAMES = [op.full_name for op in OPS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_right_passes(backend: str, dtype: torch.dtype) -> None:
    assert [verdict.fault for verdict in check_ops(BACKENDS[backend](), dtype, CPU)] == [None] * len(OPS)


def test_the_table_has_every_operation() -> None:
    assert tuple(dict.fromkeys(op.name for op in OPS)) == OP_NAMES, "give it a row in kernels/selfcheck"


def test_dtypes_have_tolerances() -> None:
    assert all(op.tolerance.keys() == {*DTYPES} for op in OPS)


WRITING = ("write_kv", "copy_blocks", "copy_tokens", "repeat_kv_heads_step", "select_blocks")


class Off(ReferenceOps):
    """Operations whose results are a little too large, or that write nothing; except for those in `right`."""

    def __init__(self, *right: str) -> None:
        super().__init__()
        for name in {*OP_NAMES} - {*right}:
            setattr(self, name, self._off(getattr(self, name)))

    def _off(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            if op.__name__ in WRITING:
                return None
            if op.__name__ == "attend":
                op(*args, **kwargs)
                args[0].mul_(1.1)
                return None
            found = op(*args, **kwargs)
            return found * 1.1 if isinstance(found, Tensor) else tuple(x * 1.1 for x in found)

        return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_a_little_off_is_found(dtype: torch.dtype) -> None:
    assert [verdict.op for verdict in check_ops(Off(), dtype, CPU) if verdict.fault] == NAMES[:-1]
    assert NAMES[-1] == FORWARD_LAYERS.name, "is made of the others, and has their mended form"


def test_a_fault_of_one_operation_is_not_laid_upon_another() -> None:
    for name in OP_NAMES:
        right: Any = SimpleNamespace(**{each: getattr(ReferenceOps(), each) for each in [*OP_NAMES, *NO_OPERATIONS]})
        setattr(right, name, getattr(Off(), name))
        assert [verdict.op for verdict in check_ops(right, torch.float32, CPU) if verdict.fault] == [
            op.full_name for op in OPS if op.name == name
        ]


@pytest.mark.parametrize("found", [torch.full((5, 37), torch.nan), torch.zeros(5, 37).double(), torch.zeros(5, 36)])
def test_nan_and_other_shapes_and_dtypes_are_faults(found: Tensor) -> None:
    ops = ReferenceOps()
    ops.silu_mul = lambda gate_up: found  # type: ignore[method-assign]
    faulty = [verdict.op for verdict in check_ops(ops, torch.float32, CPU) if verdict.fault]
    assert faulty == ["mlp", "silu_mul"], "and what is made of it"


def test_the_reference_takes_the_place_of_what_is_faulty() -> None:
    ops = Off("linear", "rope")
    good = replace_faulty(ops, check_ops(ops, torch.float32, CPU))
    assert [verdict.fault for verdict in check_ops(good, torch.float32, CPU)] == [None] * len(OPS)
    assert good.rope.__self__ is ops  # type: ignore[attr-defined]
    assert good.batch_invariant_head_dim == 0, "of two backends together, not even one number is promised"


def test_operations_that_are_not_used_are_not_checked() -> None:
    verdicts = check_ops(Off("rope"), torch.float32, CPU, {"sample", "rope"})
    assert {verdict.op: verdict.fault is not None for verdict in verdicts} == {"rope": False, "sample": True}
    good = replace_faulty(Off("rope"), verdicts)
    assert [verdict.fault for verdict in check_ops(good, torch.float32, CPU, {"sample", "rope"})] == [None, None]


class Raising(ReferenceOps):
    def attend(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such instruction")


def test_a_server_with_a_broken_kernel_says_so_and_answers_rightly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "BACKENDS", {"cpu-broken": ("cpu", Raising)})
    driver = Driver(Path("tiny"), kv_memory="12MiB")
    heard = driver.submit("it", random_prompt(40), 8)
    driver.run()
    reference = Driver(Path("tiny"), kernels="reference", kv_memory="12MiB")
    expected = reference.submit("it", random_prompt(40), 8)
    reference.run()
    assert heard.tokens == expected.tokens
    assert summarize_engine(driver.engine)["kernels"] == "cpu-broken, plain torch for attend"
    assert summarize_engine(reference.engine)["kernels"] == "plain torch"
    assert "KERNEL FAILS ITS CHECK, plain torch is used: attend of cpu-broken: RuntimeError: no such" in caplog.text
    found = make_engine_info(driver.engine)
    assert found.fallback_ops == ["attend"]
    assert (found.backends["attend"], found.backends["rope"]) == ("reference", "cpu-broken")


def test_of_the_cpus_kernels_an_accelerator_checks_the_one_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[torch.device, set[str]]] = []

    def check(ops: Ops, dtype: torch.dtype, device: torch.device, names: Collection[str] = OP_NAMES) -> list[Verdict]:
        checked.append((device, {*names}))
        return []

    monkeypatch.setattr(loading, "check_ops", check)
    loading._check_backend.cache_clear()
    try:
        Driver(Path("tiny"), device="metal-emulated", kv_memory="12MiB")
    finally:
        loading._check_backend.cache_clear()
    assert [(device.type, names) for device, names in checked] == [
        ("privateuseone", {*OP_NAMES}),
        ("cpu", {"sample"}),
    ]


def test_without_a_library_plain_torch_is_used_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    with caplog.at_level(logging.DEBUG):
        assert load_ops(device_of("cpu"), torch.float32).description == "plain torch"
    assert "there are no kernels for torch.float32 on cpu: plain torch is used, which is slower" in caplog.text


def test_a_library_that_is_none_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INSTRUCTION_SETS:
        (tmp_path / f"_{name}.so").write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    assert load_ops(device_of("cpu"), torch.float32).description == "plain torch"


def test_dtypes_that_no_kernel_knows_are_left_to_plain_torch() -> None:
    assert load_ops(device_of("cpu"), torch.float64).description == "plain torch"


def _missing() -> Ops:
    raise KernelsMissing("there is no abacus")


def test_backends_are_those_of_a_device_and_say_why_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"abacus": ("cpu", _missing), "plain": ("cpu", ReferenceOps), "elsewhere": ("cuda", ReferenceOps)}
    monkeypatch.setattr(loading, "BACKENDS", rows)
    assert [each.name for each in list_backends()] == ["abacus", "plain", "elsewhere"]
    assert [(each.name, each.missing) for each in list_backends("cpu")] == [
        ("abacus", "there is no abacus"),
        ("plain", None),
    ]
    assert load_ops(device_of("cpu"), torch.float32).backend == "plain"
