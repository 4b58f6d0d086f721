"""Measures several replicas on Ray Serve beside one server; `python -m tools.bench replicas --help`."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from itertools import cycle

import httpx

from server.version import get_version
from tools.bench.chats import TIMEOUT, ChatLoad, read_answers
from tools.bench.runner import Case, Context, Group, Reading, Table
from tools.peers.programs import ServerNeeds, ServerProgram, StartCommand, run_program
from tools.server_process import RunError

READY_TIMEOUT = 120.0  # seconds that replicas may take to become ready
SETTLE = 3.0  # seconds between two turns, in which replicas report and routers forget
COMMON = ("--threads", "1", "--max-num-seqs", "16", "--log-level", "warning", "--admin-token", "bench-token")
ADMIN = {"authorization": "Bearer bench-token"}
ROUTER, ROUND_ROBIN, ONE_SERVER = "router", "round robin", "one server"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--python", default=sys.executable, help="a Python that has kvmux[ray] (default: this one)")
    add("--replicas", type=int, default=4)
    add("--kv-mebibytes", type=int, default=24, help="KV memory of a replica (default: 24)")
    add("--tenants", type=int, default=8, help="whose chats share a system prompt (default: 8)")
    add("--chats", type=int, default=32)
    add("--chat-turns", type=int, default=6)
    add("--output-tokens", type=int, default=16)
    add("--pause", type=float, default=2.0, help="mean seconds between an answer and the next turn (default: 2)")
    add("--beginning-words", type=int, default=120, help="of the prompt that a tenant's chats share (default: 120)")
    add("--model", default="tiny", help="what kvmux serve --model takes (default: tiny)")
    new_seed = random.randrange(1 << 32)
    add("--seed", type=int, default=new_seed, help="of the chats' texts (default: another one each time)")


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for the replicas, by the router and by round robin in turn, and one for a single server."""
    options = context.options
    load = ChatLoad(**{each.name: getattr(options, each.name) for each in fields(ChatLoad)})
    context.notes.append(f"{options.replicas} replicas; {load}")
    table, model = Table("chats", base=ROUTER), ("--model", options.model)
    replicas = ("--replicas", str(options.replicas), "--kv-memory", f"{options.kv_mebibytes}MiB")
    several = partial(serve, options.python, "ray", "up", *replicas, *model)
    alone = partial(
        serve, sys.executable, "serve", "--kv-memory", f"{options.kv_mebibytes * options.replicas}MiB", *model
    )
    yield Case("replicas", table, partial(_measure, load), [ROUTER, ROUND_ROBIN], several)
    yield Case(ONE_SERVER, table, partial(_measure, load), [ONE_SERVER], alone, max_turns=1)


def _measure(load: ChatLoad, url: str, way: str) -> Iterator[Reading]:
    """Serve all chats from an empty cache."""
    clear(url)
    paths = cycle([f"/replicas/{each}" for each in list_replicas(url)] if way == ROUND_ROBIN else [""])
    yield from read_answers(asyncio.run(load.run(url, lambda: next(paths))))


@contextmanager
def serve(python: str, *arguments: str) -> Iterator[str]:
    """Run a command of kvmux until the block ends; yield its URL once it is ready, with all replicas if it has some."""

    def make_command(_: ServerNeeds, port: int) -> StartCommand:
        environment = {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.getcwd()}
        return StartCommand([python, "-m", "server", *arguments, "--port", str(port), *COMMON], environment)

    program = ServerProgram("kvmux", get_version(), "/ready", make_command)
    with run_program(program, ServerNeeds(16, 0)) as server:
        _wait_for_replicas(server.url, arguments)
        time.sleep(SETTLE)
        yield server.url


def _wait_for_replicas(url: str, arguments: Sequence[str]) -> None:
    wanted = int(arguments[arguments.index("--replicas") + 1]) if "--replicas" in arguments else 0
    deadline = time.monotonic() + READY_TIMEOUT
    while wanted and len(list_replicas(url)) < wanted:
        if time.monotonic() > deadline:
            raise RunError(f"{wanted} replicas did not become ready")
        time.sleep(0.2)


def list_replicas(url: str) -> list[str]:
    """Return the ids of the replicas that are ready."""
    return [each["id"] for each in httpx.get(f"{url}/v1/replicas").json()["data"] if each["ready"]]


def clear(url: str) -> None:
    """Remove all cached blocks, and wait until routers know it."""
    httpx.post(f"{url}/v1/kv_cache/paged/clear", headers=ADMIN, timeout=TIMEOUT).raise_for_status()
    time.sleep(SETTLE + 2.0)


GROUP = Group(
    """\
Chats of several tenants, served by the router, by round robin over the replicas, and by one server with as much KV
memory: prompt tokens computed, right expectations of the router, load by replica, time to the first token. Needs a
Python with kvmux[ray] (--python), and runs the servers and clusters itself.""",
    list_cases,
    add_arguments,
)
