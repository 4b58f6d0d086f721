"""Chooses the instance of each request: named by the request, by a rule, the default; then roll-outs; then fallbacks.

Knows names, rules and the shares of roll-outs; no strategy. Keeps no state of requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from config.settings import SelectionRule
from server.engine.ipc.messages import Split, Submit
from server.engine.scheduling.request import RequestError


class Availability(Protocol):
    """The state of the instances, as far as the choice of one depends on it."""

    def is_usable(self, name: str) -> bool:
        """Return whether the next request may use an instance."""
        ...

    def check_admission(self, name: str) -> None:
        """Let a request use an instance. Raises RequestError, with the reason, if it gets none now."""
        ...

    def has_room(self, name: str, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Return whether an instance can ever hold such a request."""
        ...

    def list_fallbacks(self, name: str) -> Sequence[str]:
        """Return the instances that may serve an instance's requests in its place, in order."""
        ...


class InstanceChoice(NamedTuple):
    """The instance of a request, the reason, and under which other instance it also runs."""

    instance: str
    reason: str  # as in RequestRecord
    shadow: str | None = None  # None: it runs under `instance` only
    rollout: str | None = None  # the roll-out that chose `instance` or `shadow`
    is_counted: bool = False  # whether the request counts in an arm of that roll-out: it did not name its instance
    fallback_of: str | None = None  # the instance that would have served it, if a fallback does


NAMED_BY = {"request": ("kv_cache", "kv_cache"), "header": ("header X-KV-Cache", None), "model": ("model", "model")}


class Selector:
    """Chooses the instance of each request, with the splits that roll-outs have set."""

    def __init__(self, names: Collection[str], rules: Sequence[SelectionRule], default: str) -> None:
        assert default in names
        self.splits: Mapping[str, Split] = {}  # by the instance whose requests they divide
        self._names = names
        self._rules = rules
        self._default = default
        self._rule_shadows = {f"rule {i}": rule.shadow for i, rule in enumerate(rules) if rule.shadow}

    def choose(self, submit: Submit, kv_usage: float, instances: Availability) -> InstanceChoice:
        """Return the instance that serves a request, why, and its shadow.

        `kv_usage` is the share of the KV memory in use, 0 to 1. Raises RequestError for an unknown name, and if neither
        the chosen instance nor a fallback of it can serve the request now.
        """
        choice = self.choose_before_rollouts(submit, kv_usage)
        if submit.rollouts and (self.splits or self._rule_shadows):
            choice = self._apply_rollouts(choice, submit, instances)
        size = len(submit.prompt), submit.sampling.max_tokens
        try:
            instances.check_admission(choice.instance)
        except RequestError:
            if (fallback := find_fallback(choice.instance, instances, *size)) is None:
                raise
            reason = f"fallback of {choice.instance}"
            return choice._replace(instance=fallback, reason=reason, fallback_of=choice.instance, shadow=None)
        return choice

    def choose_before_rollouts(self, submit: Submit, kv_usage: float) -> InstanceChoice:
        """Return the instance by name, rule or default. Raises RequestError for an unknown name."""
        if submit.kv_cache is not None:
            return InstanceChoice(self.check_name(submit.kv_cache, *NAMED_BY[submit.named_by]), submit.named_by)
        for i, rule in enumerate(self._rules):
            if matches(rule, len(submit.prompt), submit.priority, kv_usage):
                return InstanceChoice(rule.use, f"rule {i}")
        return InstanceChoice(self._default, "default")

    def _apply_rollouts(self, choice: InstanceChoice, submit: Submit, instances: Availability) -> InstanceChoice:
        """Return what roll-outs, and the shadows of rules, make of a choice.

        A request that names its instance, or that the candidate cannot hold, keeps its instance.
        """

        def can_serve(name: str) -> bool:
            return instances.is_usable(name) and instances.has_room(
                name, len(submit.prompt), submit.sampling.max_tokens
            )

        instance, reason = choice.instance, choice.reason
        shadow, rollout = self._rule_shadows.get(reason), None
        is_named = submit.kv_cache is not None
        split = self.splits.get(instance)
        while split is not None and split.is_complete and not is_named and can_serve(split.candidate):
            instance, reason = split.candidate, f"rollout {split.rollout}: complete"
            split = self.splits.get(instance)
        if split is not None and not split.is_complete:
            rollout, candidate = split.rollout, split.candidate
            is_candidates = not is_named and is_canary(rollout, find_conversation(submit), split.share)
            if is_candidates and can_serve(candidate):
                instance, reason = candidate, f"rollout {rollout}: canary"
            elif is_shadowed(rollout, submit.request_id, split.shadow_share):
                shadow = candidate
        if shadow is not None and (shadow == instance or not instances.is_usable(shadow)):
            shadow = None
        return InstanceChoice(instance, reason, shadow, rollout, rollout is not None and not is_named)

    def check_name(self, name: str, field: str, param: str | None) -> str:
        """Return an instance's name, which a request gives in `field`. Raises RequestError for an unknown one."""
        if name not in self._names:
            message = f"{field}: there is no cache strategy {name!r}; there are {', '.join(sorted(self._names))}"
            raise RequestError(400, message, code="unknown_kv_cache", param=param)
        return name


def matches(rule: SelectionRule, prompt_tokens: int, priority: int, kv_usage: float) -> bool:
    """Return whether a request meets all conditions of a rule; conditions that are None always hold."""
    return (
        (rule.min_prompt_tokens is None or prompt_tokens >= rule.min_prompt_tokens)
        and (rule.max_prompt_tokens is None or prompt_tokens <= rule.max_prompt_tokens)
        and (rule.min_priority is None or priority >= rule.min_priority)
        and (rule.max_priority is None or priority <= rule.max_priority)
        and (rule.kv_usage_above is None or kv_usage > rule.kv_usage_above)
    )


def find_fallback(name: str, instances: Availability, num_prompt_tokens: int, max_tokens: int) -> str | None:
    """Return the first fallback of an instance that gets requests now and has room for such a request."""

    def can_serve(fallback: str) -> bool:
        try:
            instances.check_admission(fallback)
        except RequestError:
            return False
        return instances.has_room(fallback, num_prompt_tokens, max_tokens)

    return next(filter(can_serve, instances.list_fallbacks(name)), None)


def find_conversation(submit: Submit) -> str:
    """Return what is equal for requests that are served alike: without a conversation, all choices of a prompt."""
    return submit.conversation or submit.sibling_of or submit.request_id


# ---------------------------------------------------------------- shares of roll-outs
# A conversation has the same number from 0 to 1 in every stage, process and restart. It is served by the candidate if
# the number is below the share, so it stays with the candidate as the share grows.
def compute_position(purpose: str, rollout: str, key: str) -> float:
    """Return a number from 0 to below 1, evenly distributed over keys; other purposes and roll-outs give others."""
    text = "\0".join((purpose, rollout, key)).encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: a float below 1 without rounding


def is_canary(rollout: str, conversation: str, share: float) -> bool:
    """Return whether the candidate of a roll-out serves a conversation, at a share from 0 to 1."""
    return compute_position("canary", rollout, conversation) < share


def is_shadowed(rollout: str, request: str, share: float) -> bool:
    """Return whether a request also runs under the candidate, at a share from 0 to 1. Independent of `is_canary`."""
    return compute_position("shadow", rollout, request) < share
