"""Every built-in kind and those of tests/contract/kinds keep the promises that plugin_kit checks of third parties.

With options under which windows wrap and budgets bite, and every backend. What a kind keeps by its definition is
compared in test_attention.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from config.settings import StrategySettings
from plugin_kit.promise import Promise
from plugin_kit.strategies import PROMISES
from plugin_kit.strategies.attention import check_dropped_count
from plugin_kit.strategies.repetition import check_failed_steps, check_other_rows, check_replay
from plugin_kit.strategies.trial import StrategyTrial
from tests.contract import harness
from tests.contract.harness import every_instance
from tests.contract.visible_tokens import define

SIEVE = "tests.contract.third_party_strategy:SieveCache"
STRATEGIES = every_instance() | {f"sieve_{keep}": StrategySettings(kind=SIEVE, keep=keep) for keep in (1, 2, 5)}
NOT_REPLAYABLE: Mapping[str, Mapping[str, object]] = {  # kinds, with options: what they drop depends on the rows
    "quest": {"block_size": 4, "budget": 16},
    "random_drop": {},
    "random_drop_by_head": {},
}
ROUNDED = {
    "int8": StrategySettings(kind="paged", k_dtype="int8", v_dtype="int8", block_size=16),
    "ring-int8": StrategySettings(kind="sliding_window", k_dtype="int8", v_dtype="int8", window=12, max_row=9),
    "int8-keys": StrategySettings(kind="paged", k_dtype="int8", block_size=16),
    "int4": StrategySettings(kind="paged", k_dtype="int4", v_dtype="int4", block_size=16),
    "residual": StrategySettings(kind="residual", v_dtype="int8", residual_length=8, block_size=4),
    "ring-int4": StrategySettings(kind="sliding_window", k_dtype="int8", v_dtype="int4", window=12, max_row=9),
}
ELSEWHERE = ("exact", "any order of calls")  # test_attention, test_random_histories


def make_trial(settings: StrategySettings, rng: random.Random) -> StrategyTrial:
    return StrategyTrial(settings, harness.make_ops(), rng, definition=define)


@pytest.mark.fuzz
@pytest.mark.parametrize("promise", [each for each in PROMISES if each.name not in ELSEWHERE], ids=lambda p: p.name)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_promise_is_kept(name: str, promise: Promise[StrategyTrial], rng: random.Random) -> None:
    trial = make_trial(STRATEGIES[name], rng)
    if not promise.is_made(trial):
        return  # test_what_promises_are_made_follows_from_the_contract
    promise.check(trial)


@pytest.mark.parametrize("kind", NOT_REPLAYABLE)
def test_strategies_that_depend_on_the_rows_do_not_promise_the_same_keys(kind: str, rng: random.Random) -> None:
    contract = make_trial(StrategySettings.model_validate({"kind": kind, **NOT_REPLAYABLE[kind]}), rng).contract
    assert not contract.replayable
    assert not contract.chunk_invariant


def test_what_promises_are_made_follows_from_the_contract(rng: random.Random) -> None:
    for name, settings in every_instance().items():
        trial = make_trial(settings, rng)
        made = {promise.name for promise in PROMISES if promise.is_made(trial)}
        contract = trial.contract
        for field in ("exact", "replayable", "chunk_invariant"):
            assert (field in made) == getattr(contract, field), name
        assert ("rewind" in made) == (contract.rewind != 0), name
        assert ("survives a failed compaction" in made) == (settings.kind in ("compressed", "streaming")), name


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_keys_are_replayed_in_any_rows_and_after_failures(name: str, rng: random.Random) -> None:
    for check in (check_replay, check_other_rows, check_failed_steps, check_dropped_count):
        check(make_trial(ROUNDED[name], rng))
