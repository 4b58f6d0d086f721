"""Measures servers by turns: one at a time is loaded, and each turn begins with another one.

`measure_servers` starts each server in each turn, and all rows are measured. `measure_decoding` measures only the rows
that do not depend on computing prompts: servers go on running and find the prompts in their caches, so a turn takes a
minute where computing the prompts of long contexts takes half an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import SystemRandom
from typing import TypeVar

from server.profiling.background_load import Neighbours
from tools.bench.peers.workloads import adapt_row, compute_needs, group_workloads, list_rows, run_workload
from tools.bench.table.goals import BenchmarkRow, Measure
from tools.bench.table.limits import compute_limit
from tools.bench.table.runs import WorkloadRun, compute_value, measure_speeds
from tools.peers.programs import ServerProgram, StartedServer, run_program
from tools.server_process import RunError

DECODING: frozenset[Measure] = frozenset({"decode", "step"})  # measures that do not depend on computing prompts
Item = TypeVar("Item")


@dataclass(frozen=True)
class PeerMeasurement:
    """The figure of a row on a server in a turn, or the reason why there is none."""

    server: str
    row: BenchmarkRow
    value: float | None  # in the row's unit
    limit: float | None = None
    read_bandwidth: float | None = None  # bytes per second, measured just before
    background_load: float = 0.0
    reason: str = ""  # why there is no value
    turn: int = 1


def measure_servers(
    programs: Sequence[ServerProgram], workloads: Sequence[str], turns: int, show_status: Callable[[str], None]
) -> Iterator[PeerMeasurement]:
    """Yield the measurements of all turns; each turn begins with another server. Raises OSError."""
    for turn in range(turns):
        for program in _rotate(programs, turn):
            for shared in group_workloads(workloads, alone=program.start_for_each_workload):
                what = f"turn {turn + 1} of {turns}: {program.name}"
                for measurement in _measure_start(program, shared, what, show_status):
                    yield replace(measurement, turn=turn + 1)


def measure_decoding(
    programs: Sequence[ServerProgram], workloads: Sequence[str], turns: int, show_status: Callable[[str], None]
) -> Iterator[PeerMeasurement]:
    """Yield the measurements of the time between tokens in turns with the same prompts, which servers find cached.

    For each workload all servers are started; each computes the prompts once before the first turn. Raises OSError.
    """
    for workload in workloads:
        if rows := [row for row in list_rows([workload]) if row.measure in DECODING]:
            yield from _measure_decoding_of(workload, rows, programs, turns, show_status)


def _measure_decoding_of(
    workload: str,
    rows: Sequence[BenchmarkRow],
    programs: Sequence[ServerProgram],
    turns: int,
    show_status: Callable[[str], None],
) -> Iterator[PeerMeasurement]:
    seed, running = SystemRandom().randrange(1 << 32), list[tuple[ServerProgram, StartedServer]]()
    with ExitStack() as servers:
        for program in programs:
            show_status(f"{workload}: {program.name} computes the prompts")
            try:
                server = servers.enter_context(run_program(program, compute_needs([workload])))
                run_workload(server.url, workload, program.name, seed=seed)
            except RunError as error:
                yield from (PeerMeasurement(program.name, row, None, reason=str(error)) for row in rows)
            else:
                running.append((program, server))
        for turn in range(turns):
            for program, server in _rotate(running, turn):
                show_status(f"{workload}, turn {turn + 1} of {turns}: {program.name} decodes")
                for measurement in _measure_workload(program, server, workload, rows, seed):
                    yield replace(measurement, turn=turn + 1)


def _rotate(items: Sequence[Item], first: int) -> Sequence[Item]:
    """Return the items from another one on, then those before it."""
    return [*items[first % len(items) :], *items[: first % len(items)]] if items else []


def _measure_start(
    program: ServerProgram, workloads: Sequence[str], prefix: str, show_status: Callable[[str], None]
) -> Iterator[PeerMeasurement]:
    """Start a server and run workloads on it; yield their measurements."""
    left = list(workloads)
    show_status(f"{prefix}, starting")
    try:
        with run_program(program, compute_needs(workloads)) as server:
            while left:
                show_status(f"{prefix}, {left[0]}")
                workload = left.pop(0)
                yield from _measure_workload(program, server, workload, list_rows([workload]))
    except RunError as error:  # it did not start, or its client was ended; others may still be measured
        yield from (PeerMeasurement(program.name, row, None, reason=str(error)) for row in list_rows(left))


def _measure_workload(
    program: ServerProgram, server: StartedServer, workload: str, rows: Sequence[BenchmarkRow], seed: int | None = None
) -> Iterator[PeerMeasurement]:
    """Run a workload and yield the measurements of rows; the same `seed` gives the same prompts, None new ones."""
    speeds = measure_speeds(rows[0])
    neighbours, before = Neighbours(), server.cpu_seconds()
    try:
        results = run_workload(server.url, workload, program.name, seed=seed)
    except RunError as error:
        yield from (PeerMeasurement(program.name, row, None, reason=str(error)) for row in rows)
        return
    load = neighbours.compute_share(server.cpu_seconds() - before)
    runs = {workload: WorkloadRun(results, speeds, load)}
    for row in rows:
        value = compute_value(adapt_row(row, results), runs)
        reason = "" if value is not None else "its streams never all decoded at the same time"
        limit = compute_limit(row, speeds, 0)
        yield PeerMeasurement(program.name, row, value, limit, speeds.read_bandwidth, load, reason)
