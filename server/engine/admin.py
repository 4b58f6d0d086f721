"""Runs operators' commands on a running engine: on a cache, a prefix, or a share of the memory.

Knows the core and the optional protocols of a cache; neither sockets nor HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from cache_strategies.errors import StrategyError
from cache_strategies.features import Clearing, Inspectable, Pinning, PrefixListing
from cache_strategies.types import Pin, PinError, Salt, SaltScope
from config.sizes import share_to_bytes
from server.engine.build import Engine
from server.engine.core import Core
from server.engine.info import describe_share, describe_tokens
from server.engine.instance import Instance
from server.engine.instance_reports import count_tokens, read_usage
from server.engine.ipc.messages import (
    Abort,
    Clear,
    Command,
    DescribeBlock,
    DropPrefix,
    Failed,
    Inspect,
    PinCachedPrefix,
    PinPrefix,
    Share,
    Unpin,
)
from server.engine.live.blocks import describe_block
from server.engine.scheduling.request import RequestError

Bytes = Annotated[int, msgspec.Meta(ge=0)]
# The optional feature that each command needs, as error messages name it
FEATURES = {
    Clear: "clearing",
    PinPrefix: "pins",
    Unpin: "pins",
    PinCachedPrefix: "listing prefixes",
    DropPrefix: "listing prefixes",
}


def run_command(engine: Engine, command: Command) -> dict[str, Any]:
    """Run an operator's command and return the answer, a JSON object.

    Raises RequestError if the instance is unknown, does not support the command or cannot follow it now.
    """
    core = engine.core
    match command:
        case Abort(worker, request_id):
            return _abort(core, worker, request_id)
        case DescribeBlock(name, region, block):
            return describe_block(core, name, region, block)
    try:
        return _run_command(core, command)
    except StrategyError as error:
        raise RequestError(500, str(error), code="strategy_failed") from error


def _abort(core: Core, worker: int, request_id: str) -> dict[str, Any]:
    # Not a status after which clients try again
    error = Failed(request_id, 410, "the request was ended by an operator of the server", "ended_by_operator")
    if not core.cancel(worker, request_id, error=error):
        raise RequestError(404, f"there is no request {request_id!r}: it may have ended", code="not_found")
    return {"id": request_id, "deleted": True}


def _run_command(
    core: Core, command: Inspect | Clear | PinPrefix | PinCachedPrefix | DropPrefix | Unpin | Share
) -> dict[str, Any]:
    instance = core.instances.get(command.instance)
    if instance is None:
        names = ", ".join(core.instances)
        raise RequestError(404, f"there is no cache strategy {command.instance!r}; there are {names}", code="not_found")
    match command:
        case Inspect():
            return _inspect(core, instance)
        case Share(_, floor, limit):
            return _set_share(core, instance, floor, limit)
        case Clear(_, tenant, cache_salt) if isinstance(instance.cache, Clearing):
            freed = instance.call("clear", SaltScope(tenant, cache_salt), kind=Bytes)
            core.scheduler.mark_room_changed()
            return {"freed_bytes": freed}
        case PinPrefix(_, tokens, ttl, tenant, cache_salt) if isinstance(instance.strategy, Pinning):
            return _pin(instance, "pin", tokens, salt=Salt(tenant, cache_salt), ttl=ttl)
        case PinCachedPrefix(_, prefix_id, ttl) if isinstance(instance.strategy, PrefixListing):
            return _pin(instance, "pin_prefix", prefix_id, ttl=ttl)
        case DropPrefix(_, prefix_id) if isinstance(instance.strategy, PrefixListing):
            answer = _drop_prefix(instance, prefix_id)
            core.scheduler.mark_room_changed()
            return answer
        case Unpin(_, pin_id) if isinstance(instance.strategy, Pinning):
            answer = _unpin(instance, pin_id)
            core.scheduler.mark_room_changed()
            return answer
    message = f"strategy {instance.name!r} does not support {FEATURES[type(command)]}"
    raise RequestError(409, message, code="not_supported")


def _pin(instance: Instance, method: str, what: Sequence[int] | str, **options: Any) -> dict[str, Any]:
    try:
        return _format_pin(instance.call(method, what, kind=Pin, **options))
    except PinError as error:
        raise RequestError(409, str(error), code="cannot_pin") from None


def _drop_prefix(instance: Instance, prefix_id: str) -> dict[str, Any]:
    freed = instance.call("drop_prefix", prefix_id, kind=Bytes | None)
    if freed is None:
        raise RequestError(404, f"there is no cached prefix {prefix_id!r}: it may have been evicted", code="not_found")
    return {"id": prefix_id, "freed_bytes": freed}


def _unpin(instance: Instance, pin_id: str) -> dict[str, Any]:
    if not instance.call("unpin", pin_id, kind=bool):
        raise RequestError(404, f"there is no pin {pin_id!r}: it may have expired", code="not_found")
    return {"id": pin_id, "deleted": True}


def _inspect(core: Core, instance: Instance) -> dict[str, Any]:
    answer: dict[str, Any] = {"name": instance.name, **describe_share(core.memory, instance.name)}
    answer["usage"] = read_usage(instance)._asdict()
    answer["requests"] = [
        {
            "id": request.key[1],
            "state": "waiting" if request.sequence is None else "running",
            "prompt_tokens": request.num_prompt_tokens,
            "generated_tokens": request.num_output_tokens,
            "cached_tokens": request.num_cached_tokens,
            "preemptions": request.num_preemptions,
            **describe_tokens(
                count_tokens(instance, [] if request.sequence is None else [request.num_computed_tokens])
            ),
        }
        for request in (*core.scheduler.running, *core.scheduler.waiting)
        if request.instance is instance
    ]
    if instance.is_suspended:
        return answer
    if isinstance(instance.strategy, Inspectable):
        answer |= instance.call("inspect", kind=dict[str, Any])
    if isinstance(instance.strategy, Pinning):
        answer["pins"] = [_format_pin(pin) for pin in instance.call("pins", kind=list[Pin])]
    return answer


def _format_pin(pin: Pin) -> dict[str, Any]:
    left = max(0.0, pin.expires - time.monotonic())
    return {"id": pin.id, "tokens": pin.num_tokens, "bytes": pin.num_bytes, "ttl": round(left, 3)}


def _set_share(core: Core, instance: Instance, floor: str | None, limit: str | None) -> dict[str, Any]:
    total = core.memory.planned_bytes
    new_floor, new_limit = (
        old if new is None else min(share_to_bytes(new, total), total)
        for old, new in zip(core.memory.get_share(instance.name), (floor, limit), strict=True)
    )
    core.shares.set_share(instance.name, floor=new_floor, limit=new_limit)
    return _inspect(core, instance)
