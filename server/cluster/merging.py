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
    Command,
    DescribePage,
    DropPrefix,
    Hello,
    PinCachedPrefix,
    PinPrefix,
    Profile,
    Question,
)
from server.metrics.merging import merge_snapshots


def merge_hellos(hellos: Sequence[Hello]) -> Hello | None:
    """Return what replicas serve together: that of the first, with the instances of all; None without any."""
    if not hellos:
        return None
    strategies = {each.name: each for hello in reversed(hellos) for each in hello.strategies}
    return msgspec.structs.replace(hellos[0], strategies=list(strategies.values()))


def asks_one_replica(what: Question | Command | Profile) -> bool:
    """Return whether only one replica is asked, as answers of several cannot be merged."""
    return isinstance(what, DescribePage | Profile) or what in ("live", "prefixes", "settings", "routing")


def merge_answers(what: Question | Command | Profile, answers: Sequence[ReplicaAnswer]) -> Answer:
    """Return one answer of several; the first refusal if all have refused."""
    good = sorted((each for each in answers if each.answer.error is None), key=lambda each: each.replica)
    if not good:
        return answers[0].answer
    created_at = monotonic()  # the clocks of other machines are others
    if what == "metrics":
        return Answer(0, merge_snapshots({each.replica: each.answer.body for each in good}), created_at=created_at)
    bodies = {each.replica: msgspec.json.decode(each.answer.body) for each in good}
    match what:
        case "rollouts":
            body = _merge_rollouts(bodies)
        case str():
            body = _merge_lists(bodies)
        case _:
            body = _merge_results(what, bodies, answers)
    return Answer(0, msgspec.json.encode(body), created_at=created_at)


def _merge_lists(bodies: dict[str, Any]) -> dict[str, Any]:
    """Return one list with the items of all, each with its replica; numbers of `memory` are added up."""
    first: dict[str, Any] = next(iter(bodies.values()))
    merged: dict[str, Any] = first | {
        "data": [{**item, "replica": id} for id, body in bodies.items() for item in body["data"]]
    }
    if "memory" in first:
        merged["memory"] = {name: sum(body["memory"][name] for body in bodies.values()) for name in first["memory"]}
    return merged


def _merge_rollouts(bodies: dict[str, Any]) -> dict[str, Any]:
    """Return each roll-out once, as the first replica has it, with those of all replicas under `replicas`."""
    by_name: dict[str, dict[str, Any]] = {}
    for id, body in bodies.items():
        for rollout in body["data"]:
            by_name.setdefault(rollout["name"], {})[id] = rollout
    data = [{**next(iter(each.values())), "replicas": each} for each in by_name.values()]
    return {"object": "list", "data": data}


def _merge_results(
    command: Question | Command | Profile, bodies: dict[str, Any], answers: Sequence[ReplicaAnswer]
) -> dict[str, Any]:
    """Return a command's answer, with those of all replicas under `replicas`, errors included."""
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
    """Return the replicas, and the pins' ids there, of a pin's id in a merged answer; what is none is left out."""
    parts = (each.partition(":") for each in pin_id.split(","))
    return [(replica, own) for replica, colon, own in parts if colon]
