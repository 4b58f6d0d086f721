"""Measures the rows of `make bench` (goals.py), each beside the limit of the machine in the same minute.

Rows with the same model and weight format share a server; transformers is measured after that has ended.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch

from server.engine.device import choose_threads
from server.profiling.background_load import Neighbours
from server.profiling.machine import measure_bandwidth, measure_matmul_flops
from tools.bench.goals import (
    DEFAULT_STRATEGY,
    MIXED,
    PEERS_DATE,
    PEERS_MACHINE,
    ROWS,
    TRANSFORMERS,
    BenchmarkRow,
    RowGroup,
)
from tools.bench.limits import GIB, Speeds, compute_limit
from tools.bench.long_contexts import SETTINGS_FILE
from tools.bench.models import LLAMA, QWEN, SHAPES, cache_folder, make_model
from tools.bench.report import update_section
from tools.bench.runner import Case, Context, Effort, Group, Reading, Sample, Table
from tools.server_process import RunningServer, run_bench, run_module, run_server

Results = Sequence[Mapping[str, Any]]  # the JSON output of `kvmux bench`
KV_BYTES = 512 << 20  # bytes of KV memory
MAX_SEQ_LEN = 2176  # tokens, enough for the longest workload
BENCHMARKS, PERFORMANCE, PICTURE = "benchmarks.md", "performance.md", "img/growth.png"
MISSING = {  # why results may lack what a measure is computed from; answers are short in tests only
    "decode": "its answers came in one piece",
    "slowdown": "its answers came in one piece, or workload a has no results",
    "step": "its streams never all decoded at once",
}
PROFILES = {shape: f"kvmux profile, {shape.name}" for shape in (QWEN, LLAMA)}


def add_arguments(parser: ArgumentParser) -> None:
    add, groups = parser.add_argument, get_args(RowGroup)
    add("--rows", nargs="+", choices=groups, default=groups, help="groups of rows (default: all)")
    add("--model", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), help="models to measure (default: all)")
    add("--models", type=Path, default=cache_folder(), help="folder of the models (default: in the user's cache)")


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for each workload of each server, and for what is measured without a workload."""
    options = context.options
    rows = [row for row in ROWS if row.group in options.rows and row.shape.name in options.model]
    if not rows:
        raise ValueError("there are no rows for these --rows and --model: change one of them")
    context.notes.append(f"Peers of {PEERS_DATE}: {PEERS_MACHINE}.")
    for (*_, is_transformers, _), group in groupby(sorted(rows, key=_process_key), key=_process_key):
        list_some = _list_transformers_cases if is_transformers else _list_server_cases
        same_key_rows = list(group)
        model = make_model(same_key_rows[0].shape, options.models, context.show_status)
        yield from list_some(same_key_rows, model, options.turns)


def _process_key(row: BenchmarkRow) -> tuple[int, str, bool, bool]:
    """Return a key by which rows are grouped and sorted; rows with the same key share a server or transformers."""
    return [*SHAPES].index(row.shape.name), row.weights, row.strategy == TRANSFORMERS, row.has_long_context


# -------------------------------------------------------------------- a server
@dataclass
class MeasuredServer:
    """A running server, and the results of its workloads so far."""

    server: RunningServer
    start_load: float  # share of the processors that other processes used while it started
    results: dict[str, Results] = field(default_factory=dict)


def make_server_flags(row: BenchmarkRow, model: Path) -> list[str]:
    """Return the flags of the `kvmux serve` that a row is measured with."""
    flags = ["--model", str(model), "--weights", row.weights]
    if row.has_long_context:
        return [*flags, "--config", str(SETTINGS_FILE)]
    return [*flags, "--kv-memory", str(KV_BYTES), "--max-seq-len", str(MAX_SEQ_LEN), "--log-level", "warning"]


@contextmanager
def _serve(flags: Sequence[str]) -> Iterator[MeasuredServer]:
    background = Neighbours()
    with run_server(flags) as server:
        yield MeasuredServer(server, background.compute_share(server.cpu_seconds()))


