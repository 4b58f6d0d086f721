"""The load: clients that compare answers, disconnect early, send malformed requests, poll, or operate the server.

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
    SALTS,
    TENANTS,
    RequestSpec,
    SendOptions,
    draw_send_options,
    make_fresh_spec,
)
from tools.torture.server_process import ADMIN_TOKEN, ServerProcess

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


# ---------------------------------------------------------------- the operator
ALL_INSTANCES = ("paged", "small_blocks", "int8", "contiguous", "sliding_window", "window")
PINNABLE_INSTANCES = ("paged", "small_blocks")
CALLS = ("inspect", "clear", "share", "share", "pin", "pin", "pin")  # each as often as it is called, relatively
SHARES = ({"limit": "55%"}, {"limit": "75%"}, {"limit": "100%"}, {"floor": "0%"}, {"floor": "5%"}, {"floor": "10%"})
ALLOWED_STATUSES = (404, 409)  # expired pin; no room, nothing to pin, or not supported by the strategy


async def send_random_admin_call(load: Load, draw: Random, url: str) -> Outcome:
    """Send one random admin request; return its outcome."""
    name, route = draw.choice(CALLS), f"{url}/v1/kv_cache/{draw.choice(ALL_INSTANCES)}"
    match name:
        case "inspect":
            return await _call_as_operator(load, name, "GET", route)
        case "clear":
            return await _call_as_operator(load, name, "POST", f"{route}/clear", draw.choice((None, _draw_owner(draw))))
        case "share":
            return await _call_as_operator(load, name, "PATCH", route, draw.choice(SHARES))
    return await _pin(load, draw, url)


async def _pin(load: Load, draw: Random, url: str) -> Outcome:
    """Compute a prompt and pin it; delete half of the pins before they expire."""
    instance, owner, spec = draw.choice(PINNABLE_INSTANCES), _draw_owner(draw), draw.choice(find_pinnable(load))
    salt = {"cache_salt": owner["cache_salt"]} if "cache_salt" in owner else {}
    outcome = await load.check_answer(url, spec, SendOptions(instance, owner["api_key"], extra_body=salt))
    if outcome.failure is not None:
        return outcome
    body = {"prompt": spec.body["prompt"], "ttl": draw.choice((0.05, 2.0, 60.0))} | owner
    route = f"{url}/v1/kv_cache/{instance}/pins"
    outcome = await _call_as_operator(load, "pin", "POST", route, body)
    if outcome.content and draw.random() < 0.5:
        await _call_as_operator(load, "unpin", "DELETE", f"{route}/{json.loads(outcome.content)['id']}")
    return outcome


def find_pinnable(load: Load) -> list[RequestSpec]:
    """Return the requests with a single prompt that every exact instance can serve."""
    specs = [spec for spec in load.specs if spec.family == "exact" and "prompt" in spec.body]
    return [spec for spec in specs if isinstance(spec.body["prompt"], str) or isinstance(spec.body["prompt"][0], int)]


def _draw_owner(draw: Random) -> dict[str, str]:
    salt = draw.choice(SALTS)
    return {"api_key": draw.choice(TENANTS)} | ({"cache_salt": salt} if salt else {})


async def reset_admin_state(load: Load, url: str) -> None:
    """Delete every pin, and restore the shares of memory of the start."""
    for instance in ALL_INSTANCES:
        route = f"{url}/v1/kv_cache/{instance}"
        state = json.loads((await _call_as_operator(load, "inspect", "GET", route)).content or "{}")
        for pin in state.get("pins", ()):
            await _call_as_operator(load, "unpin", "DELETE", f"{route}/pins/{pin['id']}")
        await _call_as_operator(load, "share", "PATCH", route, {"floor": "0%", "limit": "100%"})


async def _call_as_operator(load: Load, name: str, method: str, url: str, body: Any = None) -> Outcome:
    """Send an admin request and count it; return its outcome, which has the response body if it succeeded."""
    outcome = await call(load.http, method, url, body=body, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
    if (failure := outcome.failure) is None:
        load.checker.tally.counts[f"admin calls: {name}"] += 1
    elif failure.status in ALLOWED_STATUSES:
        load.checker.tally.counts[f"admin calls: {name}, refused"] += 1
        outcome.failure = None
    else:
        load.checker.record_failure(outcome, failure, f"{method} {url} {body}")
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
