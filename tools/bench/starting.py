"""`python -m tools.bench.starting`: measures the start-up time of `kvmux serve`, and the memory of its processes.

The time is from the start of the process to the first 200 of /ready. Memory is measured then, and repeatedly under a
short load. PSS divides shared pages among their processes, so it can be summed up; RSS cannot. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from server.text.processes.text_process import MODULE
from tools.bench.streaming import MeasuredServer, get_model_name, is_engine, run_streams
from tools.server_process import RunError, RunningServer, run_server, sigterm_as_ctrl_c

SAMPLE = 0.1  # seconds between two measurements of memory
FIRST_ID, IDS = 10, 256  # the first and the number of the token ids in prompts, which every model has


class Memory(NamedTuple):
    """The memory of processes, in bytes."""

    pss: int
    rss: int


class StartupResult(NamedTuple):
    """Start-up times, and memory by the processes' role ("all" is the sum)."""

    seconds: Sequence[float]  # until ready, for each start
    ready: Mapping[str, Memory]  # memory when the server is ready
    peak: Mapping[str, Memory]  # each role's own peak; for "all" the peak of the sum


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.starting", description=__doc__)
    parser.add_argument("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    parser.add_argument("--rounds", type=int, default=5, help="number of starts; the last one gets the load")
    parser.add_argument("--streams", type=int, default=8, help="number of concurrent streams of the load")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="more flags of `kvmux serve`, after --")
    options = parser.parse_args(arguments)
    if not Path("/proc/self/smaps_rollup").exists():
        parser.error("this system has no /proc/PID/smaps_rollup, which reports shared memory: run it on Linux")
    if min(options.rounds, options.streams, options.prompt, options.tokens) < 1:
        parser.error("--rounds, --streams, --prompt and --tokens should be at least 1")
    if any(flag.startswith(("--port", "--host")) for flag in options.serve):
        parser.error("leave --host and --port out: this tool chooses them")
    flags = ["--model", options.model, *options.serve]
    try:
        with sigterm_as_ctrl_c():
            result = measure(flags, options.rounds, options.streams, options.prompt, options.tokens)
    except RunError as error:
        sys.exit(str(error))
    print(json.dumps(result._asdict()) if options.json else format_table(result))


def measure(flags: Sequence[str], rounds: int, streams: int, prompt: int, tokens: int) -> StartupResult:
    """Start a server `rounds` times and, the last time, measure its memory under load. Raises RunError."""
    seconds = []
    for last in [False] * (rounds - 1) + [True]:
        with run_server(flags) as served:
            seconds.append(served.ready_seconds)
            if last:
                ready = measure_memory(served.process)
                peak = asyncio.run(measure_peak_memory(served, streams, prompt, tokens))
    return StartupResult(seconds, ready, peak)


# ---------------------------------------------------------------- memory
def measure_memory(supervisor: psutil.Process) -> dict[str, Memory]:
    """Return the memory of the server's processes by role; "all" is the sum."""
    by_role: dict[str, Memory] = {}
    for process in (supervisor, *supervisor.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended since they were listed, as spare processes of texts do
            role = "supervisor" if process == supervisor else get_role(process)
            full = process.memory_full_info()
            before = by_role.get(role, Memory(0, 0))
            by_role[role] = Memory(before.pss + full.pss, before.rss + full.rss)
    return by_role | {"all": Memory(*(sum(column) for column in zip(*by_role.values(), strict=True)))}


def get_role(child: psutil.Process) -> str:
    if any("resource_tracker" in word for word in child.cmdline()):
        return "resource tracker"
    if MODULE in child.cmdline():
        return "text"
    return "engine" if is_engine(child) else "API"


async def measure_peak_memory(served: RunningServer, streams: int, prompt: int, tokens: int) -> dict[str, Memory]:
    """Run the streams; return the largest memory of each role meanwhile."""
    ids = [FIRST_ID + i % IDS for i in range(prompt)]
    body: dict[str, Any] = {
        "model": get_model_name(served),
        "prompt": ids,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    load = asyncio.ensure_future(run_streams(MeasuredServer.from_url(served.url, []), "/v1/completions", streams, body))
    peak: dict[str, Memory] = {}
    while not load.done():
        for role, now in (await asyncio.to_thread(measure_memory, served.process)).items():
            before = peak.get(role, now)
            peak[role] = Memory(max(before.pss, now.pss), max(before.rss, now.rss))
        await asyncio.sleep(SAMPLE)
    load.result()
    return peak


def format_table(result: StartupResult) -> str:
    """Return the result as Markdown, with memory in MiB."""
    seconds = ", ".join(f"{took:.2f}" for took in result.seconds)
    lines = [
        f"ready after {seconds} s",
        "",
        "| MiB | PSS, ready | PSS, peak | RSS, peak |",
        "|---|---:|---:|---:|",
    ]
    for role, ready in result.ready.items():
        peak = result.peak[role]
        lines.append(f"| {role} | {ready.pss / 2**20:,.0f} | {peak.pss / 2**20:,.0f} | {peak.rss / 2**20:,.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
