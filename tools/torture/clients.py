"""The load: clients that compare answers, disconnect early, send malformed requests, or poll.

Every client has its own random generator, and waits while no server is up. Knows no faults.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

from tools.torture.answers import find_difference
from tools.torture.checker import Checker
from tools.torture.exchange import MALFORMED_ERROR, HttpClient, Outcome
from tools.torture.requests import COMPLETIONS, TENANTS, RequestSpec, SendOptions, draw_send_options, make_fresh_spec
from tools.torture.server_process import ServerProcess

PATHS = ("/metrics", "/health", "/ready", "/version", "/v1/models", "/v1/kv_cache", "/v1/settings", "/openapi.json")
NOT_HTTP = (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"POST\r\n\r\n", b"\0" * 64)


@dataclass
class Load:
    """The state that all clients share; they send requests while `running` is set."""

    server: ServerProcess
    exchange: HttpClient
    checker: Checker
    specs: Sequence[RequestSpec]
    running: asyncio.Event = field(default_factory=asyncio.Event)
    on_outcome: Callable[[RequestSpec, Outcome], None] = lambda *_: None  # called after every generation request

    async def wait_for_url(self) -> str | None:
        """Wait until a server is up and return its URL; None if the load ends meanwhile."""
        while self.running.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self.server.up.wait()
                return self.server.url
        return None

    async def send(self, url: str, spec: RequestSpec, options: SendOptions) -> Outcome:
        outcome = await self.exchange.send(url, spec, options)
        self.on_outcome(spec, outcome)
        return outcome


ClientAction = Callable[[Load, Random, str], Awaitable[Outcome | None]]


async def run_client(load: Load, draw: Random, act: ClientAction, pause: float) -> None:
    """Call `act` repeatedly, with pauses of up to `pause` seconds, and 0.1 to 0.4 s after a failure."""
    while (url := await load.wait_for_url()) is not None:
        outcome = await act(load, draw, url)
        failed = outcome is not None and outcome.failure is not None
        await asyncio.sleep(draw.uniform(0.1, 0.4) if failed else draw.uniform(0, pause))


# ---------------------------------------------------------------- actions of clients
async def ask_and_compare(load: Load, draw: Random, url: str) -> Outcome:
    """Send a random request of the load with random send options, and check the answer."""
    spec = draw.choice(load.specs)
    outcome = await load.send(url, spec, draw_send_options(draw, spec))
    load.checker.check(spec, outcome)
    return outcome


async def poll(load: Load, draw: Random, url: str) -> Outcome:
    """Send a GET request to a random route that operators poll."""
    path = draw.choice(PATHS)
    outcome, _ = await load.exchange.call("GET", url + path, headers={"Authorization": f"Bearer {TENANTS[0]}"})
    load.checker.tally.count("polls")
    if outcome.failure is not None:
        load.checker.record_failure(outcome, outcome.failure, f"GET {path}")
    return outcome


async def probe_isolation(load: Load, draw: Random, url: str) -> Outcome:
    """Send a new prompt twice as one tenant, then as another: answers must be equal, and tenants share no cache."""
    spec = make_fresh_spec(draw, "a prompt of one tenant")
    tenant, other = draw.sample(TENANTS, 2)
    instance = draw.choice(("paged", "contiguous", "small_blocks"))
    answers = []
    for key in (tenant, tenant, other):
        outcome = await load.send(url, spec, SendOptions(instance, key))
        load.checker.tally.count("requests sent")
        if outcome.failure is not None:
            load.checker.record_failure(outcome, outcome.failure, "probe of isolation")
            return outcome
        answers.append(outcome.answer)
    load.checker.tally.count("probes of isolation")
    if answers[2].cached_tokens:
        load.checker.tally.add_problem(
            "leaks between tenants", f"{instance}: {answers[2].cached_tokens} cached tokens of another tenant"
        )
    if load.checker.exact and (
        wrong := find_difference(answers[0], answers[1]) or find_difference(answers[0], answers[2])
    ):
        load.checker.tally.add_problem("wrong answers", f"{spec.name} under {instance}: {wrong}")
    return outcome


@dataclass(frozen=True)
class Malformed:
    """A malformed request, and the status with which it must be refused."""

    status: int
    method: str = "POST"
    path: str = COMPLETIONS
    body: Any = None
    api_key: str = TENANTS[0]


VALID_BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 1}
MALFORMED = (
    Malformed(400, body={}),
    Malformed(400, body=[]),
    Malformed(400, body=VALID_BODY | {"max_tokens": -2}),
    Malformed(400, body=VALID_BODY | {"max_tokens": 10_000}),
    Malformed(400, body=VALID_BODY | {"temperature": True}),
    Malformed(400, body=VALID_BODY | {"unknown": 1}),
    Malformed(400, body=VALID_BODY | {"kv_cache": "nothing"}),
    Malformed(400, body=VALID_BODY | {"prompt": [10**9]}),
    Malformed(400, body=VALID_BODY | {"prompt": [[]]}),
    Malformed(400, body=VALID_BODY | {"n": 10**6}),
    Malformed(400, path="/v1/chat/completions", body={"model": "tiny", "messages": []}),
    Malformed(401, body=VALID_BODY, api_key="not-a-key-of-ours"),
    Malformed(401, method="GET", path="/v1/kv_cache/paged"),
    Malformed(404, body=VALID_BODY | {"model": "another"}),
    Malformed(404, path="/v1/nothing"),
    Malformed(405, method="DELETE"),
)


async def send_malformed(load: Load, draw: Random, url: str) -> Outcome | None:
    """Send a request that must be refused, and check its status and the shape of the error."""
    if draw.random() < 0.2:
        load.checker.tally.count("bytes that are not HTTP")
        await send_raw_bytes(url, draw.choice(NOT_HTTP))
        return None
    malformed = draw.choice(MALFORMED)
    headers = {"Authorization": f"Bearer {malformed.api_key}"}
    outcome, _ = await load.exchange.call(
        malformed.method, url + malformed.path, content=malformed.body, headers=headers
    )
    what = f"{malformed.method} {malformed.path} {json.dumps(malformed.body)[:200]}"
    if outcome.failure is None:
        load.checker.tally.add_problem("malformed requests that were answered", what)
    elif outcome.failure.status == malformed.status and outcome.failure.kind != MALFORMED_ERROR:
        load.checker.tally.count("malformed requests refused")
        return None
    else:
        load.checker.record_failure(outcome, outcome.failure, what)
    return outcome


async def send_raw_bytes(url: str, data: bytes) -> None:
    """Send bytes that are not HTTP, and read one byte of the answer if there is one."""
    address = urlsplit(url)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(data)
                await reader.read(1)  # after the beginning of a TLS hello the server waits: the timeout ends it
            finally:
                writer.close()


# ---------------------------------------------------------------- all of them
def start_clients(group: asyncio.TaskGroup, load: Load, seed: str, num_comparing: int, probe_pause: float) -> None:
    """Start the clients of a load; each draws from the seed and its own number.

    `probe_pause` limits the rate of new prompts: for each the server keeps the hashes of evicted blocks, up to 65,536
    of them, so that its memory grows for hours.
    """
    acts: list[tuple[ClientAction, float]] = [(ask_and_compare, 0.05)] * num_comparing
    acts += [(poll, 0.5), (probe_isolation, probe_pause), (send_malformed, 0.5)]
    for number, (act, pause) in enumerate(acts):
        group.create_task(run_client(load, Random(f"{seed} client {number}"), act, pause))
