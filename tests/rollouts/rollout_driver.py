"""Drives roll-outs without an engine: sends them requests and results, on a clock that the test moves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from config.settings import Settings
from server.engine.ipc.messages import SamplingParams, Submit
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.selection import InstanceChoice, Selector
from server.records import Outcome, RequestFidelity, RequestRecord
from server.rollouts.rollouts import Rollouts
from server.rollouts.store import RolloutStore

INSTANCES = {
    "small": {"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"},
    "window": {"kind": "sliding_window", "window": 64},
}
GOOD_KL, BAD_KL = 0.001, 0.8  # nats, in the mean


NUMBERS = itertools.count()


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_fidelity(
    kl: Sequence[float], *, served: str = "paged", candidate: str = "small", agreed: float = 1.0, **more: Any
) -> RequestFidelity:
    """Return a comparison of a request; `agreed`: share of its tokens with the same likeliest token."""
    same = [i < round(agreed * len(kl)) for i in range(len(kl))]
    values: dict[str, Any] = {
        "rollout": "r",
        "rank": [1] * len(kl),
        "served_bytes": 200,
        "candidate_bytes": 120,
    } | more
    return RequestFidelity(served=served, candidate=candidate, kl=list(kl), agreed=same, **values)


def make_record(
    instance: str, *, rollout: str | None, reason: str = "default", outcome: Outcome = "length", **times: Any
) -> RequestRecord:
    """Return the record of a request that has ended, of a conversation of its own."""
    values: dict[str, Any] = {
        "conversation": f"conversation {next(NUMBERS)}",
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "miss": None,
        "forked": False,
        "generated_tokens": 11,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "preemptions": 0,
        "kv_bytes": 1,
        "kept_tokens": 1,
        "dropped_tokens": 0,
        "budget_tokens": None,
        "compactions": 0,
        "compaction_seconds": 0.0,
        "queue_seconds": 0.0,
        "prefill_seconds": 0.01,
        "decode_seconds": 0.1,
        "first_token_seconds": 0.01,
        "total_seconds": 0.2,
    }
    return RequestRecord(instance=instance, reason=reason, outcome=outcome, rollout=rollout, **(values | times))


class FakeInstances:
    """Instances of which functions say whether they get requests, and can hold one. They have no fallbacks."""

    def __init__(self, usable: Callable[[str], bool], has_room: Callable[[str], bool]) -> None:
        self._usable, self._has_room = usable, has_room

    def is_usable(self, name: str) -> bool:
        return self._usable(name)

    def check_admission(self, name: str) -> None:
        if not self._usable(name):
            raise RequestError(503, f"{name} gets no requests")

    def has_room(self, name: str, num_prompt_tokens: int, max_tokens: int) -> bool:
        return self._has_room(name)

    def list_fallbacks(self, name: str) -> Sequence[str]:
        return ()


class RolloutDriver:
    """The roll-outs of a server that stands still, with an endless supply of requests."""

    def __init__(
        self,
        rng: random.Random,
        rollouts: Mapping[str, Any] | None = None,
        file: Path | None = None,
        *,
        clock: Callable[[], float] | None = None,
        **settings: Any,
    ) -> None:
        """Start with the roll-outs of settings; `clock` measures stages, by default the driver's own."""
        self.clock = Clock()
        self.rng = rng
        given: dict[str, Any] = {"strategies": INSTANCES, "rollouts": rollouts or {}, "default_strategy": "paged"}
        self.settings = Settings(model="tiny", **(given | settings))
        self.rollouts = Rollouts(self.settings, RolloutStore(file), clock or self.clock, self.clock)
        self.rollouts.restore()
        self._number = 0

    def choose(
        self,
        user: str = "",
        *,
        prompt_tokens: int = 1,
        usable: Callable[[str], bool] = lambda _: True,
        has_room: Callable[[str], bool] = lambda _: True,
        **more: Any,
    ) -> InstanceChoice:
        """Send a request, for which the settings choose `paged`; return what the engine makes of it."""
        self._number += 1
        prompt, request_id = [1] * prompt_tokens, f"{self._number}-{self.rng.random()}"
        submit = Submit(request_id, prompt, SamplingParams(max_tokens=1), conversation=user, **more)
        selector = Selector(self.settings.strategies, self.settings.rules, self.settings.default_strategy)
        selector.splits = {split.served: split for split in self.rollouts.list_splits().splits}
        return selector.choose(submit, 0.0, FakeInstances(usable, has_room))

    def serve(self, number: int, name: str = "r", *, kl: float = GOOD_KL, agreed: float = 1.0, **times: Any) -> None:
        """Serve requests of all arms, whose shadows have a random divergence around `kl`, as far as it matters."""
        for _ in range(number):
            if self.show(name)["state"] not in ("shadow", "canary"):
                return
            choice = self.choose()
            conversation = {} if choice.is_counted else {"conversation": None}
            record = make_record(choice.instance, rollout=choice.rollout, reason=choice.reason, **times, **conversation)
            self.observe([], [record])
            if choice.shadow is not None:
                values = [self.rng.expovariate(1 / kl) for _ in range(20)]
                self.observe([make_fidelity(values, candidate=choice.shadow, agreed=agreed, rollout=name)])

    def observe(self, fidelities: Sequence[RequestFidelity], records: Sequence[RequestRecord] = ()) -> None:
        """Report what has ended, and let the guards look at it."""
        self.rollouts.observe(fidelities, records)
        self.rollouts.update()

    def show(self, name: str = "r") -> dict[str, Any]:
        return next(each for each in self.rollouts.describe()["data"] if each["name"] == name)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds
        self.rollouts.update()
