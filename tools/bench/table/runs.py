"""Measures the rows of `make bench`, and the machine's speed before each workload.

Rows with the same model and weight format share a server; transformers is measured after that has ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from server.engine.device import choose_threads
from server.profiling.background_load import BUSY_THRESHOLD, Neighbours
from server.profiling.machine import measure_bandwidth, measure_matmul_flops
from tools.bench.table.goals import DEFAULT_STRATEGY, LOWER_IS_BETTER, MIXED, TRANSFORMERS, BenchmarkRow
from tools.bench.table.limits import GIB, Speeds, compute_limit
from tools.bench.table.long_contexts import SETTINGS_FILE
from tools.bench.table.models import make_model
from tools.server_process import RunningServer, run_bench, run_module, run_server

Results = Sequence[Mapping[str, Any]]  # the JSON output of `kvmux bench`
KV_BYTES = 512 << 20  # bytes of KV memory
MAX_SEQ_LEN = 2176  # tokens, enough for the longest workload


@dataclass(frozen=True)
class RunOptions:
    """The options of `make bench` that decide how often a workload is run."""

    rounds: int  # of a workload; the figures are of all rounds
    attempts: int  # to run a workload without a disturbance by other processes, at most
    folder: Path  # of the models


@dataclass(frozen=True)
class MeasuredRow:
    """A row with its measured value."""

    row: BenchmarkRow
    value: float  # in the row's unit
    limit: float | None  # the best possible value on this machine; None: unknown
    background_load: float  # share of the machine's CPU time that other processes used

    @property
    def meets_goal(self) -> bool | None:
        return self.row.meets_goal(self.value)

    @property
    def limit_ratio(self) -> float | None:
        """The share of the limit that was reached, at most 1; None if there is no limit."""
        if self.limit is None or self.row.measure == "slowdown":
            return None
        return self.limit / self.value if self.row.measure in LOWER_IS_BETTER else self.value / self.limit


@dataclass(frozen=True)
class WorkloadRunner:
    """A workload that is ready to run."""

    description: str  # shown while it runs
    run: Callable[[], Results]
    # Returns the CPU time of the measured server, which is not background load.
    get_own_cpu_seconds: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class WorkloadRun:
    """The results of a workload, with the machine's speeds and background load meanwhile."""

    results: Results
    speeds: Speeds
    background_load: float


def measure_rows(
    rows: Iterable[BenchmarkRow], effort: RunOptions, show_status: Callable[[str], None]
) -> Iterator[MeasuredRow]:
    """Yield the measured rows, grouped by server. Raises RunError and OSError."""
    for (*_, is_transformers, _), group in groupby(sorted(rows, key=_process_key), key=_process_key):
        measure, same_key_rows = _measure_transformers if is_transformers else _measure_server, list(group)
        model = make_model(same_key_rows[0].shape, effort.folder, show_status)
        yield from measure(same_key_rows, model, effort, show_status)


def _process_key(row: BenchmarkRow) -> tuple[str, str, bool, bool]:
    """Return a key by which rows are grouped and sorted; rows with the same key share a server or transformers."""
    return row.shape.name, row.weights, row.strategy == TRANSFORMERS, row.has_long_context


def make_server_flags(row: BenchmarkRow, model: Path) -> list[str]:
    """Return the flags of the `kvmux serve` that a row is measured with."""
    flags = ["--model", str(model), "--weights", row.weights]
    if row.has_long_context:
        return [*flags, "--config", str(SETTINGS_FILE)]
    return [*flags, "--kv-memory", str(KV_BYTES), "--max-seq-len", str(MAX_SEQ_LEN), "--log-level", "warning"]


def _measure_server(
    rows: Sequence[BenchmarkRow], model: Path, effort: RunOptions, show_status: Callable[[str], None]
) -> Iterator[MeasuredRow]:
    weights = rows[0].weights
    show_status(f"{rows[0].shape.name}, {weights}: starting")
    background = Neighbours()
    with run_server(make_server_flags(rows[0], model)) as server:
        busy_start = background.compute_share(server.cpu_seconds())
        runs = {}
        for workload in _list_workloads(rows):
            results = partial(run_bench, server.url, _make_bench_flags(workload, rows, effort))
            runs[workload] = _run_load(
                WorkloadRunner(f"{weights}: {workload}", results, server.cpu_seconds), rows[0], effort, show_status
            )
        values = (_make_server_result(row, server, runs, busy_start) for row in rows)
        yield from (value for value in values if value is not None)


def _measure_transformers(
    rows: Sequence[BenchmarkRow], model: Path, effort: RunOptions, show_status: Callable[[str], None]
) -> Iterator[MeasuredRow]:
    """Measure each workload with transformers, one process after the other."""
    runs = {}
    for workload in _list_workloads(rows):
        load = WorkloadRunner(
            f"transformers: {workload}", partial(run_transformers_peer, model, workload, effort.rounds)
        )
        runs[workload] = _run_load(load, rows[0], effort, show_status)
    values = (_make_load_result(row, runs) for row in rows)
    yield from (value for value in values if value is not None)


