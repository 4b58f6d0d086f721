"""`python -m tools.soak`: loads one server for a long time, and checks that memory, descriptors and gauges do not grow.

The load runs in rounds. Between two rounds no request is sent: the gauges must then be 0. Every answer is compared with
that of an idle server. Exit code 1 when a problem was found, 2 when no server could be started.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from time import monotonic

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tools.status_line import status_line
from tools.torture.clients import Load, reset_admin_state, run_client, send_random_admin_call, start_clients
from tools.torture.exchange import call, open_http_client
from tools.torture.growth import MemorySamples, name_processes
from tools.torture.running import (
    Report,
    describe_counts,
    end_on_signals,
    make_parser,
    report_tally,
    run_program,
    serve_load,
    sleep_unless,
)

MAX_QUEUED_REQUESTS = 256  # many, so that the queue is never full
ROUND_SECONDS, SAMPLE_SECONDS = 180.0, 5.0  # of a long run; short runs have three rounds
REST_SECONDS = 20.0  # within which the gauges must be 0 after a round
PROBE_PAUSE = 20.0  # seconds between two probes of isolation, at most: long, as each adds hashes to the server's memory
POLL_SECONDS = 0.2
# The growth of a process's memory up to which it does not count as a leak. Only long runs are judged: before, memory
# grows until caches and pools are full.
MEMORY_BOUND = 24.0  # MiB an hour
MIN_JUDGED_SECONDS = 600.0
AT_REST_BOUNDS = {"descriptors": 4, "threads": 2}  # more than at the first rest
REPORTED = ("kvmux_num_preemptions_total", "kvmux_forks_total", "kvmux_kv_cache_copied_blocks_total")
ZERO_AT_REST: Sequence[tuple[str, dict[str, str]]] = (
    ("kvmux_num_requests_running", {}),
    ("kvmux_num_requests_waiting", {}),
    ("kvmux_requests_total", {"outcome": "error"}),
    ("kvmux_strategy_failures_total", {}),
    ("kvmux_engine_restarts_total", {}),
    ("kvmux_kv_cache_bytes", {"state": "used"}),
    *(("kvmux_kv_cache_blocks", {"state": state}) for state in ("in_use", "shared", "pending", "pinned")),
)


def main(argv: Sequence[str] | None = None) -> int:
    description = "Load one server for a long time, and check that memory, descriptors and gauges do not grow."
    flags = make_parser("soak", description, 60.0).parse_args(argv)
    return run_program(flags, run_soak(flags))


async def run_soak(flags: argparse.Namespace) -> Report:
    """Run a server and its clients for a time, and check it between rounds. Raises RunError."""
    async with serve_load(flags, MAX_QUEUED_REQUESTS) as load:
        soak = Soak(load, flags.seed)
        with end_on_signals() as end, status_line() as show_status:
            await soak.run(60 * flags.minutes, end, show_status)
    return soak.make_report()


class Soak:
    """Runs rounds of load, with checks of gauges and processes after each."""

    def __init__(self, load: Load, seed: str) -> None:
        self._rounds = 0
        self._seconds = 0.0  # of the run, once it has ended
        self._load = load
        self._seed = seed
        self._server = load.server
        self._tally = load.checker.tally
        self._memory = MemorySamples(load.server)
        self._pids = {each.pid for each in load.server.find_processes()}
        self._at_first_rest: dict[tuple[str, str], int] = {}

    async def run(self, seconds: float, end: asyncio.Event, show_status: Callable[[str], None]) -> None:
        """Run rounds of load until the time is over or `end` is set."""
        began = monotonic()
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(self._sample(min(SAMPLE_SECONDS, seconds / 60)))
            while (left := began + seconds - monotonic()) > 0 and not end.is_set():
                show_status(f"{self._rounds} rounds, {describe_counts(self._tally)}; {self._memory.describe()}")
                await self._run_round(end, min(ROUND_SECONDS, seconds / 3, left))
            sampling.cancel()
        self._seconds = monotonic() - began

    async def _run_round(self, end: asyncio.Event, seconds: float) -> None:
        """Send load over new connections for a time; when they are closed, check the server."""
        load, seed = self._load, f"{self._seed} round {self._rounds}"
        load.running.set()
        async with open_http_client() as load.http, asyncio.TaskGroup() as group:
            start_clients(group, load, seed, PROBE_PAUSE)
            group.create_task(run_client(load, Random(f"{seed} operator"), send_random_admin_call, 0.3))
            await sleep_unless(end, seconds)
            load.running.clear()
        self._rounds += 1
        async with open_http_client() as load.http:
            await reset_admin_state(load, self._server.url)
        await self._check_metrics()
        self._check_processes()

    async def _sample(self, pause: float) -> None:
        while True:
            await asyncio.to_thread(self._memory.take)
            await asyncio.sleep(pause)

    # ------------------------------------------------------------ between rounds
    async def _check_metrics(self) -> None:
        """Wait until all gauges are 0; those that are not after REST_SECONDS are problems."""
        deadline = monotonic() + REST_SECONDS
        while wrong := list(find_wrong_gauges(metrics := await self._fetch_metrics())):
            if monotonic() > deadline:
                for each in wrong:
                    self._tally.add_problem("wrong gauges", f"round {self._rounds}: {each}")
                break
            await asyncio.sleep(POLL_SECONDS)
        self._tally.counts["checks at rest"] += 1
        for name in REPORTED:
            self._tally.counts[name] = int(total(metrics, name))

    async def _fetch_metrics(self) -> list[Sample]:
        """Return the server's metrics, read over a new connection."""
        async with open_http_client() as http:
            outcome = await call(http, "GET", f"{self._server.url}/metrics")
        if outcome.failure is not None:
            self._tally.add_problem("failed requests for /metrics", str(outcome.failure))
        families = text_string_to_metric_families(outcome.content.decode())
        return [sample for family in families for sample in family.samples]

    def _check_processes(self) -> None:
        """Count as problems processes that were replaced, or have more descriptors or threads than after round 1."""
        if {each.pid for each in self._server.find_processes()} != self._pids:
            replaced = f"round {self._rounds}: {self._server.find_processes()}"
            self._tally.add_problem("processes that were replaced", replaced)
        for role, process in name_processes(self._server).items():
            with suppress(psutil.NoSuchProcess):
                for what, value in (("descriptors", process.num_fds()), ("threads", process.num_threads())):
                    before = self._at_first_rest.setdefault((role, what), value)
                    if value > before + AT_REST_BOUNDS[what]:
                        grown = f"round {self._rounds}: {role} has {value} {what} at rest, {before} before"
                        self._tally.add_problem("growth", grown)

    def make_report(self) -> Report:
        """Judge the growth of memory if the run was long enough, and return the report."""
        trends, judged = self._memory.fit_trends(), self._seconds >= MIN_JUDGED_SECONDS
        for each in trends:
            if judged and each.exceeds(MEMORY_BOUND):
                self._tally.add_problem("growth", f"{each.role} by more than {MEMORY_BOUND:g} MiB an hour: {each}")
        run = {"seconds": round(self._seconds), "rounds": self._rounds, "slopes_judged": judged}
        memory = {each.role: str(each) for each in trends}
        return run | {"resident_mib": memory} | report_tally(self._tally)


def find_wrong_gauges(metrics: Sequence[Sample]) -> Iterator[str]:
    """Yield a description of every wrong gauge, given that no request runs or waits and nothing is pinned."""
    for name, labels in ZERO_AT_REST:
        if value := total(metrics, name, **labels):
            yield f"{name} {labels or ''}: {value:g} instead of 0"
    held = total(metrics, "kvmux_kv_cache_pool_bytes", state="held")
    idle = sum(total(metrics, "kvmux_kv_cache_bytes", state=state) for state in ("idle", "wasted"))
    if held != idle:
        yield f"KV bytes held: {held:g}, of which {idle:g} are idle or wasted"


def total(metrics: Sequence[Sample], name: str, **labels: str) -> float:
    """Return the sum of the samples of that name that have these labels."""
    return sum(each.value for each in metrics if each.name == name and labels.items() <= each.labels.items())


if __name__ == "__main__":
    sys.exit(main())
