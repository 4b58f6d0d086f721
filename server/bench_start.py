"""`python -m server.bench_start`: how long `kvmux serve` takes until it is ready, and what memory its processes take.

Ready is the first 200 of /ready, counted from the start of the process. Memory is asked for then, and again and again
under a short load. PSS counts what processes share once, in parts, so that it may be summed up, as RSS may not. Linux
only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from server.bench_stream import ENGINE, Server, play

PAUSE = 0.01  # seconds between two questions whether it is ready
SAMPLE = 0.1  # seconds between two looks at the memory
HOST = "127.0.0.1"
FIRST_ID, IDS = 10, 256  # prompts are of these tokens, which every model has


class Memory(NamedTuple):
    """Bytes."""

    pss: int
    rss: int


class Result(NamedTuple):
    """Memory by process."""

    seconds: Sequence[float]  # until ready, of each start
    ready: Mapping[str, Memory]
    peak: Mapping[str, Memory]  # of each process by itself; of "all", of the sum


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m server.bench_start", description=__doc__)
    parser.add_argument("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    parser.add_argument("--rounds", type=int, default=5, help="starts; the last one is loaded")
    parser.add_argument("--streams", type=int, default=8, help="of the load, beside each other")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="more flags of `kvmux serve`, after --")
    options = parser.parse_args(arguments)
    if not Path("/proc/self/smaps_rollup").exists():
        parser.error("only where the system tells of shared memory in /proc/PID/smaps_rollup")
    if min(options.rounds, options.streams, options.prompt, options.tokens) < 1:
        parser.error("--rounds, --streams, --prompt and --tokens: from 1 on")
    if any(flag.startswith(("--port", "--host")) for flag in options.serve):
        parser.error("leave --host and --port out: they are chosen here")
    flags = ["--model", options.model, *options.serve]
    result = measure(flags, options.rounds, options.streams, options.prompt, options.tokens)
    print(json.dumps(result._asdict()) if options.json else table(result))


def measure(flags: Sequence[str], rounds: int, streams: int, prompt: int, tokens: int) -> Result:
    seconds = []
    for last in [False] * (rounds - 1) + [True]:
        with started(flags) as (process, port, took):
            seconds.append(took)
            if last:
                ready = memory(process)
                peak = asyncio.run(loaded(process, port, streams, prompt, tokens))
    return Result(seconds, ready, peak)


# ---------------------------------------------------------------- starting
@contextmanager
def started(flags: Sequence[str]) -> Iterator[tuple[psutil.Process, int, float]]:
    """A server that is ready: its first process, its port, and the seconds it took."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "server", "serve", "--host", HOST, "--port", str(port), *flags]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not is_ready(port):
            if process.poll() is not None:
                sys.exit("the server did not start; what it said is above")
            time.sleep(PAUSE)
        yield psutil.Process(process.pid), port, time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()


def is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://{HOST}:{port}/ready") as answer:
            return bool(answer.status == 200)
    except URLError:  # nobody listens yet, or 503
        return False


# ---------------------------------------------------------------- memory
def memory(supervisor: psutil.Process) -> dict[str, Memory]:
    """By what a process is for; "all" is the sum."""
    found: dict[str, Memory] = {}
    for process in (supervisor, *supervisor.children()):
        role = "supervisor" if process == supervisor else role_of(process)
        full = process.memory_full_info()
        before = found.get(role, Memory(0, 0))
        found[role] = Memory(before.pss + full.pss, before.rss + full.rss)
    return found | {"all": Memory(*(sum(column) for column in zip(*found.values(), strict=True)))}


def role_of(child: psutil.Process) -> str:
    if any("resource_tracker" in word for word in child.cmdline()):
        return "resource tracker"
    return "engine" if any(ENGINE in region.path for region in child.memory_maps()) else "API"


async def loaded(process: psutil.Process, port: int, streams: int, prompt: int, tokens: int) -> dict[str, Memory]:
    """The most that was seen while the streams ran."""
    with urlopen(f"http://{HOST}:{port}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    ids = [FIRST_ID + i % IDS for i in range(prompt)]
    body: dict[str, Any] = {"model": model, "prompt": ids, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    load = asyncio.ensure_future(play(Server(HOST, port, []), "/v1/completions", streams, body))
    peak: dict[str, Memory] = {}
    while not load.done():
        for role, now in (await asyncio.to_thread(memory, process)).items():
            before = peak.get(role, now)
            peak[role] = Memory(max(before.pss, now.pss), max(before.rss, now.rss))
        await asyncio.sleep(SAMPLE)
    load.result()
    return peak


def table(result: Result) -> str:
    """Markdown; memory in MiB."""
    seconds = ", ".join(f"{took:.2f}" for took in result.seconds)
    lines = [
        f"ready after {seconds} s",
        "",
        "| MiB | PSS, ready | PSS, at most | RSS, at most |",
        "|---|---:|---:|---:|",
    ]
    for role, ready in result.ready.items():
        peak = result.peak[role]
        lines.append(f"| {role} | {ready.pss / 2**20:,.0f} | {peak.pss / 2**20:,.0f} | {peak.rss / 2**20:,.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
