"""Measures the time between tokens from outside: at the engine's socket, and over HTTP behind a whole server.

It cannot tell how the time divides among the parts of a step.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from config.errors import SettingsError
from config.settings import Settings
from server.engine.ipc.messages import SamplingParams, Submit, Tokens
from server.engine.ipc.socket_client import SocketClient
from server.processes.child_process import request_stop, run_child
from server.processes.heartbeat import EngineStatus, Heartbeat
from server.profiling.running import run_bench, run_server

ENGINE = "server.processes.engine:run"
POLL_INTERVAL = 0.01  # seconds between two checks whether the engine has sent Hello, its first message


def measure_at_socket(
    settings: Settings, kv_cache: str, sequences: Sequence[int], context: int, steps: int
) -> list[float]:
    """Return the median seconds between two tokens at an engine's socket, for each number of simultaneous sequences.

    Raises SettingsError if the engine does not start.
    """
    with _run_engine(settings) as path:
        return asyncio.run(_measure_token_gaps(path, kv_cache, sequences, context, steps))


@contextmanager
def _run_engine(settings: Settings) -> Iterator[str]:
    """Run an engine's process until the block ends; yield the path of its socket.

    Raises SettingsError if the engine does not start.
    """
    context = multiprocessing.get_context("spawn")
    status, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "engine")
        heartbeat = Heartbeat(context)
        status_pipe = EngineStatus(theirs, heartbeat)
        process = context.Process(target=run_child, args=(ENGINE, settings, path, heartbeat, status_pipe))
        process.start()
        theirs.close()
        try:
            report = _receive_status(status)
            if "error" in report:
                raise SettingsError(report["error"])
            yield path
        finally:
            request_stop(process)
            process.join()


def _receive_status(status: Any) -> Mapping[str, Any]:
    try:
        report: Mapping[str, Any] = status.recv()
    except EOFError:
        return {"error": "the engine did not start; its log tells why"}
    return report


async def _measure_token_gaps(
    path: str, kv_cache: str, sequences: Sequence[int], context: int, steps: int
) -> list[float]:
    async with SocketClient(path) as client:
        while client.hello is None:
            await asyncio.sleep(POLL_INTERVAL)
        vocab, random = client.hello.vocab_size, Random(0)
        sampling = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
        found = []
        for count in sequences:
            prompts = [random.choices(range(vocab), k=context) for _ in range(count)]
            submits = [Submit(f"{count}/{i}", prompt, sampling, kv_cache) for i, prompt in enumerate(prompts)]
            arrivals: defaultdict[str, list[float]] = defaultdict(list)
            async with client.stream(submits) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        arrivals[event.request_id].append(perf_counter())
            found.append(median(gap for times in arrivals.values() for gap in _compute_gaps(times)))
    return found


def _compute_gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def measure_over_http(
    flags: Sequence[str], kv_cache: str, sequences: Sequence[int], context: int, steps: int
) -> list[float]:
    """Return the median seconds between two tokens at an HTTP client, for each number of simultaneous sequences.

    The client sends its requests to `kvmux serve` with these flags. Raises RunError if either fails.
    """
    with run_server(flags) as server:
        return [
            run_bench(
                server.url,
                [
                    *("--strategies", kv_cache, "--rounds", "1", "--max-tokens", str(steps)),
                    *("--concurrency", str(count), "--requests", str(count), "--prompt-tokens", str(context)),
                ],
            )[0]["itl_ms"]["p50"]
            / 1e3
            for count in sequences
        ]
