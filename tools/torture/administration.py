"""Sends random admin requests while clients are served: clear, pin, unpin, and change shares of memory."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tools.torture.clients import Load
from tools.torture.exchange import Outcome, call
from tools.torture.requests import SALTS, TENANTS, RequestSpec, SendOptions
from tools.torture.server_process import ADMIN_TOKEN

INSTANCES = ("paged", "small_blocks", "int8", "contiguous", "sliding_window", "window")
PINNABLE_INSTANCES = ("paged", "small_blocks")
CALLS = ("inspect", "clear", "share", "share", "pin", "pin", "pin")  # each as often as it is called, relatively
SHARES = ({"limit": "55%"}, {"limit": "75%"}, {"limit": "100%"}, {"floor": "0%"}, {"floor": "5%"}, {"floor": "10%"})
ALLOWED_STATUSES = (404, 409)  # expired pin; no room, nothing to pin, or not supported by the strategy


async def send_random_admin_call(load: Load, draw: Random, url: str) -> Outcome:
    """Send one random admin request; return its outcome."""
    name, route = draw.choice(CALLS), f"{url}/v1/kv_cache/{draw.choice(INSTANCES)}"
    match name:
        case "inspect":
            return await _call(load, name, "GET", route)
        case "clear":
            return await _call(load, name, "POST", f"{route}/clear", draw.choice((None, _draw_owner(draw))))
        case "share":
            return await _call(load, name, "PATCH", route, draw.choice(SHARES))
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
    outcome = await _call(load, "pin", "POST", route, body)
    if outcome.content and draw.random() < 0.5:
        await _call(load, "unpin", "DELETE", f"{route}/{json.loads(outcome.content)['id']}")
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
    for instance in INSTANCES:
        route = f"{url}/v1/kv_cache/{instance}"
        state = json.loads((await _call(load, "inspect", "GET", route)).content or "{}")
        for pin in state.get("pins", ()):
            await _call(load, "unpin", "DELETE", f"{route}/pins/{pin['id']}")
        await _call(load, "share", "PATCH", route, {"floor": "0%", "limit": "100%"})


async def _call(load: Load, name: str, method: str, url: str, body: Any = None) -> Outcome:
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
