"""Compares the latency of two versions of the code; `python -m tools.bench checkouts --help`.

Knows the servers of both versions over HTTP only.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table
from tools.peers.programs import ServerNeeds, ServerProgram, StartCommand, StartedServer, run_program

THIS_CHECKOUT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120.0  # for an answer
NOW, BEFORE = "now", "before"
WORDS = "the red cup of Ann stands on the table near the door and the dog sleeps "
TOKEN_IDS = list(range(20, 36))
CHAT = [{"role": ("user", "assistant")[i % 2], "content": WORDS} for i in range(31)]
TOKENS = 200  # tokens of a stream
BATCH = 8  # texts that are generated at once
STREAM: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}


@dataclass(frozen=True)
class CheckoutServer:
    """The running server of a checkout, with an HTTP client."""

    http: httpx.Client
    server: StartedServer
    model: str


Work = Callable[[CheckoutServer], float]  # measures once, and returns seconds


# ---------------------------------------------------------------- measurements
def time_request(path: str, body: dict[str, Any], repeat: int = 30) -> Work:
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
    before = server.server.cpu_seconds()
    for _ in range(3):
        measure_token_seconds(server)
    return (server.server.cpu_seconds() - before) / (3 * TOKENS)


WORKS: Mapping[str, Work] = {
    "completion of 1 token": time_request("/v1/completions", {"prompt": WORDS, "max_tokens": 1}),
    "the same of ids": time_request("/v1/completions", {"prompt": TOKEN_IDS, "max_tokens": 1}),
    "chat of 31 messages": time_request("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}),
    "tokenize": time_request("/tokenize", {"prompt": WORDS}),
    "token of a stream": measure_token_seconds,
    f"token of {BATCH} texts at once": measure_batch_seconds,
    "CPU time of a token": measure_cpu_seconds,
}


# ---------------------------------------------------------------- cases
def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", type=Path, required=True, help="the checkout to compare with")
    add("--only", nargs="*", default=[""], help="names of measurements, or parts of names (default: all)")
    add("flags", nargs="*", metavar="FLAG", help="flags of `kvmux serve`, after --")


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for each measurement; its variants are the servers of this checkout and of the base."""
    options = context.options
    set_up = partial(run_servers, {NOW: THIS_CHECKOUT, BEFORE: options.base.absolute()}, options.flags)
    for name, work in WORKS.items():
        if any(part in name for part in options.only):
            yield Case(
                name, Table("checkouts", base=NOW), partial(_measure, name, work), [NOW, BEFORE], set_up, warm_ups=1
            )


def _measure(name: str, work: Work, servers: Mapping[str, CheckoutServer], variant: str) -> Iterator[Reading]:
    yield Reading(Row(name, "ms"), 1e3 * work(servers[variant]))


@contextmanager
def run_servers(checkouts: Mapping[str, Path], flags: Sequence[str]) -> Iterator[Mapping[str, CheckoutServer]]:
    """Run `kvmux serve` from each checkout until the block ends. Raises RunError."""
    with ExitStack() as stack:
        servers = {}
        for name, folder in checkouts.items():
            server = stack.enter_context(run_program(make_program(folder, flags), ServerNeeds(1, 0)))
            http = stack.enter_context(httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS, trust_env=False))
            servers[name] = CheckoutServer(http, server, http.get("/v1/models").json()["data"][0]["id"])
        yield servers


def make_program(checkout: Path, flags: Sequence[str]) -> ServerProgram:
    """Return the server of a checkout."""

    def make_command(_: ServerNeeds, port: int) -> StartCommand:
        command = [sys.executable, "-m", "server", "serve", "--port", str(port), *flags]
        return StartCommand(command, folder=checkout)

    return ServerProgram("kvmux", checkout.name, "/ready", make_command)


GROUP = Group(
    """\
Serves the same model from two checkouts at once, this one and --base (a worktree of an earlier commit, with its kernels
built), and sends the same requests alternately to both, many times. Other load on the machine affects both, so the
median of the paired ratios is steadier than either figure.""",
    list_cases,
    add_arguments,
    Effort(20),
)