def _list_server_cases(rows: Sequence[BenchmarkRow], model: Path, rounds: int) -> Iterator[Case]:
    """Yield the cases of one server: its start, its workloads, and its memory after them."""
    set_up = partial(_serve, make_server_flags(rows[0], model))
    yield from _list_case(rows, "ready", set_up, _measure_start)
    for workload in _list_workloads(rows):
        flags = _make_bench_flags(workload, rows, rounds)
        of_load = [row for row in rows if row.workload == workload and row.measure not in ("ready", "peak")]
        yield _make_case(of_load, rows[0], workload, set_up, partial(_measure_load, of_load, rows[0], workload, flags))
    yield from _list_case(rows, "peak", set_up, _measure_peak)


def _make_case(
    rows: Sequence[BenchmarkRow],
    example: BenchmarkRow,
    what: str,
    set_up: Callable[[], AbstractContextManager[Any]],
    measure: Callable[[Any, str], Iterable[Reading]],
) -> Case:
    """Return a case with one turn: its client has the rounds."""
    name = f"{example.shape.name}, {example.weights}, {what}"
    return Case(name, Table(example.shape.name), measure, set_up=set_up, max_turns=1)


def _list_case(
    rows: Sequence[BenchmarkRow],
    measure: str,
    set_up: Callable[[], AbstractContextManager[Any]],
    read: Callable[[Sequence[BenchmarkRow], MeasuredServer], Iterable[Reading]],
) -> Iterator[Case]:
    """Yield a case for the rows with this measure, if there are any."""
    if wanted := [row for row in rows if row.measure == measure]:
        yield _make_case(wanted, rows[0], measure, set_up, lambda subject, _: read(wanted, subject))


def _measure_start(rows: Sequence[BenchmarkRow], subject: MeasuredServer) -> Iterator[Reading]:
    for row in rows:
        yield Reading(row.describe(), subject.server.ready_seconds, background_load=subject.start_load)


def _measure_peak(rows: Sequence[BenchmarkRow], subject: MeasuredServer) -> Iterator[Reading]:
    if (peak := subject.server.peak_bytes()) is None:  # some systems do not report it
        return
    for row in rows:
        limit = compute_limit(row, Speeds(1.0, 1.0), KV_BYTES)
        yield Reading(row.describe(), peak / GIB, limit, background_load=0.0)


def _measure_load(
    rows: Sequence[BenchmarkRow],
    example: BenchmarkRow,
    workload: str,
    flags: Sequence[str],
    subject: MeasuredServer,
    _: str,
) -> Iterator[Reading]:
    """Run a workload, and yield the readings of its rows."""
    speeds = measure_speeds(example)
    results = subject.results[workload] = run_bench(subject.server.url, flags)
    yield from read_results(rows, results, subject.results.get("a", ()), speeds, KV_BYTES)


# -------------------------------------------------------------------- transformers
def _list_transformers_cases(rows: Sequence[BenchmarkRow], model: Path, rounds: int) -> Iterator[Case]:
    for workload in _list_workloads(rows):
        wanted = [row for row in rows if row.workload == workload]

        def measure(
            _: None, __: str, wanted: Sequence[BenchmarkRow] = wanted, workload: str = workload
        ) -> Iterator[Reading]:
            speeds = measure_speeds(wanted[0])
            results = json.loads(run_module("tools.bench.transformers_peer", str(model), workload, str(rounds)))
            yield from read_results(wanted, results, (), speeds, KV_BYTES)

        name = f"{rows[0].shape.name}, transformers, {workload}"
        yield Case(name, Table(rows[0].shape.name), measure, max_turns=1)


# -------------------------------------------------------------------- workloads
def _list_workloads(rows: Sequence[BenchmarkRow]) -> list[str]:
    """Return the workloads of these rows, in order; "slowdown" rows also need workload a, which comes first."""
    loads = {row.workload for row in rows if row.measure != "ready"}
    return sorted(loads | ({"a"} if any(row.measure == "slowdown" for row in rows) else set()))


