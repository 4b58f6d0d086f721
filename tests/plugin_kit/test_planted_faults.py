"""Each planted mistake breaks the promise that is about it, and the report says so in words."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from plugin_kit.cases import PluginCheck, load_fastest_ops
from plugin_kit.promise import CheckOutcome

STRATEGIES = "tests.plugin_kit.faulty_strategies"
SCORERS = "tests.plugin_kit.faulty_scorers"
WINDOW = {"window": 12, "sinks": 2}

FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {  # by class: options, the broken promise, words of what was found
    f"{STRATEGIES}:WrongGather": ({}, "attends to the keys it lists", "differs"),
    f"{STRATEGIES}:ForgetfulExact": ({}, "exact", "sees other keys"),
    f"{STRATEGIES}:WrongCount": (WINDOW, "counts dropped tokens", "count_dropped_tokens() returned"),
    f"{STRATEGIES}:NaNSpreads": ({}, "NaN stays in its sequence", "another sequence reached this one"),
    f"{STRATEGIES}:BatchDependent": ({}, "same bits in a mixed batch", "in a batch with others and alone"),
    f"{STRATEGIES}:ReadsUnused": ({}, "reads no unused memory", "never written"),
    f"{STRATEGIES}:OwnMood": (WINDOW, "replayable", "keeps other positions"),
    f"{STRATEGIES}:ChunkDependent": ({}, "chunk_invariant", "in rows of"),
    f"{STRATEGIES}:Stuck": ({}, "stop", "so the sequence cannot go on"),
    f"{STRATEGIES}:LongRows": (WINDOW, "stop", "the rows must fit the 25 slots"),
    f"{STRATEGIES}:SharingFork": ({}, "forkable", "is not the one that was written"),
    f"{STRATEGIES}:NeverForks": ({}, "forkable", "fork() returned None although there is memory"),
    f"{STRATEGIES}:RewindLies": (WINDOW, "rewind", "is not the one that was written"),
    f"{STRATEGIES}:NotRepeatable": ({}, "survives a failed step", "failed once and was repeated"),
    f"{STRATEGIES}:AllDraftsStay": ({}, "rejected drafts leave no trace", "accepted drafts"),
    f"{STRATEGIES}:HastyCompaction": (
        {"budget": 12, "every": 16, "recent": 3, "block_size": 4},
        "survives a failed compaction",
        "after a compact() that failed once",
    ),
    f"{STRATEGIES}:Leak": ({}, "frees all memory", "bytes are held"),
    f"{STRATEGIES}:TooFewBlocks": ({}, "sizes is an upper bound", "sizes(): 0"),
    f"{STRATEGIES}:FallingSizes": ({}, "sizes is an upper bound", "falls while the number of tokens rises"),
    f"{STRATEGIES}:OtherBlocks": ({}, "sizes is an upper bound", "sizes() names blocks of"),
    f"{STRATEGIES}:GrowsForever": (
        {"window": 24, "every": 8, "block_size": 8},
        "unbounded",
        "more than sizes() says",
    ),
    f"{STRATEGIES}:EndlessWindow": (WINDOW, "unbounded", "within the cache"),
    f"{STRATEGIES}:WritesElsewhere": ({}, "writes only its own memory", "has not allocated"),
    f"{STRATEGIES}:WrongUsage": ({}, "usage adds up", "used + idle + wasted"),
    f"{STRATEGIES}:SaltBlind": ({"block_size": 4}, "shares prefixes by salt", "another salt"),
    f"{STRATEGIES}:ParentsLast": ({"block_size": 2}, "any order of calls", "no parent before"),
    f"{STRATEGIES}:LosesHits": ({"block_size": 2}, "any order of calls", "hits"),
    f"{STRATEGIES}:DropsNothing": ({"block_size": 2}, "any order of calls", "drop_prefix() left nodes"),
    f"{STRATEGIES}:KnowsAllBlocks": ({}, "any order of calls", "a block that the cache does not hold"),
    f"{STRATEGIES}:WrongIdleBytes": ({}, "frees all memory", "0 of them could be freed"),
    f"{STRATEGIES}:EvictsTooLittle": ({"block_size": 4}, "frees all memory", "and idle_bytes was"),
    f"{STRATEGIES}:WrongType": ({}, "returns what the interface says", "not a bool"),
    f"{STRATEGIES}:RaisesWhenFull": ({}, "any order of calls", "no memory left"),
    f"{SCORERS}:OneForAllHeads": ({}, "a score for each key", "not [H, S]"),
    f"{SCORERS}:NotANumber": ({}, "a score for each key", "NaN"),
    f"{SCORERS}:Whim": ({}, "pure", "other scores for the same past"),
    f"{SCORERS}:Normalizes": ({}, "pure", "read only"),
    f"{SCORERS}:CountsCalls": ({}, "pure", "other scores for the same past"),
    f"{SCORERS}:RemembersTheLast": ({}, "remembers by sequence", "another sequence"),
    f"{SCORERS}:AddsInPlace": ({}, "assigns new state", "in place"),
    f"{SCORERS}:StoresFirst": ({}, "survives a failed call", "assign state last"),
    f"{SCORERS}:WrongColumns": ({}, "remembers by sequence", "not [H, S]"),
}


@pytest.fixture
def seed() -> int:
    drawn = random.randrange(1 << 32)
    print(f"seed {drawn}")
    return drawn


def find_broken(
    name: str, seed: int, options: dict[str, Any], words: str = "", make_ops: Callable[[], Ops] = ReferenceOps
) -> dict[str, CheckOutcome]:
    """Return the outcomes of broken promises by name."""
    cases = PluginCheck(name, seed, [options], make_ops).list_cases(words)
    assert cases
    outcomes = [case.find_outcome() for case in cases]
    return {outcome.case.promise: outcome for outcome in outcomes if outcome.result == "broken"}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FAULTS, ids=lambda name: name.partition(":")[2])
def test_a_mistake_breaks_the_promise_that_is_about_it(name: str, seed: int) -> None:
    options, promise, words = FAULTS[name]
    broken = find_broken(name, seed, options, promise)
    assert promise in broken, f"found broken: {list(broken)}"
    assert words in broken[promise].found


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (f"{STRATEGIES}:SoundCache", {}),
        ("tests.contract.kinds.hooked:HookedCache", {}),
        ("tests.contract.kinds.random_drop:RandomDropByHeadCache", {"every": 5, "block_size": 2}),
        ("tests.contract.kinds.thinned:ThinnedCache", {"recent": 12, "group": 3, "every": 16}),
        ("tests.contract.kinds.thinned:ThinnedCache", {"recent": 1, "group": 1, "every": 7}),
        ("tests.contract.third_party_strategy:SieveCache", {"keep": 3}),
        (f"{SCORERS}:SoundScorer", {}),
    ],
    ids=str,
)
def test_a_class_without_a_mistake_keeps_all_promises(name: str, options: dict[str, Any], seed: int) -> None:
    broken = find_broken(name, seed, options, make_ops=load_fastest_ops)
    assert not broken, {promise: outcome.found for promise, outcome in broken.items()}
