"""The check for a GPU runs on the CPU as far as it goes, and a fault in a part does not stop the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.cuda.gpu_check import MODULE

pytestmark = pytest.mark.timeout(600)  # processes that import torch, one after the other
Results = Mapping[str, Sequence[Mapping[str, Any]]]


def check(device: str, parts: Sequence[str], folder: Path) -> tuple[int, Results]:
    """Return the exit code, and the results by part."""
    command = [sys.executable, "-m", MODULE, f"--device={device}", *(f"--part={part}" for part in parts)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (folder / "gpu_check.jsonl").read_text() == done.stdout, done.stderr
    results = defaultdict(list)
    for line in done.stdout.splitlines():
        result = json.loads(line)
        results[result["part"]].append(result)
    return done.returncode, results


def test_on_a_cpu_it_finds_no_fault(tmp_path: Path) -> None:
    code, results = check("cpu", ["mutants", "attention speed", "step speed"], tmp_path)
    assert code == 0, results
    assert [result["caught"] for result in results["mutants"] if "caught" in result] != []
    assert {result["share_of_copy"] > 0 for result in results["attention speed"][1:-1]} == {True}
    assert {result.get("kind") for result in results["step speed"][:-1]} == {
        *(None, "launches", "graph", "graph, Metal products", "plain torch")
    }
    assert [results[part][-1]["ended"] for part in ("mutants", "step speed")] == ["exit 0", "exit 0"]
    assert results["all"][0]["faults"] == 0


def test_without_a_gpu_each_part_says_what_is_missing(tmp_path: Path) -> None:
    code, results = check("cuda", ["bfloat16", "memcheck", "mutants"], tmp_path)
    assert code == 1
    for part in ("bfloat16", "mutants"):
        assert "no NVIDIA GPU" in str(results[part]) or "CUDA" in str(results[part])
    assert results["memcheck"][0].get("skipped") == "there is no compute-sanitizer"
    assert results["all"][0]["faults"] > 0
