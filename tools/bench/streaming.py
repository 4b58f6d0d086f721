"""`python -m tools.bench.streaming`: measures the CPU time per streamed token outside the engine.

Starts `kvmux serve`, opens concurrent streams, and measures the CPU time of all its processes except the engine: they
read the engine's socket, detokenize, write JSON, and write to the clients' sockets. The lower bound is uvicorn with an
application that sends constant events of the same size at the same pace. The two alternate, so that other load on the
machine affects both.
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

import httpx
import psutil
from starlette.types import Receive, Scope, Send

from tools.server_process import RunError, RunningServer, run_server, sigterm_as_ctrl_c, start_process

ENGINE_LIBRARY = "libtorch_cpu"  # a library that only the engine's process loads
LISTEN_PATTERN = re.compile(r"running on (http://\S+)")
PROMPT = "Once upon a time"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}
EVENT = b"data: " + b"x" * 230 + b"\n\n"  # as long as a chunk with a word in it


class MeasuredServer(NamedTuple):
    """A running server whose CPU time is measured."""

    host: str
    port: int
    workers: Sequence[psutil.Process]  # all processes except the engine

    @classmethod
    def from_url(cls, url: str, workers: Sequence[psutil.Process]) -> MeasuredServer:
        address = httpx.URL(url)
        assert address.port is not None
        return cls(address.host, address.port, workers)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the workers so far."""
        return sum(times.user + times.system for times in (worker.cpu_times() for worker in self.workers))


class StreamingResult(NamedTuple):
    """The cost of streaming from one endpoint with a number of concurrent streams."""

    path: str
    streams: int
    microseconds: float  # CPU time per token outside the engine
    bare: float  # CPU time per event of uvicorn alone, in microseconds
    tokens_per_second: float  # of all streams together


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.streaming", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 16, 64), help="numbers of concurrent streams")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are summed up, after one warm-up")
    parser.add_argument("--body", type=json.loads, default={}, help="fields of every request: '{\"logprobs\": 1}'")
    parser.add_argument("--json", action="store_true", help="print one JSON line per figure instead of a table")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="flags of `kvmux serve`, after --")
    options = parser.parse_args(arguments)
    body = {"max_tokens": options.tokens, "stream": True, "ignore_eos": True} | options.body
    try:
        with sigterm_as_ctrl_c(), run_server(options.serve) as served, serving_bare() as bare:
            ours = MeasuredServer.from_url(served.url, [each for each in served.processes if not is_engine(each)])
            body = {"model": get_model_name(served)} | body
            results = [
                asyncio.run(measure(ours, bare, path, streams, options.rounds, BODIES[path] | body))
                for path in BODIES
                for streams in options.streams
            ]
    except RunError as error:
        sys.exit(str(error))
    print("\n".join(json.dumps(r._asdict()) for r in results) if options.json else format_table(results))


# ---------------------------------------------------------------- servers
def get_model_name(served: RunningServer) -> str:
    """Return the model's name for requests."""
    listed = httpx.get(f"{served.url}/v1/models", trust_env=False).json()
    return str(listed["data"][0]["id"])


def is_engine(process: psutil.Process) -> bool:
    return any(ENGINE_LIBRARY in region.path for region in process.memory_maps())


@contextmanager
def serving_bare() -> Iterator[MeasuredServer]:
    """Run uvicorn with `bare_app`, configured as in kvmux. Raises RunError."""
    flags = ["--port", "0", "--loop", "uvloop", "--http", "httptools", "--lifespan", "off", "--no-access-log"]
    command = [sys.executable, "-m", "uvicorn", "tools.bench.streaming:bare_app", *flags]
    with start_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        found = next((found for line in process.stdout if (found := LISTEN_PATTERN.search(line))), None)
        if found is None:
            raise RunError("uvicorn did not start")
        yield MeasuredServer.from_url(found[1], [psutil.Process(process.pid)])


async def bare_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Send `max_tokens` events, one every `pace` seconds; all streams send at the same moments, as after a step."""
    request = json.loads((await receive())["body"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    loop, pace = asyncio.get_running_loop(), request["pace"]
    first = loop.time() // pace + 1
    for step in range(request["max_tokens"]):
        await asyncio.sleep((first + step) * pace - loop.time())
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


# ---------------------------------------------------------------- measuring
async def measure(
    ours: MeasuredServer, bare: MeasuredServer, path: str, streams: int, rounds: int, request: dict[str, Any]
) -> StreamingResult:
    """Measure all rounds together, as CPU time is reported in steps of 10 ms, after one warm-up round."""
    tokens = request["max_tokens"]
    seconds, cpu, bare_cpu = 0.0, 0.0, 0.0
    for counted in [False] + [True] * rounds:
        elapsed, cpu_used = await run_streams(ours, path, streams, request)
        _, bare_used = await run_streams(bare, "/", streams, {"max_tokens": tokens, "pace": elapsed / tokens})
        if counted:
            seconds, cpu, bare_cpu = seconds + elapsed, cpu + cpu_used, bare_cpu + bare_used
    total = rounds * streams * tokens
    return StreamingResult(path, streams, cpu / total * 1e6, bare_cpu / total * 1e6, total / seconds)


async def run_streams(server: MeasuredServer, path: str, streams: int, request: dict[str, Any]) -> tuple[float, float]:
    """Run the streams; return their elapsed seconds and the server's seconds of CPU time."""
    start, before = time.perf_counter(), server.cpu_seconds()
    await asyncio.gather(*(read_stream(server, path, request) for _ in range(streams)))
    return time.perf_counter() - start, server.cpu_seconds() - before


async def read_stream(server: MeasuredServer, path: str, request: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    content = json.dumps(request).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    answer = await reader.read()
    if b"data: [DONE]" not in answer or b'"error"' in answer:
        sys.exit(f"the stream failed: {answer[:500].decode()}")
    writer.close()


def format_table(results: Sequence[StreamingResult]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| endpoint | streams | µs of CPU a token | uvicorn alone | tokens/s |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {r.path} | {r.streams} | {r.microseconds:.0f} | {r.bare:.0f} | {r.tokens_per_second:,.0f} |"
        for r in results
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
