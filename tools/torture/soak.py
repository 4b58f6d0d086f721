"""Runs one server under a constant mixed load, and checks that memory, descriptors and gauges do not grow.

The load runs in rounds. Between two rounds no request is sent: the gauges must then be 0, and the counters must equal
the number of requests sent. checker.py checks the answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from time import monotonic

import psutil

from tools.torture.administration import reset_admin_state, send_random_admin_call
from tools.torture.chaos import end_server
from tools.torture.clients import Load, run_client, start_clients
from tools.torture.exchange import Outcome
from tools.torture.gauges import Metrics, find_wrong_gauges, read_metrics
from tools.torture.requests import RequestSpec
from tools.torture.running import (
    open_exchange,
    prepare_load,
    print_line,
    print_progress,
    running_server,
    set_on_signals,
    sleep_unless,
)
from tools.torture.samples import (
    DESCRIPTORS,
    MEMORY,
    NOT_JUDGED,
    RESIDENT,
    THREADS,
    Samples,
    measure_process,
    name_processes,
)
from tools.torture.server_process import ServerProcess
from tools.torture.tally import Tally
from tools.torture.trends import Slope, fit_slope, second_half

MAX_QUEUED_REQUESTS = 256  # many, so that the queue is never full
REST_SECONDS = 20.0  # within which the gauges must be 0 after a round
SETTLED_SECONDS = 3.0  # after which /metrics is up to date: it may lag by a second, and the workers' reports by another
PROBE_PAUSE = 20.0  # seconds between two probes of isolation, at most: long, as each adds hashes to the server's memory
POLL_SECONDS = 0.2
MIN_JUDGED_SECONDS = 600.0  # of a run whose slopes are judged: before, memory grows until caches and pools are full
HOUR = 3600.0
REPORTED_COUNTERS = ("kvmux_num_preemptions_total", "kvmux_forks_total", "kvmux_kv_cache_copied_blocks_total")


@dataclass(frozen=True)
class GrowthBounds:
    """The growth of a process per hour up to which it does not count as a leak."""

    memory: float = 24.0  # MiB
    descriptors: float = 4.0
    threads: float = 2.0

    def get_bound(self, what: str) -> float:
        return {DESCRIPTORS: self.descriptors, THREADS: self.threads}.get(what, self.memory)


@dataclass(frozen=True)
class SoakPlan:
    """The parameters of a soak run."""

    seed: str
    seconds: float
    round_seconds: float
    sample_seconds: float
    clients: int
    requests: int
    bounds: GrowthBounds


@dataclass(frozen=True)
class Trend:
    """A time series of one process: its first and last value, and its slope per hour over the second half."""

    role: str
    what: str  # the figure: a name in samples.py
    first: float
    last: float
    slope: Slope | None
    bound: float

    @property
    def grows(self) -> bool:
        return self.judged and self.slope is not None and self.slope.low > self.bound

    @property
    def judged(self) -> bool:
        return self.what not in NOT_JUDGED


@dataclass
class SentCounts:
    """The numbers that the server's counters must have; requests may not arrive if their clients disconnect."""

    sequences: int = 0  # that the server must have counted
    unsure_sequences: int = 0  # that it may have counted
    unsure_responses: int = 0  # that it may have counted

    def on_outcome(self, spec: RequestSpec, outcome: Outcome) -> None:
        if outcome.status == 200:
            self.sequences += spec.sequences
        else:
            self.unsure_sequences += spec.sequences
            self.unsure_responses += outcome.status is None


@dataclass
class SoakReport:
    """The results of a soak run."""

    plan: SoakPlan
    exact: bool
    tally: Tally
    trends: list[Trend]
    rounds: int
    seconds: float

    @property
    def judged(self) -> bool:
        return self.seconds >= MIN_JUDGED_SECONDS


async def run_soak(plan: SoakPlan) -> SoakReport:
    """Run a server and its clients for a time, and check it between rounds. Raises StartError, ExpectedAnswerError."""
    async with running_server(MAX_QUEUED_REQUESTS) as (server, exact), open_exchange() as exchange:
        load = await prepare_load(server, exchange, exact, plan.seed, plan.requests)
        soak = Soak(plan, load)
        began = monotonic()
        await soak.run()
        report = SoakReport(plan, exact, load.checker.tally, soak.trends(), soak.rounds, monotonic() - began)
        await end_server(server, report.tally)
        if report.judged:
            _check_growth(report)
        return report


def _check_growth(report: SoakReport) -> None:
    for trend in report.trends:
        if trend.grows:
            report.tally.add_problem(
                "growth", f"{trend.what} of {trend.role}: {trend.slope} an hour, more than {trend.bound:g}"
            )


