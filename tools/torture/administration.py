"""An operator who clears, pins, unpins and changes shares of memory while clients are served.

Knows the routes of administration, and of clients only what they send.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from tools.torture.clients import Load
from tools.torture.exchange import Outcome
from tools.torture.requests import SALTS, TENANTS, RequestSpec, Sending
from tools.torture.server_process import ADMIN_TOKEN

INSTANCES = ("paged", "small_blocks", "int8", "contiguous", "sliding_window", "window")
PINNING = ("paged", "small_blocks")
HEADERS = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
LEGITIMATE = (404, 409)  # a pin whose time is over; no room, nothing to pin, a strategy without that order


async def operate(load: Load, draw: Random, url: str) -> Outcome | None:
    """Give one random order."""
    return await draw.choice(ORDERS)(load, draw, f"{url}/v1/kv_cache/", url)


Order = Callable[[Load, Random, str, str], Awaitable[Outcome | None]]


async def _inspect(load: Load, draw: Random, routes: str, _: str) -> Outcome:
    return (await _give(load, "inspect", "GET", routes + draw.choice(INSTANCES)))[0]


async def _clear(load: Load, draw: Random, routes: str, _: str) -> Outcome:
    body = draw.choice((None, _whose(draw), _whose(draw)))
    return (await _give(load, "clear", "POST", f"{routes}{draw.choice(INSTANCES)}/clear", body))[0]


async def _share(load: Load, draw: Random, routes: str, _: str) -> Outcome:
    body = draw.choice(({"limit": draw.choice(("55%", "75%", "100%"))}, {"floor": draw.choice(("0%", "5%", "10%"))}))
    return (await _give(load, "share", "PATCH", routes + draw.choice(INSTANCES), body))[0]


async def _pin(load: Load, draw: Random, routes: str, url: str) -> Outcome | None:
    """Pin a prompt as soon as it is computed, and remove half of the pins before their time is over."""
    instance, whose, spec = draw.choice(PINNING), _whose(draw), draw.choice(pinnable(load))
    salt = {"cache_salt": whose["cache_salt"]} if "cache_salt" in whose else {}
    outcome = await load.send(url, spec, Sending(instance, whose["api_key"], more=salt))
    load.checker.check(spec, outcome)
    if outcome.failure is not None:
        return outcome
    body = {"prompt": spec.body["prompt"], "ttl": draw.choice((0.05, 2.0, 60.0))} | whose
    outcome, pin = await _give(load, "pin", "POST", f"{routes}{instance}/pins", body)
    if pin and draw.random() < 0.5:
        await _give(load, "unpin", "DELETE", f"{routes}{instance}/pins/{pin['id']}")
    return outcome


ORDERS: tuple[Order, ...] = (_inspect, _clear, _share, _share, _pin, _pin, _pin)


def pinnable(load: Load) -> list[RequestSpec]:
    """Return the requests that any exact instance may serve and that have a single prompt."""
    specs = [spec for spec in load.specs if spec.family == "exact" and "prompt" in spec.body]
    return [spec for spec in specs if isinstance(spec.body["prompt"], str) or isinstance(spec.body["prompt"][0], int)]


def _whose(draw: Random) -> dict[str, str]:
    salt = draw.choice(SALTS)
    return {"api_key": draw.choice(TENANTS)} | ({"cache_salt": salt} if salt else {})


async def undo(load: Load, url: str) -> None:
    """Remove every pin, and set the shares of memory as at the start."""
    for instance in INSTANCES:
        route = f"{url}/v1/kv_cache/{instance}"
        _, found = await _give(load, "inspect", "GET", route)
        for pin in found.get("pins", ()):
            await _give(load, "unpin", "DELETE", f"{route}/pins/{pin['id']}")
        await _give(load, "share", "PATCH", route, {"floor": "0%", "limit": "100%"})


async def _give(load: Load, name: str, method: str, url: str, body: Any = None) -> tuple[Outcome, dict[str, Any]]:
    """Send an order and count it; return its outcome, and the answer if it was obeyed."""
    outcome, content = await load.exchange.call(method, url, content=body, headers=HEADERS)
    failure = outcome.failure
    if failure is None:
        load.checker.tally.count(f"orders: {name}")
    elif failure.status in LEGITIMATE:
        load.checker.tally.count(f"orders: {name}, refused")
        outcome.failure = None
    else:
        load.checker.failed(outcome, failure, f"{method} {url} {body}")
    return outcome, json.loads(content) if content else {}
