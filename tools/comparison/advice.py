"""Says which strategy suits which load, and why, from the figures of a comparison.

The rules are the ones that a person would use. Among the strategies that change no answer, the fastest is the first
choice. Among all whose fidelity is within a bound, the one with the least memory is the choice if memory is short. A
difference of speeds counts only if the ranges of the rounds are 2 % apart. Knows nothing of how figures are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.comparison.fidelity import StrategyFidelity
from tools.comparison.figures import Summary
from tools.comparison.plan import Load

NOISE = 1.02  # least ratio of speeds that counts: a few rounds do not show all of the machine's noise


@dataclass(frozen=True)
class Candidate:
    """A strategy under one load; a figure is None if it could not be measured."""

    name: str
    exact: bool  # whether it promises to drop and round nothing
    speed: Summary | None  # output tokens a second
    memory: Summary | None  # MiB of KV memory of running requests
    fidelity: StrategyFidelity | None
    errors: int = 0

    @property
    def usable(self) -> bool:
        return not self.errors and self.speed is not None and self.memory is not None


@dataclass(frozen=True)
class Choice:
    """A strategy that suits a load, with the reason as a sentence."""

    strategy: str
    reason: str


@dataclass(frozen=True)
class Advice:
    """The strategies that suit one load. A choice is None if no strategy fits."""

    load: Load
    exact: Choice | None  # changes no answer
    small: Choice | None  # takes least memory within the bound of fidelity
    dominated: Mapping[str, str]  # strategies that another one beats in everything, by name: the other one's name


def advise(load: Load, candidates: Sequence[Candidate], max_kl: float) -> Advice:
    """Choose strategies for a load; `max_kl` bounds the mean KL divergence from exact caching, in nats per token."""
    usable = [each for each in candidates if each.usable]
    exact = choose_exact(usable)
    return Advice(load, exact, choose_small(usable, exact, max_kl), find_dominated(usable))


def choose_exact(candidates: Sequence[Candidate]) -> Choice | None:
    """Choose the fastest exact strategy; of those whose speeds overlap with its own, the one with least memory."""
    exact = [each for each in candidates if each.exact]
    if not exact:
        return None
    fastest = max(exact, key=_speed)
    equal = [each for each in exact if not is_faster(fastest, each)]
    best = min(equal, key=_memory)
    others = [each for each in exact if each is not best]
    reason = f"{_speed(best):,.0f} tokens/s in {_memory(best):,.1f} MiB, and no answer changes"
    if best is not fastest:
        reason += f"; {fastest.name} is as fast in the range of the rounds, and takes {_memory(fastest):,.1f} MiB"
    elif others:
        second = max(others, key=_speed)
        reason += f"; next {second.name}: {_speed(second):,.0f} tokens/s in {_memory(second):,.1f} MiB"
    return Choice(best.name, reason)


def choose_small(candidates: Sequence[Candidate], exact: Choice | None, max_kl: float) -> Choice | None:
    """Choose the strategy with the least memory among those within `max_kl` that take less than the exact choice."""
    base = next((each for each in candidates if exact and each.name == exact.strategy), None)
    close = [each for each in candidates if is_close(each, max_kl) and (base is None or _memory(each) < _memory(base))]
    if not close:
        return None
    best = min(close, key=_memory)
    changed = "no answer changes"
    if not best.exact and best.fidelity is not None:
        same = f"the same likeliest token at {best.fidelity.same_top:.1%} of positions"
        changed = f"KL {best.fidelity.kl:.2g} nats, {same}"
    if base is None:
        return Choice(best.name, f"{_memory(best):,.1f} MiB at {_speed(best):,.0f} tokens/s; {changed}")
    saved, kept = _memory(best) / _memory(base), _speed(best) / _speed(base)
    return Choice(best.name, f"{saved:.0%} of the memory of {base.name} at {kept:.0%} of its speed; {changed}")


def is_close(candidate: Candidate, max_kl: float) -> bool:
    """Return whether a strategy is exact, or within a bound of KL divergence; not if that was not measured."""
    return candidate.exact or (candidate.fidelity is not None and candidate.fidelity.kl <= max_kl)


def find_dominated(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return the strategies that another one beats: closer to exact or equal, no more memory, and clearly faster."""
    found = {}
    for each in candidates:
        for other in candidates:
            if (
                other is not each
                and is_faster(other, each)
                and _memory(other) <= _memory(each)
                and _closer(other, each)
            ):
                found[each.name] = other.name
                break
    return found


def is_faster(one: Candidate, other: Candidate) -> bool:
    """Return whether every round of `one` was faster than every round of `other`, and not by noise."""
    assert one.speed is not None, "usable"
    assert other.speed is not None, "usable"
    return one.speed.low > other.speed.high * NOISE


def _closer(one: Candidate, other: Candidate) -> bool:
    """Return whether `one` is at least as close to exact caching; what an exact strategy rounds in sums is no loss."""
    if one.exact or other.exact:
        return one.exact
    return one.fidelity is not None and (other.fidelity is None or one.fidelity.kl <= other.fidelity.kl)


def _speed(candidate: Candidate) -> float:
    assert candidate.speed is not None, "usable"
    return candidate.speed.value


def _memory(candidate: Candidate) -> float:
    assert candidate.memory is not None, "usable"
    return candidate.memory.value