class Soak:
    """Runs rounds of load, with checks of gauges and processes after each."""

    def __init__(self, plan: SoakPlan, load: Load) -> None:
        self.rounds = 0
        self._plan = plan
        self._load = load
        self._server: ServerProcess = load.server
        self._tally = load.checker.tally
        self._samples = Samples(load.server)
        self._sent = SentCounts()
        self._statuses: Counter[int] = Counter()
        self._start_metrics: Metrics
        self._pids = {each.pid for each in load.server.find_processes()}
        self._baseline: dict[tuple[str, str], float] = {}  # figures of the processes after the first round
        load.on_outcome = self._sent.on_outcome

    async def run(self) -> None:
        end = asyncio.Event()
        await asyncio.sleep(SETTLED_SECONDS)
        self._start_metrics = await self._fetch_metrics()
        async with set_on_signals(end), asyncio.TaskGroup() as group:
            always = [group.create_task(print_progress(self._format_progress)), group.create_task(self._sample())]
            deadline = monotonic() + self._plan.seconds
            while monotonic() < deadline and not end.is_set():
                await self._run_round(end, min(self._plan.round_seconds, deadline - monotonic()))
            for task in always:
                task.cancel()

    async def _run_round(self, end: asyncio.Event, seconds: float) -> None:
        """Send load over new connections for a time; when they are closed, check the server."""
        load, seed = self._load, f"{self._plan.seed} round {self.rounds}"
        load.running.set()
        async with open_exchange(self._statuses) as load.exchange, asyncio.TaskGroup() as group:
            start_clients(group, load, seed, self._plan.clients, PROBE_PAUSE)
            group.create_task(run_client(load, Random(f"{seed} operator"), send_random_admin_call, 0.3))
            await sleep_unless(end, seconds)
            load.running.clear()
        self.rounds += 1
        await self._check_at_rest()

    # ------------------------------------------------------------ between rounds
    async def _check_at_rest(self) -> None:
        """Wait until all gauges are 0 and all counters right; those that are not after REST_SECONDS are problems."""
        async with open_exchange(self._statuses) as self._load.exchange:
            await reset_admin_state(self._load, self._server.url)
        deadline = monotonic() + REST_SECONDS
        min_responses = Counter(self._statuses)
        while wrong := list(self._find_wrong_counts(metrics := await self._fetch_metrics(), min_responses)):
            if monotonic() > deadline:
                for each in wrong:
                    self._tally.add_problem("wrong gauges or counters", f"round {self.rounds}: {each}")
                break
            await asyncio.sleep(POLL_SECONDS)
        self._tally.count("checks at rest")
        for name in REPORTED_COUNTERS:
            self._tally.counts[name] = int(metrics.total(name))
        for outcome in ("stop", "length", "cancelled"):
            self._tally.counts[f"engine: {outcome}"] = int(metrics.total("kvmux_requests_total", outcome=outcome))
        self._compare_processes()

    def _find_wrong_counts(self, metrics: Metrics, min_responses: Counter[int]) -> Iterator[str]:
        yield from find_wrong_gauges(metrics)
        finished = self._count_since_start(metrics, "kvmux_requests_total")
        if not self._sent.sequences <= finished <= self._sent.sequences + self._sent.unsure_sequences:
            yield f"finished requests: {finished:g}, sent: {self._sent}"
        for status, number in min_responses.items():
            counted = self._count_since_start(metrics, "kvmux_http_responses_total", code=str(status))
            if not number <= counted <= self._get_max_responses(status):
                yield f"responses {status}: {counted:g}, received: {number}, {self._sent}"

    def _get_max_responses(self, status: int) -> int:
        """Return the largest possible count: received responses, and those that clients did not wait for."""
        not_http = self._tally.counts["bytes that are not HTTP"]
        return self._statuses[status] + self._sent.unsure_responses + not_http

    def _count_since_start(self, metrics: Metrics, name: str, **labels: str) -> float:
        return metrics.total(name, **labels) - self._start_metrics.total(name, **labels)

    async def _fetch_metrics(self) -> Metrics:
        """Return the server's metrics, read over a new connection."""
        async with open_exchange(self._statuses) as exchange:
            outcome, content = await exchange.call("GET", f"{self._server.url}/metrics")
        if outcome.failure is not None:
            self._tally.add_problem("failed requests for /metrics", str(outcome.failure))
        return read_metrics(content.decode())

    def _compare_processes(self) -> None:
        """Count as problems processes that were replaced, or have more descriptors or threads than after round 1."""
        if {each.pid for each in self._server.find_processes()} != self._pids:
            self._tally.add_problem(
                "processes that were replaced", f"round {self.rounds}: {self._server.find_processes()}"
            )
        for role, process in name_processes(self._server.find_processes()[0], self._server.find_roles()).items():
            with suppress(psutil.NoSuchProcess):
                for what, value in measure_process(process).items():
                    if what in MEMORY:
                        continue
                    before = self._baseline.setdefault((role, what), value)
                    if value > before + self._plan.bounds.get_bound(what):
                        self._tally.add_problem(
                            "growth", f"round {self.rounds}: {role} has {value:g} {what} at rest, {before:g} before"
                        )

    # ------------------------------------------------------------ samples and progress
    async def _sample(self) -> None:
        while True:
            await asyncio.to_thread(self._samples.take)
            await asyncio.sleep(self._plan.sample_seconds)

    def _format_progress(self) -> str:
        counts = self._tally.counts
        memory = [
            f"{role} {points[-1][1]:.0f}" for (role, what), points in self._samples.series.items() if what == RESIDENT
        ]
        return (
            f"{counts['requests sent']} requests, {counts['answers checked']} answers checked, {self.rounds} rounds, "
            f"{sum(self._tally.problems.values())} problems; MiB: {', '.join(memory)}"
        )

    def trends(self) -> list[Trend]:
        """Return the trend of every series."""
        trends = []
        for (role, what), points in sorted(self._samples.series.items()):
            slope = fit_slope([(seconds / HOUR, value) for seconds, value in second_half(points)])
            trends.append(Trend(role, what, points[0][1], points[-1][1], slope, self._plan.bounds.get_bound(what)))
        return trends


def print_start(plan: SoakPlan) -> None:
    print_line(f"seed {plan.seed}; {plan.seconds / 60:g} minutes in rounds of {plan.round_seconds:g} s")
