"""Sends random admin requests while clients are served: clear, pin, unpin, and change shares of memory."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from tools.torture.clients import Load
from tools.torture.exchange import Outcome
from tools.torture.requests import SALTS, TENANTS, RequestSpec, SendOptions
from tools.torture.server_process import ADMIN_TOKEN

INSTANCES = ("paged", "small_blocks", "int8", "contiguous", "sliding_window", "window")
PINNABLE_INSTANCES = ("paged", "small_blocks")
HEADERS = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
ALLOWED_STATUSES = (404, 409)  # expired pin; no room, nothing to pin, or not supported by the strategy


async def send_random_admin_call(load: Load, draw: Random, url: str) -> Outcome | None:
    """Send one random admin request; return its outcome."""
    return await draw.choice(ADMIN_CALLS)(load, draw, f"{url}/v1/kv_cache/", url)


AdminCall = Callable[[Load, Random, str, str], Awaitable[Outcome | None]]


async def _inspect(load: Load, draw: Random, routes: str, _: str) -> Outcome:
    return (await _send_admin_call(load, "inspect", "GET", routes + draw.choice(INSTANCES)))[0]


async def _clear(load: Load, draw: Random, routes: str, _: str) -> Outcome:
    body = draw.choice((None, _draw_owner(draw), _draw_owner(draw)))
    return (await _send_admin_call(load, "clear", "POST", f"{routes}{draw.choice(INSTANCES)}/clear", body))[0]


async def _set_share(load: Load, draw: Random, routes: str, _: str) -> Outcome:
    body = draw.choice(({"limit": draw.choice(("55%", "75%", "100%"))}, {"floor": draw.choice(("0%", "5%", "10%"))}))
    return (await _send_admin_call(load, "share", "PATCH", routes + draw.choice(INSTANCES), body))[0]


async def _pin(load: Load, draw: Random, routes: str, url: str) -> Outcome | None:
    """Compute a prompt and pin it; delete half of the pins before they expire."""
    instance, owner, spec = draw.choice(PINNABLE_INSTANCES), _draw_owner(draw), draw.choice(find_pinnable(load))
    salt = {"cache_salt": owner["cache_salt"]} if "cache_salt" in owner else {}
    outcome = await load.send(url, spec, SendOptions(instance, owner["api_key"], extra_body=salt))
    load.checker.check(spec, outcome)
    if outcome.failure is not None:
        return outcome
    body = {"prompt": spec.body["prompt"], "ttl": draw.choice((0.05, 2.0, 60.0))} | owner
    outcome, pin = await _send_admin_call(load, "pin", "POST", f"{routes}{instance}/pins", body)
    if pin and draw.random() < 0.5:
        await _send_admin_call(load, "unpin", "DELETE", f"{routes}{instance}/pins/{pin['id']}")
    return outcome


ADMIN_CALLS: tuple[AdminCall, ...] = (_inspect, _clear, _set_share, _set_share, _pin, _pin, _pin)


def find_pinnable(load: Load) -> list[RequestSpec]:
    """Return the requests with a single prompt that every exact instance can serve."""
    specs = [spec for spec in load.specs if spec.family == "exact" and "prompt" in spec.body]
    return [spec for spec in specs if isinstance(spec.body["prompt"], str) or isinstance(spec.body["prompt"][0], int)]


def _draw_owner(draw: Random) -> dict[str, str]:
    salt = draw.choice(SALTS)
    return {"api_key": draw.choice(TENANTS)} | ({"cache_salt": salt} if salt else {})


async def reset_admin_state(load: Load, url: str) -> None:
    """Delete every pin, and restore the shares of memory of the start."""
    for instance in INSTANCES:
        route = f"{url}/v1/kv_cache/{instance}"
        _, state = await _send_admin_call(load, "inspect", "GET", route)
        for pin in state.get("pins", ()):
            await _send_admin_call(load, "unpin", "DELETE", f"{route}/pins/{pin['id']}")
        await _send_admin_call(load, "share", "PATCH", route, {"floor": "0%", "limit": "100%"})


async def _send_admin_call(
    load: Load, name: str, method: str, url: str, body: Any = None
) -> tuple[Outcome, dict[str, Any]]:
    """Send an admin request and count it; return its outcome, and the response body if it succeeded."""
    outcome, content = await load.exchange.call(method, url, content=body, headers=HEADERS)
    failure = outcome.failure
    if failure is None:
        load.checker.tally.count(f"admin calls: {name}")
    elif failure.status in ALLOWED_STATUSES:
        load.checker.tally.count(f"admin calls: {name}, refused")
        outcome.failure = None
    else:
        load.checker.record_failure(outcome, failure, f"{method} {url} {body}")
    return outcome, json.loads(content) if content else {}
