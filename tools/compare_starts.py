"""`python -m tools.compare_starts --base OTHER -- --model DIRECTORY`: compares the start-up of two versions.

Starts the server of this checkout and that of OTHER (a worktree of an earlier commit, with its kernels built)
alternately, with several sizes of KV memory, and requests a stream of a hundred tokens as soon as it is ready. Prints
every figure when it is measured, and a table of medians at the end. Linux only. Imports nothing of the server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from tools.serving import POLL_SECONDS, THIS_CHECKOUT, TIMEOUT_SECONDS, serving

MIB = 1 << 20
PROMPT = [*range(10, 42)]  # token ids
TOKENS = 100


class StartFigures(NamedTuple):
    """The figures of one start."""

    ready: float  # seconds from the start to the first 200 of /ready
    first: float  # seconds from the request to the first token
    median: float  # seconds between two of the first hundred tokens, the median
    worst: float  # seconds between two of the first hundred tokens, the maximum
    peak: int  # bytes: the sum of all processes' peaks of resident memory


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compare_starts", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--turns", type=int, default=5, help="starts of each checkout and size")
    parser.add_argument("--memory", nargs="+", default=["auto", "512MiB", "4GiB"], help="values of --kv-memory")
    parser.add_argument("--json", type=Path, help="write all figures to this file as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of `kvmux serve`, after --")
    options = parser.parse_args(arguments)
    starts: dict[str, dict[str, list[StartFigures]]] = {size: {"before": [], "now": []} for size in options.memory}
    console = Console(width=120)
    for turn in range(options.turns):
        for size, (name, checkout) in itertools.product(
            options.memory, (("now", THIS_CHECKOUT), ("before", options.base))[:: 1 if turn % 2 else -1]
        ):
            starts[size][name].append(start := measure_start(checkout, [*options.flags, "--kv-memory", size]))
            console.print(size, name, start)
    console.print(make_table(starts))
    if options.json:
        figures = {size: {name: [s._asdict() for s in all] for name, all in by.items()} for size, by in starts.items()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def measure_start(checkout: Path, flags: Sequence[str]) -> StartFigures:
    """Start the server of a checkout, measure it, and stop it."""
    with serving(checkout, flags) as served:
        with httpx.Client(base_url=served.url, timeout=TIMEOUT_SECONDS) as http:
            first, *gaps = measure_stream(http)
            wait_for_memory(http)
        memory = sum(read_peak_bytes(each.pid) for each in served.processes())
        return StartFigures(served.start_seconds, first, statistics.median(gaps), max(gaps), memory)


def measure_stream(http: httpx.Client) -> list[float]:
    """Return the seconds to the first token of a stream, and from each to the next."""
    model = http.get("/v1/models").json()["data"][0]["id"]
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS + 1, "ignore_eos": True, "stream": True}
    times = [time.perf_counter()]
    with http.stream("POST", "/v1/completions", json={"model": model} | body) as answer:
        times += [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    return [after - before for before, after in itertools.pairwise(times)]


def wait_for_memory(http: httpx.Client) -> None:
    """Wait until all KV memory is usable; earlier versions start with all of it, and do not report it."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        memory = http.get("/v1/kv_cache").json().get("memory")
        if memory is None or memory.get("usable_bytes", memory["bytes"]) == memory["bytes"]:
            return
        time.sleep(10 * POLL_SECONDS)
    raise SystemExit(f"after {TIMEOUT_SECONDS:g} s not all KV memory is usable")


def read_peak_bytes(pid: int) -> int:
    """Return the peak of a process's resident memory in bytes."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, pid
    return 1024 * int(found[1])


def make_table(starts: dict[str, dict[str, list[StartFigures]]]) -> Table:
    """Return a table of medians before and now, with the ratio of each turn."""
    columns = (("ready, s", "ready", 1), ("first token, ms", "first", 1e3), ("token, ms", "median", 1e3))
    table = Table("KV memory", "figure", "before", "now", "ratio", "turns")
    for size, by in starts.items():
        for label, name, factor in (*columns, ("worst of 100, ms", "worst", 1e3), ("peak, MiB", "peak", 1 / MIB)):
            before, now = ([factor * getattr(start, name) for start in by[which]] for which in ("before", "now"))
            ratios = [ours / theirs for ours, theirs in zip(now, before, strict=True)]
            table.add_row(
                size,
                label,
                f"{statistics.median(before):,.2f}",
                f"{statistics.median(now):,.2f}",
                f"{statistics.median(ratios):.2f}",
                " ".join(f"{ratio:.2f}" for ratio in ratios),
            )
    return table


if __name__ == "__main__":
    sys.exit(main())
