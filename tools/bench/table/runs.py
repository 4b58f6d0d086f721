"""Measures the rows of `make bench`, beside what the machine allows in that minute.

Rows that share a server are measured on one; transformers follows when that has ended. Knows rows and processes; not
how a figure is shown.
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
from server.profiling.background_load import BUSY, Neighbours
from server.profiling.machine import bandwidth_over, product_speed
from server.profiling.running import RunningServer, loaded, printed, serving
from tools.bench.table.goals import DEFAULT, LESS_IS_BETTER, MIXED, TRANSFORMERS, Row
from tools.bench.table.limits import GIB, Speeds, limit
from tools.bench.table.models import made

Results = Sequence[Mapping[str, Any]]  # of `kvmux bench`
KV = 512 << 20  # bytes of KV memory
LONGEST = 2176  # tokens of a text, which is what the longest workload needs


@dataclass(frozen=True)
class Effort:
    """How much is done for a figure."""

    rounds: int  # of a workload, all of which count
    attempts: int  # at a workload, while somebody else uses the machine
    folder: Path  # of the models


@dataclass(frozen=True)
class Measured:
    """A row's value."""

    row: Row
    value: float
    limit: float | None
    busy: float  # share of the machine that others used

    @property
    def met(self) -> bool | None:
        return self.row.met(self.value)

    @property
    def of_limit(self) -> float | None:
        """How near the limit is; 1: reached."""
        if self.limit is None or self.row.measure == "slowdown":
            return None
        return self.limit / self.value if self.row.measure in LESS_IS_BETTER else self.value / self.limit


@dataclass(frozen=True)
class Load:
    """One workload, ready to run."""

    what: str  # for who waits
    results: Callable[[], Results]
    own_seconds: Callable[[], float] = lambda: 0.0  # CPU time of processes that go on after it, and are no neighbours


@dataclass(frozen=True)
class Run:
    """What came of it, and the machine meanwhile."""

    results: Results
    speeds: Speeds
    busy: float


def measured(rows: Iterable[Row], effort: Effort, tell: Callable[[str], None]) -> Iterator[Measured]:
    """All rows, process by process. Raises RunError and OSError."""
    for (*_, by_transformers), group in groupby(sorted(rows, key=_process), key=_process):
        measure, alike = _transformers if by_transformers else _served, list(group)
        model = made(alike[0].shape, effort.folder, tell)
        yield from measure(alike, model, effort, tell)


def _process(row: Row) -> tuple[str, str, bool]:
    """Rows that are alike in this share a server, or come of transformers, which follows the server of that model."""
    return row.shape.name, row.weights, row.strategy == TRANSFORMERS


def _served(rows: Sequence[Row], model: Path, effort: Effort, tell: Callable[[str], None]) -> Iterator[Measured]:
    weights = rows[0].weights
    tell(f"{rows[0].shape.name}, {weights}: starting")
    flags = ["--model", str(model), "--weights", weights, "--kv-memory", str(KV), "--max-seq-len", str(LONGEST)]
    started = Neighbours()
    with serving([*flags, "--log-level", "warning"]) as server:
        busy_start = started.share(server.cpu_seconds())
        runs = {}
        for workload in _workloads(rows):
            results = partial(loaded, server.url, _flags(workload, rows, effort))
            runs[workload] = _run(Load(f"{weights}: {workload}", results, server.cpu_seconds), rows[0], effort, tell)
        values = (_of_server(row, server, runs, busy_start) for row in rows)
        yield from (value for value in values if value is not None)


def _transformers(rows: Sequence[Row], model: Path, effort: Effort, tell: Callable[[str], None]) -> Iterator[Measured]:
    """Each workload in a process that has ended when it is over, so that nothing of it is anybody else's."""
    runs = {}
    for workload in _workloads(rows):
        load = Load(f"transformers: {workload}", partial(peer, model, workload, effort.rounds))
        runs[workload] = _run(load, rows[0], effort, tell)
    yield from (_of_load(row, runs) for row in rows)


