"""`python -m tools.compare_checkouts --base OTHER`: compares the latency of two versions of the code.

Serves the same model from two checkouts at once, this one and OTHER (a worktree of an earlier commit, with its kernels
built), and sends the same requests alternately to both, many times. Other load on the machine affects both, so the
median of the paired ratios is steadier than either figure. The interval contains the true median with 95 % probability
for any distribution (order statistics of the pairs). Imports nothing of the server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tools.serving import THIS_CHECKOUT, TIMEOUT_SECONDS, serving

WORDS = "the red cup of Ann stands on the table near the door and the dog sleeps "
TOKEN_IDS = list(range(20, 36))
CHAT = [{"role": ("user", "assistant")[i % 2], "content": WORDS} for i in range(31)]
TOKENS = 200  # tokens of a stream
BATCH = 8  # texts that are generated at once
STREAM: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}


class CheckoutServer(NamedTuple):
    """The running server of a checkout, with an HTTP client."""

    http: httpx.Client
    processes: Sequence[psutil.Process]
    model: str

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes since they started."""
        return sum(times.user + times.system for times in (each.cpu_times() for each in self.processes))


class Measurement(NamedTuple):
    """A duration to measure: `run` measures it once, on one server, and returns seconds."""

    name: str
    unit: str
    run: Callable[[CheckoutServer], float]


class Pair(NamedTuple):
    """The same measurement on both servers, one right after the other, in seconds."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compare_checkouts", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--turns", type=int, default=20, help="measurements on each server")
    parser.add_argument("--only", nargs="*", help="names of measurements, or parts of names (default: all)")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of `kvmux serve`, after --")
    options = parser.parse_args(arguments)
    measurements = [
        work for work in MEASUREMENTS if not options.only or any(name in work.name for name in options.only)
    ]
    with ExitStack() as stack:
        ours, theirs = [stack.enter_context(open_server(path, options.flags)) for path in (THIS_CHECKOUT, options.base)]
        results = {work.name: measure_pairs(work, ours, theirs, options.turns) for work in measurements}
    Console(width=120).print(make_table(measurements, results))
    return 0


@contextmanager
def open_server(checkout: Path, flags: Sequence[str]) -> Iterator[CheckoutServer]:
    """Run `kvmux serve` from a checkout until the block ends, with an HTTP client."""
    with serving(checkout, flags) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT_SECONDS) as http:
        yield CheckoutServer(http, served.processes(), http.get("/v1/models").json()["data"][0]["id"])


# ---------------------------------------------------------------- measurements
def make_request_timer(path: str, body: dict[str, Any], repeat: int = 30) -> Callable[[CheckoutServer], float]:
    """Return a function that sends a request `repeat` times, one after another, and returns the median seconds."""

    def run(server: CheckoutServer) -> float:
        seconds = []
        for _ in range(repeat):
            began = time.perf_counter()
            server.http.post(path, json={"model": server.model} | body).raise_for_status()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    return run


def measure_token_seconds(server: CheckoutServer) -> float:
    """Return the median seconds between two tokens of a stream."""
    times = []
    with server.http.stream("POST", "/v1/completions", json={"model": server.model} | STREAM) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                assert json.loads(line.removeprefix("data: "))["choices"]
                times.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(times[8:]))


def measure_batch_seconds(server: CheckoutServer) -> float:
    """Return the seconds of a request for BATCH texts, per token of one of them: mostly those of a decode step."""
    prompts = [[20 + i, *TOKEN_IDS] for i in range(BATCH)]
    body = {"model": server.model, "prompt": prompts, "max_tokens": TOKENS, "ignore_eos": True}
    began = time.perf_counter()
    server.http.post("/v1/completions", json=body).raise_for_status()
    return (time.perf_counter() - began) / TOKENS


def measure_cpu_seconds(server: CheckoutServer) -> float:
    """Return the CPU seconds per streamed token, of all processes of a server together."""
    before = server.cpu_seconds()
    for _ in range(3):
        measure_token_seconds(server)
    return (server.cpu_seconds() - before) / (3 * TOKENS)


MEASUREMENTS = (
    Measurement(
        "completion of 1 token", "ms", make_request_timer("/v1/completions", {"prompt": WORDS, "max_tokens": 1})
    ),
    Measurement("the same of ids", "ms", make_request_timer("/v1/completions", {"prompt": TOKEN_IDS, "max_tokens": 1})),
    Measurement(
        "chat of 31 messages", "ms", make_request_timer("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})
    ),
    Measurement("tokenize", "ms", make_request_timer("/tokenize", {"prompt": WORDS})),
    Measurement("token of a stream", "ms", measure_token_seconds),
    Measurement(f"token of {BATCH} texts at once", "ms", measure_batch_seconds),
    Measurement("CPU time of a token", "ms", measure_cpu_seconds),
)


def measure_pairs(work: Measurement, ours: CheckoutServer, theirs: CheckoutServer, turns: int) -> list[Pair]:
    """Measure both servers alternately, `turns` times; a first turn is a warm-up and not returned."""
    pairs = []
    for turn in track(range(turns + 1), description=work.name):
        order = (ours, theirs) if turn % 2 else (theirs, ours)
        seconds = {id(server): work.run(server) for server in order}
        pairs.append(Pair(seconds[id(ours)], seconds[id(theirs)]))
    return pairs[1:]


# ---------------------------------------------------------------- results
def compute_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with at least 95 % probability.

    Of fewer than six values they are the least and the largest, and the probability is that of `compute_coverage`.
    """
    ordered, rank = sorted(values), _find_rank(len(values))
    return ordered[rank], ordered[-1 - rank]


def compute_coverage(count: int) -> float:
    """Return the probability that the interval of `count` independent values contains the median."""
    return 1 - 2 * _compute_tail(count, _find_rank(count))


def _find_rank(count: int) -> int:
    """Return the number of values to leave out at each end of an interval."""
    return max((rank for rank in range(count // 2) if _compute_tail(count, rank) <= 0.025), default=0)


def _compute_tail(count: int, rank: int) -> float:
    """Return the probability that at most `rank` of `count` values lie below the median: the next one is above it."""
    return sum(math.comb(count, below) for below in range(rank + 1)) / (1 << count)


def make_table(measurements: Sequence[Measurement], results: dict[str, list[Pair]]) -> Table:
    """Return the table of medians, ratios and differences with their intervals."""
    table = Table("work", "unit", "before", "now", "ratio", "95 %", "difference", "95 %")
    for work in measurements:
        pairs = results[work.name]
        ratios = [pair.ratio for pair in pairs]
        differences = [1000 * (pair.ours - pair.theirs) for pair in pairs]
        (low, high), (less, more) = compute_interval(ratios), compute_interval(differences)
        table.add_row(
            work.name,
            work.unit,
            f"{1000 * statistics.median(pair.theirs for pair in pairs):.3f}",
            f"{1000 * statistics.median(pair.ours for pair in pairs):.3f}",
            f"{statistics.median(ratios):.4f}",
            f"{low:.4f} to {high:.4f}",
            f"{statistics.median(differences):+.4f}",
            f"{less:+.4f} to {more:+.4f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