def _make_bench_flags(workload: str, rows: Sequence[BenchmarkRow], rounds: int) -> Sequence[str]:
    """Return the flags of `kvmux bench`."""
    strategies = sorted({row.strategy for row in rows if row.workload == workload}) or [DEFAULT_STRATEGY]
    which = ["--mixed"] if MIXED in strategies else ["--strategies", *strategies]
    return ["--workload", workload, "--rounds", str(rounds), *which]


def measure_speeds(row: BenchmarkRow) -> Speeds:
    """Measure the memory bandwidth, with as many bytes as a step reads, and the FLOP/s of matrix products."""
    size = row.shape.weight_bytes(row.weights)
    threads = choose_threads(None, size)
    return Speeds(measure_bandwidth(size, threads), measure_matmul_flops(torch.bfloat16, threads))


# -------------------------------------------------------------------- computing values from results
def read_results(
    rows: Iterable[BenchmarkRow], results: Results, alone: Results, speeds: Speeds, kv_bytes: int
) -> Iterator[Reading]:
    """Yield the readings of the rows of a workload; `alone` are the results of workload a, for "slowdown" rows."""
    for row in rows:
        value = compute_value(row, results, alone)
        limit = compute_limit(row, speeds, kv_bytes)
        reason = MISSING.get(row.measure, "") if value is None else ""
        yield Reading(row.describe(), value, limit, reason, is_by_chance=value is None)


def compute_value(row: BenchmarkRow, results: Results, alone: Results = ()) -> float | None:
    """Return a row's value; None if the results do not have what it is computed from (MISSING)."""
    result = find_result(results, row)
    gap = compute_mean_gap(result)
    match row.measure:
        case "decode":
            return None if gap is None else 1e3 / gap
        case "slowdown":
            short = compute_mean_gap(find_result(alone, replace(row, phase=None))) if alone else None
            return None if gap is None or short is None else short / gap
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


def compute_mean_gap(result: Mapping[str, Any]) -> float | None:
    """Return the mean time between two tokens in milliseconds; None if each answer came in one piece."""
    gaps = result["itl_ms"]
    return None if gaps is None else float(gaps["mean"])


def find_result(results: Results, row: BenchmarkRow) -> Mapping[str, Any]:
    """Return the result of a row's strategy and phase."""
    return next(each for each in results if each["strategy"] == row.strategy and each["phase"] == row.phase)


# -------------------------------------------------------------------- documents
def update_performance_doc(context: Context) -> None:
    """Measure and write all figures in performance.md. Raises RunError, OSError, ValueError for a missing section."""
    docs, models = context.options.docs, context.options.models
    for shape, mark in PROFILES.items():
        context.show_status(mark)
        model = make_model(shape, models, context.show_status)
        update_section(docs / PERFORMANCE, mark, run_module("server", "profile", "--model", str(model)))
    context.show_status("growth of costs")
    plot = ("--plot", str(docs / PICTURE))
    run_module("tools.bench", "growth", "--models", str(models), *plot, "--docs", str(docs))


def _find_place(sample: Sample) -> int:
    """Return the place of a sample's row in the table."""
    places = [(row.shape.name, row.what) for row in ROWS]
    return places.index((sample.table.title, sample.reading.row.what))


GROUP = Group(
    """\
Starts `kvmux serve` once for each model and weight format, sends it load over HTTP, and compares the figures with
goals, with other servers, and with the limits of this machine, which are measured in the same minute. transformers is
measured, too, in a separate process. Models of real shapes with random weights are made first, and kept. A run during
which other processes used the CPU is repeated, and marked if that does not help. With --docs, the figures in
performance.md are measured, too. --rounds are those of each workload.""",
    list_cases,
    add_arguments,
    Effort(3, attempts=3),
    "make bench",
    BENCHMARKS,
    parts=("rows", "model"),
    update_more=update_performance_doc,
    order=_find_place,
)
