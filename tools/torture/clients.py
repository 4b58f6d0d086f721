"""The load: clients that compare answers, disconnect early, send malformed requests, or poll.

Every client has its own random generator. Knows no faults.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import httpx

from tools.torture.answers import find_difference
from tools.torture.checker import Checker
from tools.torture.exchange import MALFORMED_ERROR, Outcome, call, generate
from tools.torture.requests import (
    CHATS,
    COMPLETIONS,
    TENANTS,
    RequestSpec,
    SendOptions,
    draw_send_options,
    make_fresh_spec,
)
from tools.torture.server_process import ServerProcess

NUM_COMPARING = 8  # clients that compare answers
PATHS = ("/metrics", "/health", "/ready", "/version", "/v1/models", "/v1/kv_cache", "/v1/settings", "/openapi.json")


@dataclass
class Load:
    """The state that all clients share; they send requests while `running` is set."""

    server: ServerProcess
    http: httpx.AsyncClient
    checker: Checker
    specs: Sequence[RequestSpec]
    running: asyncio.Event = field(default_factory=asyncio.Event)

    async def check_answer(self, url: str, spec: RequestSpec, options: SendOptions) -> Outcome:
        """Send a request of the load, and check its answer."""
        outcome = await generate(self.http, url, spec, options)
        self.checker.check(spec, outcome)
        return outcome


ClientAction = Callable[[Load, Random, str], Awaitable[Outcome | None]]


async def run_client(load: Load, draw: Random, act: ClientAction, pause: float) -> None:
    """Call `act` repeatedly, with pauses of up to `pause` seconds, and 0.1 to 0.4 s after a failure."""
    while load.running.is_set():
        outcome = await act(load, draw, load.server.url)
        failed = outcome is not None and outcome.failure is not None
        await asyncio.sleep(draw.uniform(0.1, 0.4) if failed else draw.uniform(0, pause))


# ---------------------------------------------------------------- actions of clients
async def ask_and_compare(load: Load, draw: Random, url: str) -> Outcome:
    """Send a random request of the load with random send options, and check the answer."""
    spec = draw.choice(load.specs)
    return await load.check_answer(url, spec, draw_send_options(draw, spec))


async def poll(load: Load, draw: Random, url: str) -> Outcome:
    """Send a GET request to a random route that operators poll."""
    path = draw.choice(PATHS)
    outcome = await call(load.http, "GET", url + path, headers={"Authorization": f"Bearer {TENANTS[0]}"})
    load.checker.tally.counts["polls"] += 1
    if outcome.failure is not None:
        load.checker.record_failure(outcome, outcome.failure, f"GET {path}")
    return outcome


async def probe_isolation(load: Load, draw: Random, url: str) -> Outcome:
    """Send a new prompt twice as one tenant, then as another: answers must be equal, and tenants share no cache."""
    spec, tally = make_fresh_spec(draw, "a prompt of one tenant"), load.checker.tally
    tenant, other = draw.sample(TENANTS, 2)
    instance = draw.choice(("paged", "contiguous", "small_blocks"))
    answers = []
    for key in (tenant, tenant, other):
        outcome = await generate(load.http, url, spec, SendOptions(instance, key))
        tally.counts["requests sent"] += 1
        if outcome.failure is not None:
            load.checker.record_failure(outcome, outcome.failure, "probe of isolation")
            return outcome
        answers.append(outcome.answer)
    tally.counts["probes of isolation"] += 1
    if cached := answers[2].cached_tokens:
        tally.add_problem("leaks between tenants", f"{instance}: {cached} cached tokens of another tenant")
    for answer in answers[1:]:
        if wrong := find_difference(answers[0], answer):
            tally.add_problem("wrong answers", f"{spec.name} under {instance}: {wrong}")
    return outcome


class Malformed(NamedTuple):
    """A malformed request, and the status with which it must be refused."""

    status: int
    body: Any = None
    method: str = "POST"
    path: str = COMPLETIONS
    api_key: str = TENANTS[0]


VALID_BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 1}
WRONG_FIELDS: Sequence[dict[str, Any]] = (
    {"max_tokens": 10_000},
    {"temperature": True},
    {"kv_cache": "nothing"},
    {"prompt": [10**9]},
)
MALFORMED = (
    Malformed(400, {}),
    *(Malformed(400, VALID_BODY | wrong) for wrong in WRONG_FIELDS),
    Malformed(400, {"model": "tiny", "messages": []}, path=CHATS),
    Malformed(401, VALID_BODY, api_key="not-a-key-of-ours"),
    Malformed(401, method="GET", path="/v1/kv_cache/paged"),
    Malformed(404, VALID_BODY | {"model": "another"}),
    Malformed(404, path="/v1/nothing"),
    Malformed(405, method="DELETE"),
)


async def send_malformed(load: Load, draw: Random, url: str) -> Outcome | None:
    """Send a request that must be refused, and check its status and the shape of the error."""
    tally = load.checker.tally
    wrong = draw.choice(MALFORMED)
    headers = {"Authorization": f"Bearer {wrong.api_key}"}
    outcome = await call(load.http, wrong.method, url + wrong.path, body=wrong.body, headers=headers)
    what = f"{wrong.method} {wrong.path} {json.dumps(wrong.body)[:200]}"
    if outcome.failure is None:
        tally.add_problem("malformed requests that were answered", what)
    elif outcome.failure.status == wrong.status and outcome.failure.kind != MALFORMED_ERROR:
        tally.counts["malformed requests refused"] += 1
        return None
    else:
        load.checker.record_failure(outcome, outcome.failure, what)
    return outcome


# ---------------------------------------------------------------- all of them
def start_clients(group: asyncio.TaskGroup, load: Load, seed: str, probe_pause: float) -> None:
    """Start the clients of a load; each draws from the seed and its own number.

    `probe_pause` limits the rate of new prompts: for each the server keeps the hashes of evicted blocks, up to 65,536
    of them, so that its memory grows for hours.
    """
    acts: list[tuple[ClientAction, float]] = [(ask_and_compare, 0.05)] * NUM_COMPARING
    acts += [(poll, 0.5), (probe_isolation, probe_pause), (send_malformed, 0.5)]
    for number, (act, pause) in enumerate(acts):
        group.create_task(run_client(load, Random(f"{seed} client {number}"), act, pause))
