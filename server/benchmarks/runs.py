"""Measures rows: starts a server for those that share one, loads it workload by workload, and holds it all against
what the machine allows in that minute. Knows rows and servers; how a figure is shown others know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kernels.probe import bandwidth_over, product_speed
from server.benchmarks.goals import DEFAULT, LESS_IS_BETTER, MIXED, Row
from server.benchmarks.limits import GIB, Speeds, limit
from server.benchmarks.models import made
from server.engine.device import choose_threads
from server.measuring.neighbours import BUSY, Neighbours
from server.measuring.running import Served, loaded, serving

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
class Run:
    """One workload against a server, and the machine meanwhile."""

    results: Results
    speeds: Speeds
    busy: float


def measured(rows: Iterable[Row], effort: Effort, tell: Callable[[str], None]) -> Iterator[Measured]:
    """All rows, server by server. Raises RunError and OSError."""
    for (name, weights), group in groupby(sorted(rows, key=_server), key=_server):
        ours = list(group)
        model = made(ours[0].shape, effort.folder, tell)
        tell(f"{name}, {weights}: starting")
        flags = ["--model", str(model), "--weights", weights, "--kv-memory", str(KV), "--max-seq-len", str(LONGEST)]
        started = Neighbours()
        with serving([*flags, "--log-level", "warning"]) as server:
            busy_start = started.share(server.cpu_seconds())
            runs = {workload: _run(server, workload, ours, effort, tell) for workload in _workloads(ours)}
            values = (_value(row, server, runs, busy_start) for row in ours)
            yield from (value for value in values if value is not None)


def _server(row: Row) -> tuple[str, str]:
    """Rows that are alike in this share a server."""
    return row.shape.name, row.weights


def _workloads(rows: Sequence[Row]) -> list[str]:
    """In order, without those that nothing is asked about; a's speed is what b's is held against."""
    loads = {row.workload for row in rows if row.measure != "ready"}
    return sorted(loads | ({"a"} if any(row.measure == "slowdown" for row in rows) else set()))


def _run(server: Served, workload: str, rows: Sequence[Row], effort: Effort, tell: Callable[[str], None]) -> Run:
    """The attempt that was disturbed least; the first that was not is the last."""
    strategies = sorted({row.strategy for row in rows if row.workload == workload}) or [DEFAULT]
    flags = ["--workload", workload, "--rounds", str(effort.rounds)]
    flags += ["--mixed"] if MIXED in strategies else ["--strategies", *strategies]
    attempts: list[Run] = []
    while len(attempts) < effort.attempts and (not attempts or attempts[-1].busy > BUSY):
        tell(f"{rows[0].shape.name}, {rows[0].weights}: {workload}" + (", once more" if attempts else ""))
        speeds = speeds_now(rows[0])
        neighbours, before = Neighbours(), server.cpu_seconds()
        results = loaded(server.url, flags)
        attempts.append(Run(results, speeds, neighbours.share(server.cpu_seconds() - before)))
    return min(attempts, key=lambda run: run.busy)


def speeds_now(row: Row) -> Speeds:
    """Of the memory, over as much as a step reads, and of products."""
    size = row.shape.weight_bytes(row.weights)
    threads = choose_threads(None, size)
    return Speeds(bandwidth_over(size, threads), product_speed(torch.bfloat16, threads))


# -------------------------------------------------------------------- from results to values
def _value(row: Row, server: Served, runs: Mapping[str, Run], busy_start: float) -> Measured | None:
    """None: this system does not tell."""
    if row.measure == "ready":
        return Measured(row, server.ready_seconds, None, busy_start)
    run = runs[row.workload]
    if (value := _figure(row, server, runs)) is None:
        return None
    busy = max(run.busy, runs["a"].busy) if row.measure == "slowdown" else run.busy
    return Measured(row, value, limit(row, run.speeds, KV), 0.0 if row.measure == "peak" else busy)


def _figure(row: Row, server: Served, runs: Mapping[str, Run]) -> float | None:
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
        case "peak":
            peak = server.peak_bytes()
            return None if peak is None else peak / GIB
    raise AssertionError(row.measure)


def result_of(results: Results, row: Row) -> Mapping[str, Any]:
    return next(each for each in results if each["strategy"] == row.strategy and each["phase"] == row.phase)