def peer(model: Path, workload: str, rounds: int) -> Results:
    """Of `tools.bench.transformers_peer`. Raises RunError."""
    flags = ("--model", str(model), "--workload", workload, "--rounds", str(rounds))
    results: Results = json.loads(printed("tools.bench.transformers_peer", *flags))
    return results


def _workloads(rows: Sequence[Row]) -> list[str]:
    """In order, without those that nothing is asked about; a's speed is what b's is held against."""
    loads = {row.workload for row in rows if row.measure != "ready"}
    return sorted(loads | ({"a"} if any(row.measure == "slowdown" for row in rows) else set()))


def _flags(workload: str, rows: Sequence[Row], effort: Effort) -> Sequence[str]:
    """Of `kvmux bench`."""
    strategies = sorted({row.strategy for row in rows if row.workload == workload}) or [DEFAULT]
    which = ["--mixed"] if MIXED in strategies else ["--strategies", *strategies]
    return ["--workload", workload, "--rounds", str(effort.rounds), *which]


def _run(load: Load, row: Row, effort: Effort, tell: Callable[[str], None]) -> Run:
    """The attempt that was disturbed least; the first that was not is the last."""
    attempts: list[Run] = []
    while len(attempts) < effort.attempts and (not attempts or attempts[-1].busy > BUSY):
        tell(f"{row.shape.name}, {load.what}" + (", once more" if attempts else ""))
        speeds = speeds_now(row)
        neighbours, before = Neighbours(), load.own_seconds()
        results = load.results()
        attempts.append(Run(results, speeds, neighbours.share(load.own_seconds() - before)))
    return min(attempts, key=lambda run: run.busy)


def speeds_now(row: Row) -> Speeds:
    """Of the memory, over as much as a step reads, and of products."""
    size = row.shape.weight_bytes(row.weights)
    threads = choose_threads(None, size)
    return Speeds(bandwidth_over(size, threads), product_speed(torch.bfloat16, threads))


# -------------------------------------------------------------------- from results to values
def _of_server(row: Row, server: RunningServer, runs: Mapping[str, Run], busy_start: float) -> Measured | None:
    """None: this system does not tell."""
    if row.measure == "ready":
        return Measured(row, server.ready_seconds, None, busy_start)
    if row.measure == "peak":
        peak = server.peak_bytes()
        return None if peak is None else Measured(row, peak / GIB, limit(row, runs[row.workload].speeds, KV), 0.0)
    return _of_load(row, runs)


def _of_load(row: Row, runs: Mapping[str, Run]) -> Measured:
    run = runs[row.workload]
    busy = max(run.busy, runs["a"].busy) if row.measure == "slowdown" else run.busy
    return Measured(row, _figure(row, runs), limit(row, run.speeds, KV), busy)


def _figure(row: Row, runs: Mapping[str, Run]) -> float:
    """In the row's unit."""
    results = runs[row.workload].results
    found = result_of(results, row)
    match row.measure:
        case "decode":
            return 1e3 / float(found["itl_ms"]["mean"])
        case "slowdown":
            alone = result_of(runs["a"].results, replace(row, phase=None))
            return float(alone["itl_ms"]["mean"]) / float(found["itl_ms"]["mean"])
        case "prefill":
            return float(found["prompt_tokens"] / found["requests"]) * 1e3 / float(found["ttft_ms"]["p50"])
        case "ttft":
            return float(found["ttft_ms"]["p50"])
        case "output":
            return float(found["tokens_per_second"])
        case "mixing":
            alone_speeds = [float(each["tokens_per_second"]) for each in results if each["strategy"] != row.strategy]
            return float(found["tokens_per_second"]) / fmean(alone_speeds)
    raise AssertionError(row.measure)


def result_of(results: Results, row: Row) -> Mapping[str, Any]:
    return next(each for each in results if each["strategy"] == row.strategy and each["phase"] == row.phase)
