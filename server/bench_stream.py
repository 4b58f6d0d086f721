"""`python -m server.bench_stream`: CPU time per streamed token outside the engine.

Starts `kvmux serve`, opens streams beside each other, and looks at the CPU time of the server's processes but for the
engine's: they read the engine's socket, make text of tokens and JSON of text, and write to the clients' sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil

ENGINE = "libtorch_cpu"  # the library that only the engine's process has in its memory
READY = re.compile(r"serves (\S+) on http://([^:/\s]+):(\d+)")
PROMPT = "Once upon a time"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


class Server(NamedTuple):
    """A server that is ready."""

    model: str
    host: str
    port: int
    workers: list[psutil.Process]  # all processes but the engine's

    def seconds(self) -> float:
        """CPU time of the workers so far."""
        return sum(times.user + times.system for times in (worker.cpu_times() for worker in self.workers))


class Result(NamedTuple):
    """What `streams` at once cost."""

    path: str
    streams: int
    microseconds: float  # CPU time outside the engine for each token
    tokens_per_second: float  # of all streams together


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m server.bench_stream", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 16, 64), help="opened beside each other")
    parser.add_argument("--tokens", type=int, default=512, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="summed up, after one that warms")
    parser.add_argument("--body", type=json.loads, default={}, help="JSON for every request: '{\"logprobs\": 1}'")
    parser.add_argument("--json", action="store_true", help="one JSON line a figure instead of a table")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="flags of `kvmux serve`, after --")
    options = parser.parse_args(arguments)
    with serving(options.serve) as server:
        results = [
            asyncio.run(measure(server, path, streams, options.tokens, options.rounds, options.body))
            for path in BODIES
            for streams in options.streams
        ]
    print("\n".join(json.dumps(r._asdict()) for r in results) if options.json else table(results))


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[Server]:
    """`kvmux serve` with these flags on a free port."""
    command = [sys.executable, "-m", "server", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = next((found for line in process.stdout if (found := READY.search(line))), None)
        if found is None:
            sys.exit("the server did not start")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        await_ready(f"http://{found[2]}:{found[3]}/ready")
        workers = [p for p in family if not any(ENGINE in region.path for region in p.memory_maps())]
        yield Server(found[1], found[2], int(found[3]), workers)
    finally:
        process.terminate()
        process.wait()


def await_ready(url: str) -> None:
    """The server says that it serves a little before all of its processes know of each other."""
    while True:
        try:
            urlopen(url).close()
            return
        except HTTPError:
            time.sleep(0.05)


async def measure(server: Server, path: str, streams: int, tokens: int, rounds: int, body: dict[str, Any]) -> Result:
    """All rounds together, after one that is not counted: CPU time is told in hundredths of a second."""
    request = BODIES[path] | {"model": server.model, "max_tokens": tokens, "stream": True, "ignore_eos": True} | body

    async def play() -> None:
        await asyncio.gather(*(read_stream(server, path, request) for _ in range(streams)))

    await play()
    began, before = time.perf_counter(), server.seconds()
    for _ in range(rounds):
        await play()
    seconds, cpu = time.perf_counter() - began, server.seconds() - before
    total = rounds * streams * tokens
    return Result(path, streams, cpu / total * 1e6, total / seconds)


async def read_stream(server: Server, path: str, request: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    content = json.dumps(request).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    answer = await reader.read()
    if b"\ndata: [DONE]" not in answer or b'"error"' in answer:
        sys.exit(f"the server said: {answer[:500].decode()}")
    writer.close()


def table(results: Sequence[Result]) -> str:
    """Markdown."""
    lines = ["| endpoint | streams | µs of CPU a token | tokens/s |", "|---|---:|---:|---:|"]
    lines += [f"| {r.path} | {r.streams} | {r.microseconds:.1f} | {r.tokens_per_second:,.0f} |" for r in results]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
