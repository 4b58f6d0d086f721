"""The benchmark measures every operation on every backend; its loads are small here, and its figures nobody's."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from kernels import backends as loading
from kernels.backends import REFERENCE, list_backends
from kernels.cpu.library import find_memory_reader
from kernels.device import KernelsMissing
from kernels.ops import Ops
from tools.bench import kernel_inputs
from tools.bench import kernels as bench


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel_inputs, bench):
        monkeypatch.setattr(module, "GIBIBYTE", 1 << 16)


def _missing() -> Ops:
    raise KernelsMissing("this machine has no abacus")


def test_every_operation_has_a_row_for_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--json", "--context", "40", "--dtype", "bfloat16"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(row["op"], row["backend"]) for row in rows}
    there = [REFERENCE, *(backend.name for backend in list_backends("cpu") if backend.missing is None)]
    assert set(product(bench.OP_NAMES, there)) <= found
    assert {("attend", "sdpa"), ("attend", "sdpa+gather")} <= found
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_attention_is_measured_over_chunks_of_a_prompt_too(capsys: pytest.CaptureFixture[str]) -> None:
    chunk = ["--op", "attend", "--backend", "reference", "sdpa", "--dtype", "float32", "--context", "40", "--json"]
    bench.main([*chunk, "--queries", "40"])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["op"], row["backend"], row["context"]) == ("attend", "reference", 40)


def test_what_is_missing_is_reported_once_on_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "BACKENDS", {"abacus": ("cpu", _missing)})
    bench.main(["--op", "rope", "silu_mul", "--context", "4", "--backend", "reference", "abacus"])
    told = capsys.readouterr()
    assert told.err.startswith("abacus is left out: this machine has no abacus\n")
    assert told.err.count("is left out") == 1
    assert [line.split()[:2] for line in told.out.splitlines()[1:]] == [
        [op, "reference"] for op in ("rope", "rope", "silu_mul", "silu_mul")
    ]


def test_all_of_the_memory_is_read() -> None:
    words = torch.arange(6400)
    if (read := find_memory_reader()) is not None:
        assert read(words) == int(words.sum())
