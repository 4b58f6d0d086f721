"""Merges what replicas answer to the same question or command into one answer, in which each part names its replica.

Knows the shapes of answers (docs/reference/api.md), neither Ray nor the cluster's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import msgspec

from server.cluster.messages import ReplicaAnswer
from server.engine.ipc.messages import (
    Answer,
    Clear,
    DescribeBlock,
    DropPrefix,
    Hello,
    PinCachedPrefix,
    PinPrefix,
    Profile,
    QueryPayload,
)
from server.metrics.merging import merge_snapshots


def merge_hellos(hellos: Sequence[Hello]) -> Hello | None:
    """Return the first replica's Hello with the strategy instances of all replicas; None if there are none."""
    if not hellos:
        return None
    strategies = {each.name: each for hello in reversed(hellos) for each in hello.strategies}
    return msgspec.structs.replace(hellos[0], strategies=list(strategies.values()))


def asks_one_replica(what: QueryPayload) -> bool:
    """Return whether one replica answers alone, as answers of several cannot be merged."""
    return isinstance(what, DescribeBlock | Profile) or what in ("live", "prefixes", "settings", "routing")


def merge_answers(what: QueryPayload, answers: Sequence[ReplicaAnswer]) -> Answer:
    """Merge the answers of several replicas; if all have refused, return the first refusal."""
    accepted = sorted((each for each in answers if each.answer.error is None), key=lambda each: each.replica)
    if not accepted:
        return answers[0].answer
    created_at = monotonic()  # by this machine's clock, which differs from those of the replicas
    if what == "metrics":
        return Answer(0, merge_snapshots({each.replica: each.answer.body for each in accepted}), created_at=created_at)
    bodies = {each.replica: msgspec.json.decode(each.answer.body) for each in accepted}
    match what:
        case "rollouts":
            body = _merge_rollouts(bodies)
        case str():
            body = _merge_lists(bodies)
        case _:
            body = _merge_results(what, bodies, answers)
    return Answer(0, msgspec.json.encode(body), created_at=created_at)


def _merge_lists(bodies: dict[str, Any]) -> dict[str, Any]:
    """Return one list of the items of all replicas, each with its replica's id; add up the numbers of `memory`."""
    first: dict[str, Any] = next(iter(bodies.values()))
    merged: dict[str, Any] = first | {
        "data": [{**item, "replica": id} for id, body in bodies.items() for item in body["data"]]
    }
    if "memory" in first:
        merged["memory"] = {name: sum(body["memory"][name] for body in bodies.values()) for name in first["memory"]}
    return merged


def _merge_rollouts(bodies: dict[str, Any]) -> dict[str, Any]:
    """Return each roll-out once, as the first replica describes it, with all descriptions under `replicas`."""
    by_name: dict[str, dict[str, Any]] = {}
    for id, body in bodies.items():
        for rollout in body["data"]:
            by_name.setdefault(rollout["name"], {})[id] = rollout
    data = [{**next(iter(each.values())), "replicas": each} for each in by_name.values()]
    return {"object": "list", "data": data}


def _merge_results(command: QueryPayload, bodies: dict[str, Any], answers: Sequence[ReplicaAnswer]) -> dict[str, Any]:
    """Return the first replica's result of a command, with all results and errors under `replicas`."""
    errors = {
        each.replica: {"error": {"message": each.answer.error.message, "code": each.answer.error.code}}
        for each in answers
        if each.answer.error is not None
    }
    first: dict[str, Any] = next(iter(bodies.values()))
    merged: dict[str, Any] = {"replicas": bodies | errors}
    if isinstance(command, Clear | DropPrefix):
        merged["freed_bytes"] = sum(body["freed_bytes"] for body in bodies.values())
    if isinstance(command, PinPrefix | PinCachedPrefix):
        merged["id"] = ",".join(f"{replica}:{body['id']}" for replica, body in bodies.items())
    return first | merged


def split_pin_id(pin_id: str) -> list[tuple[str, str]]:
    """Return the replicas that a merged pin's id names, with the pin's id in each; leave out parts of another form."""
    parts = (each.partition(":") for each in pin_id.split(","))
    return [(replica, own) for replica, colon, own in parts if colon]
