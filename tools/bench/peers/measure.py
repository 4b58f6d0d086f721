"""Measures servers by turns: in each turn every server is started, loaded and ended, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from server.profiling.background_load import Neighbours
from server.profiling.running import RunError
from tools.bench.peers.workloads import adapt_row, compute_needs, group_workloads, list_rows, run_workload
from tools.bench.table.goals import BenchmarkRow
from tools.bench.table.limits import compute_limit
from tools.bench.table.runs import WorkloadRun, compute_value, measure_speeds
from tools.peers.programs import ServerProgram, StartedServer, run_program


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
        first = turn % len(programs)
        for program in [*programs[first:], *programs[:first]]:
            for shared in group_workloads(workloads, alone=program.start_for_each_workload):
                what = f"turn {turn + 1} of {turns}: {program.name}"
                for measurement in _measure_start(program, shared, what, show_status):
                    yield replace(measurement, turn=turn + 1)


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
                yield from _measure_workload(program, server, left.pop(0))
    except RunError as error:  # it did not start, or its client was ended; others may still be measured
        yield from (PeerMeasurement(program.name, row, None, reason=str(error)) for row in list_rows(left))


def _measure_workload(program: ServerProgram, server: StartedServer, workload: str) -> Iterator[PeerMeasurement]:
    rows = list_rows([workload])
    speeds = measure_speeds(rows[0])
    neighbours, before = Neighbours(), server.cpu_seconds()
    try:
        results = run_workload(server.url, workload, program.name)
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