def run_transformers_peer(model: Path, workload: str, rounds: int) -> Results:
    """Return the results of `tools.bench.transformers_peer`. Raises RunError."""
    flags = ("--model", str(model), "--workload", workload, "--rounds", str(rounds))
    results: Results = json.loads(run_module("tools.bench.transformers_peer", *flags))
    return results


def _list_workloads(rows: Sequence[BenchmarkRow]) -> list[str]:
    """Return the workloads of these rows, in order; "slowdown" rows also need workload a."""
    loads = {row.workload for row in rows if row.measure != "ready"}
    return sorted(loads | ({"a"} if any(row.measure == "slowdown" for row in rows) else set()))


def _make_bench_flags(workload: str, rows: Sequence[BenchmarkRow], effort: RunOptions) -> Sequence[str]:
    """Return the flags of `kvmux bench`."""
    strategies = sorted({row.strategy for row in rows if row.workload == workload}) or [DEFAULT_STRATEGY]
    which = ["--mixed"] if MIXED in strategies else ["--strategies", *strategies]
    return ["--workload", workload, "--rounds", str(effort.rounds), *which]


def _run_load(
    load: WorkloadRunner, row: BenchmarkRow, effort: RunOptions, show_status: Callable[[str], None]
) -> WorkloadRun:
    """Run a workload until other processes use little CPU time; return the attempt with the least background load."""
    attempts: list[WorkloadRun] = []
    while len(attempts) < effort.attempts and (not attempts or attempts[-1].background_load > BUSY_THRESHOLD):
        show_status(f"{row.shape.name}, {load.description}" + (", once more" if attempts else ""))
        speeds = measure_speeds(row)
        neighbours, before = Neighbours(), load.get_own_cpu_seconds()
        results = load.run()
        attempts.append(WorkloadRun(results, speeds, neighbours.compute_share(load.get_own_cpu_seconds() - before)))
    return min(attempts, key=lambda run: run.background_load)


def measure_speeds(row: BenchmarkRow) -> Speeds:
    """Measure the memory bandwidth, with as many bytes as a step reads, and the FLOP/s of matrix products."""
    size = row.shape.weight_bytes(row.weights)
    threads = choose_threads(None, size)
    return Speeds(measure_bandwidth(size, threads), measure_matmul_flops(torch.bfloat16, threads))


# -------------------------------------------------------------------- computing values from results
def _make_server_result(
    row: BenchmarkRow, server: RunningServer, runs: Mapping[str, WorkloadRun], busy_start: float
) -> MeasuredRow | None:
    """Return a row with its value; None if this system does not report it."""
    if row.measure == "ready":
        return MeasuredRow(row, server.ready_seconds, None, busy_start)
    if row.measure == "peak":
        peak = server.peak_bytes()
        return (
            None
            if peak is None
            else MeasuredRow(row, peak / GIB, compute_limit(row, runs[row.workload].speeds, KV_BYTES), 0.0)
        )
    return _make_load_result(row, runs)


def _make_load_result(row: BenchmarkRow, runs: Mapping[str, WorkloadRun]) -> MeasuredRow | None:
    """Return a row with its value; None if the load has none."""
    if (value := compute_value(row, runs)) is None:
        return None
    run = runs[row.workload]
    background_load = (
        max(run.background_load, runs["a"].background_load) if row.measure == "slowdown" else run.background_load
    )
    return MeasuredRow(row, value, compute_limit(row, run.speeds, KV_BYTES), background_load)


def compute_value(row: BenchmarkRow, runs: Mapping[str, WorkloadRun]) -> float | None:
    """Return a row's value in its unit; None for the measure "step" if the streams never all decoded at once."""
    results = runs[row.workload].results
    result = find_result(results, row)
    match row.measure:
        case "decode":
            return 1e3 / float(result["itl_ms"]["mean"])
        case "slowdown":
            alone = find_result(runs["a"].results, replace(row, phase=None))
            return float(alone["itl_ms"]["mean"]) / float(result["itl_ms"]["mean"])
        case "prefill":
            return float(result["prompt_tokens"] / result["requests"]) * 1e3 / float(result["ttft_ms"]["p50"])
        case "ttft":
            return float(result["ttft_ms"]["p50"])
        case "step":
            together = result["full_batch_itl_ms"]
            return None if together is None else float(together["p50"])
        case "output":
            return float(result["tokens_per_second"])
        case "mixing":
            alone_speeds = [float(each["tokens_per_second"]) for each in results if each["strategy"] != row.strategy]
            return float(result["tokens_per_second"]) / fmean(alone_speeds)
    raise AssertionError(row.measure)


def find_result(results: Results, row: BenchmarkRow) -> Mapping[str, Any]:
    return next(each for each in results if each["strategy"] == row.strategy and each["phase"] == row.phase)
