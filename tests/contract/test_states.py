"""Any strategy beside layers with recurrent states: a text's states are always those of all its tokens.

The states are computed by a layer that says of which text they are (toy_states.py), so what is expected follows from
the text alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache_strategies import registry
from cache_strategies.base import CacheSetup, KVSequence
from cache_strategies.checkpoints.base import CheckpointOptions, CheckpointPolicy, CheckpointUse
from cache_strategies.checkpoints.placements import Branches, Interval, Messages
from cache_strategies.memory import make_memory
from cache_strategies.spaces import find_space
from cache_strategies.states.cache import PairedStrategy, StateCache
from cache_strategies.types import EVERYTHING, NO_SALT, Geometry, Salt, SaltScope, Text
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.steps import count_until_stop, find_instance
from plugin_kit.driver.texts import MODEL
from plugin_kit.driver.world import POISON
from server.engine.batch import Batch, RowInput
from tests.contract import harness, toy_states
from tests.contract.harness import every_instance

NAME = "checked"
SALTS = (NO_SALT, Salt("tenant", ""), Salt("tenant", "salt"))
LENGTH = 120  # of the longest text
MAX_SEQ_LEN = LENGTH + 8  # as drafts may follow


@dataclass(eq=False)
class TextReading:
    """A text that enters a cache."""

    sequence: KVSequence
    tokens: list[int]

    @property
    def left(self) -> int:
        return len(self.tokens) - self.sequence.length


class Pair:
    """One strategy beside the toy's states."""

    def __init__(
        self,
        settings: StrategySettings,
        interval: int,
        *,
        layers: Sequence[LayerSpec] = MODEL,
        max_seq_len: int = MAX_SEQ_LEN,
        policy: type[CheckpointPolicy] = Interval,
        share: str = "100%",
        end_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make both in a memory for 16 texts, which is filled with NaN."""
        (declared,) = registry.resolve_instances({NAME: settings})
        strategy = PairedStrategy(declared.cls, declared.options, CheckpointOptions(policy, interval, share))
        geometry = Geometry(layers, torch.float32, 8, max_seq_len, max_seq_len, toy_states.LAYERS, end_ids)
        sizes = StateCache.sizes(strategy, geometry)
        self.memory = make_memory(16 * sizes.count_bytes(max_seq_len, find_space("cpu").round_block))
        own = self.memory.add_instance(NAME)
        self.cache = StateCache(CacheSetup(NAME, geometry, own, harness.make_ops(), clock=clock), strategy)
        self.memory.set_owner(NAME, self.cache)
        self.memory.set_sizes(NAME, sizes, max_seq_len)
        for region in own.regions:
            region.memory.fill_(POISON)
        *_, self.states_region = own.regions

    def open(self, tokens: Sequence[int], salt: Salt = NO_SALT, *, prompt: int | None = None) -> TextReading | None:
        """Open a sequence for a text; the tokens after `prompt` ones are not known before they are computed."""
        opened = self.cache.open(Text(list(tokens)[:prompt], salt))
        return None if opened is None else TextReading(opened, list(tokens))

    def read(self, tokens: Sequence[int], chunk: int = 50, salt: Salt = NO_SALT) -> TextReading:
        """Open a text and let all of it enter."""
        reading = self.open(tokens, salt)
        assert reading is not None
        while reading.left:
            assert self.step([(reading, chunk)])
        return reading

    def compute_again(self, tokens: Sequence[int], salt: Salt = NO_SALT) -> int:
        """Return how many tokens of a text had to be computed, and end it."""
        reading = self.open(tokens, salt)
        assert reading is not None
        found = reading.sequence.length
        while reading.left:
            assert self.step([(reading, 50)])
        reading.sequence.close()
        return len(tokens) - found

    def step(
        self, rows: Sequence[tuple[TextReading, int]], drafts: Sequence[tuple[int, int]] = (), *, fails: bool = False
    ) -> bool:
        """Run one step, with rows of at most so many tokens; return False if there was no room for any.

        drafts[i] are (right, wrong) tokens after row i. With `fails`, all is computed and nothing committed.
        """
        self.cache.poll()
        located: list[tuple[TextReading, RowInput, int]] = []
        for i, (reading, wanted) in enumerate(rows):
            sequence, (right, wrong) = reading.sequence, drafts[i] if drafts else (0, 0)
            if not sequence.ready():
                continue
            start = sequence.length
            ids = reading.tokens[start : start + wanted + right]
            ids = [*ids, *[max(reading.tokens) + 1] * wrong][: count_until_stop(sequence, 1 << 30)]
            num_drafts = max(0, len(ids) - len(reading.tokens[start : start + wanted]))
            if sequence.room < start + len(ids) and not sequence.reserve(len(ids)):
                continue
            right_ones = min(len(ids), len(reading.tokens[start : start + wanted + right]))
            located.append(
                (reading, RowInput(find_instance(self.cache), sequence, start, ids, 0, num_drafts), right_ones)
            )
        if not located:
            return False
        batch = Batch([row for _, row, _ in located])
        in_order = [located[i] for i in batch.row_order]
        (part,) = batch.slices
        assert part.states is not None
        computed = toy_states.run(part.states, batch.input_ids)
        for reading, (_, _, start, ids, *_), _ in in_order:
            for end, found in enumerate(next(computed), start):
                expected = toy_states.expect([*reading.tokens[:start], *ids][:end])
                same = [torch.equal(*each) for each in zip(found, expected, strict=True)]
                assert all(same), f"the states after {end} tokens are of another text"
        assert next(computed, None) is None
        if not fails:
            before = [reading.sequence.length for reading, _, _ in in_order]
            failed = batch.commit([right for _, _, right in in_order])
            assert not failed
            for (reading, row, right), length, count in zip(in_order, before, batch.num_committed, strict=True):
                assert reading.sequence.length == length + count
                assert count == right if right == len(row.tokens) else count <= right
        self.check_integrity()
        return True

    def check_integrity(self) -> None:
        self.memory.check_integrity()
        self.cache.check_integrity()


def draw_text(rng: random.Random, known: Sequence[Sequence[int]]) -> list[int]:
    """Return a random text that may begin as another one."""
    length = rng.randint(1, LENGTH)
    begin = list(rng.choice(known))[: rng.randint(0, LENGTH)] if known and rng.random() < 0.7 else []
    return [*begin, *(rng.randrange(40) for _ in range(length))][:length]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", every_instance())
def test_states_are_those_of_the_text_in_any_history(name: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    few = rng.random() < 0.5  # memory for few sequences, so that checkpoints are evicted and rows refused
    pair = Pair(every_instance()[name], rng.choice([8, 16, 50]), max_seq_len=MAX_SEQ_LEN)
    cache, memory = pair.cache, pair.memory
    if few:
        most = memory.count_sequence_bytes(NAME, MAX_SEQ_LEN)
        memory.set_share(NAME, floor=0, limit=int(most * rng.uniform(1, 3)))
    opened: list[TextReading] = []
    texts: list[list[int]] = []
    for _ in range(60):
        kind = rng.choice(["open", "step", "step", "step", "fail", "fork", "close", "evict", "clear"])
        if kind == "open" and len(opened) < 6:
            texts.append(draw_text(rng, texts))
            reading = pair.open(texts[-1], rng.choice(SALTS), prompt=rng.randint(1, len(texts[-1])))
            opened += [] if reading is None else [reading]
        elif kind in ("step", "fail") and (going := [each for each in opened if each.left]):
            chosen = rng.sample(going, rng.randint(1, len(going)))
            rows = [(each, rng.choice([1, 1, 5, 40])) for each in chosen]
            drafts = [(rng.randint(0, 3), rng.randint(0, 2)) if rng.random() < 0.3 else (0, 0) for _ in rows]
            if not pair.step(rows, drafts, fails=kind == "fail") and opened:
                opened.pop(rng.randrange(len(opened))).sequence.close()  # as if it was preempted
            elif kind == "fail" and rng.random() < 0.6:
                for row in rows:
                    pair.step([row])
        elif kind == "fork" and opened and len(opened) < 6:
            parent = rng.choice(opened)
            child = parent.sequence.fork() if parent.sequence.length else None
            if child is not None:
                rest = [rng.randrange(40) for _ in range(rng.randint(1, 20))]
                opened.append(TextReading(child, [*parent.tokens[: child.length], *rest][:LENGTH]))
        elif kind == "close" and opened:
            sequence = opened.pop(rng.randrange(len(opened))).sequence
            sequence.spoiled = rng.random() < 0.2
            sequence.close()
        elif kind == "evict":
            promised, wanted = cache.idle_bytes, rng.randint(1, 1 << 20)
            before = memory.get_held_bytes(NAME)
            cache.evict(wanted)
            assert before - memory.get_held_bytes(NAME) >= min(promised, wanted)
        elif kind == "clear":
            cache.clear(rng.choice([EVERYTHING, SaltScope("tenant"), SaltScope("tenant", "salt")]))
        pair.check_integrity()
    for reading in opened:
        reading.sequence.close()
    cache.evict(1 << 30)
    assert not memory.get_held_bytes(NAME)


PAGED = StrategySettings(kind="paged", block_size=4)
TOKENS = list(range(100))


def test_a_text_goes_on_from_the_last_block_before_its_end() -> None:
    pair = Pair(PAGED, 1000)
    pair.read(TOKENS[:99], 1).sequence.close()
    assert pair.compute_again(TOKENS[:99]) == 3  # the last of 25 blocks
    assert pair.compute_again(TOKENS) == 4  # one token is needed anyway


def test_the_next_turn_of_a_conversation_goes_on_from_the_end_of_the_last_one() -> None:
    pair = Pair(PAGED, 1000)
    reading = pair.open(TOKENS, prompt=50)
    assert reading is not None
    assert pair.step([(reading, 50)])
    while reading.left:
        assert pair.step([(reading, 1)])
    held = pair.states_region.num_held
    assert held <= 4, "two slots of the text, the end of its prompt, and its own end"
    reading.sequence.close()
    assert pair.compute_again([*TOKENS, 7, 8, 9]) == 3


@pytest.mark.parametrize("changed", range(0, 100, 9))
def test_after_a_change_at_most_an_interval_is_computed_again(changed: int) -> None:
    pair, interval = Pair(PAGED, 20), 20
    pair.read(TOKENS).sequence.close()
    other = [*TOKENS[:changed], *range(200, 300 - changed)]
    assert 0 <= pair.compute_again(other) - (100 - changed) < interval


def test_what_branches_off_leaves_a_checkpoint_there() -> None:
    pair = Pair(PAGED, 1000)
    pair.read(TOKENS).sequence.close()
    branches = [[*TOKENS[:60], *range(200 + 50 * i, 230 + 50 * i)] for i in range(3)]
    assert [pair.compute_again(each) for each in branches] == [90, 30, 30]


def test_checkpoints_within_a_row_are_kept_however_it_is_cut() -> None:
    for chunk in (1, 7, 64, 100):
        pair = Pair(PAGED, 12)
        pair.read(TOKENS, chunk).sequence.close()
        assert pair.compute_again(TOKENS[:40]) == 4
        assert pair.compute_again([*TOKENS[:50], 1, 1, 1, 1]) == 54 - 48


def test_a_strategy_that_finds_no_tokens_keeps_no_checkpoint() -> None:
    pair = Pair(StrategySettings(kind="sliding_window", window=60), 8)
    pair.read(TOKENS).sequence.close()
    assert pair.states_region.num_held == 0
    assert pair.compute_again(TOKENS) == 100


def test_accepted_drafts_are_computed_again_if_others_were_rejected() -> None:
    pair = Pair(PAGED, 1000)
    reading = pair.open(TOKENS)
    assert reading is not None
    assert pair.step([(reading, 50)])
    assert pair.step([(reading, 1)], [(2, 2)])
    assert reading.sequence.length == 51, "the states before the drafts are kept, and none behind them"
    assert pair.step([(reading, 3)])
    assert pair.step([(reading, 1)], [(3, 0)])
    assert reading.sequence.length == 58, "a draft that is accepted as a whole is committed"


def test_drafts_are_committed_up_to_a_checkpoint_in_their_row() -> None:
    pair = Pair(PAGED, 52)
    reading = pair.open(TOKENS)
    assert reading is not None
    assert pair.step([(reading, 50)])
    assert pair.step([(reading, 1)], [(3, 1)])
    assert reading.sequence.length == 52


def test_states_after_wrong_drafts_are_no_checkpoint() -> None:
    pair = Pair(PAGED, 4)
    reading = pair.open(TOKENS)
    assert reading is not None
    assert pair.step([(reading, 50)])
    assert pair.step([(reading, 1)], [(3, 4)])
    assert reading.sequence.length == 52
    reading.sequence.close()
    pair.read(TOKENS)
    assert pair.compute_again(TOKENS[:58]) == 2


def test_generated_tokens_are_found_by_the_next_prompt() -> None:
    pair = Pair(PAGED, 20)
    reading = pair.open(TOKENS, prompt=10)
    assert reading is not None
    while reading.left:
        pair.step([(reading, 10)])
    reading.sequence.close()
    assert pair.compute_again([*TOKENS[:90], 1, 2, 3]) == 13


def test_a_fork_shares_states_until_it_goes_on() -> None:
    pair = Pair(PAGED, 1000)
    parent = pair.read(TOKENS[:50])
    held = pair.states_region.num_held
    children = [parent.sequence.fork() for _ in range(3)]
    assert pair.states_region.num_held == held, "a fork takes no slot before its first row"
    readings = [TextReading(child, [*TOKENS[:50], i, i, i]) for i, child in enumerate(children) if child is not None]
    assert len(readings) == 3
    for _ in range(3):
        assert pair.step([(each, 1) for each in readings])
    parent.tokens = TOKENS
    assert pair.step([(parent, 10)])


def test_equal_texts_that_arrive_together_wait_for_the_checkpoint_of_the_first() -> None:
    pair = Pair(PAGED, 1000)
    readings = [pair.open(TOKENS), pair.open([*TOKENS[:60], 7]), pair.open(TOKENS)]
    first, branch, third = (each for each in readings if each is not None)
    assert [each.left for each in (first, branch, third)] == [100, 61, 4], "only whole prompts are promised"
    while first.left:
        assert not third.sequence.ready()
        assert pair.step([(first, 30)])
    assert third.sequence.ready()
    assert third.left == 4
    assert pair.step([(third, 30)])


def test_a_text_does_not_wait_for_what_will_not_be() -> None:
    pair = Pair(PAGED, 40)
    first, second = pair.open(TOKENS), pair.open(TOKENS)
    assert first is not None
    assert second is not None
    assert pair.step([(first, 50)])
    assert not second.sequence.ready()
    first.sequence.close()
    assert second.sequence.ready()
    assert second.left == 60, "the checkpoint that is there"


def test_a_text_that_waits_may_reserve_once_the_other_one_has_ended() -> None:
    pair = Pair(PAGED, 40)
    first, second = pair.open(TOKENS), pair.open(TOKENS)
    assert first is not None
    assert second is not None
    assert pair.step([(first, 50)])
    assert not second.sequence.ready()
    first.sequence.close()
    assert second.sequence.reserve(4)
    assert second.left == 60
    assert pair.step([(second, 60)])


def test_equal_texts_do_not_wait_for_checkpoints_that_find_no_room() -> None:
    pair = Pair(PAGED, 1000, share="0%")
    readings = [each for each in (pair.open(TOKENS) for _ in range(3)) if each is not None]
    assert len(readings) == 3
    for _ in range(4):
        assert pair.step([(each, 50) for each in readings if each.left])
        if not any(each.left for each in readings):
            return
    raise AssertionError("they run one after the other")


def test_a_text_does_not_wait_for_what_was_cleared() -> None:
    pair = Pair(PAGED, 1000)
    first, second = pair.open(TOKENS), pair.open(TOKENS)
    assert first is not None
    assert second is not None
    assert not second.sequence.ready()
    pair.cache.clear()
    assert pair.step([(first, 100)])
    assert second.sequence.ready()
    assert pair.step([(second, 100)])


class Faulty(Interval):
    """Raises, or weighs with what is no number."""

    weight: Any = None

    def weigh(self, checkpoint: CheckpointUse) -> float:
        if self.weight is None:
            raise RuntimeError("broken on purpose")
        weight: float = self.weight
        return weight


@pytest.mark.parametrize("weight", [None, float("nan"), float("inf"), -1.0, "x"])
def test_a_policy_at_fault_leaves_nothing_behind(weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "weight", weight)
    pair = Pair(PAGED, 4, policy=Faulty)
    for length in (100, 99):
        pair.read(TOKENS[:length]).sequence.close()
    pair.check_integrity()
    pair.cache.evict(1 << 30)
    assert not pair.memory.get_held_bytes(NAME)


def test_the_end_of_a_text_counts_from_the_last_checkpoint_before_it() -> None:
    uses: list[CheckpointUse] = []

    class Watching(Interval):
        def weigh(self, checkpoint: CheckpointUse) -> float:
            uses.append(checkpoint)
            return super().weigh(checkpoint)

    pair = Pair(PAGED, 48, policy=Watching)
    reading = pair.open([*TOKENS[:64], 1, 1, 1, 1, 1])
    assert reading is not None
    for tokens in (40, 20, 4, 5):
        assert pair.step([(reading, tokens)])
    reading.sequence.close()
    last = {each.num_tokens: (each.num_saved, each.is_inner) for each in uses}
    assert last == {48: (48, True), 68: (20, False)}, "ends of rows are gone, and count for nothing"


def test_no_more_checkpoints_are_kept_than_their_share_allows() -> None:
    most = 5
    share = str(most * Pair(PAGED, 4).states_region.size)
    pair = Pair(PAGED, 4, share=share)
    for first in range(3):
        reading = pair.read([first, *TOKENS])
        assert len(pair.cache.slots.list_checkpoints()) == most
        reading.sequence.close()
    assert pair.states_region.num_held == most


@pytest.mark.parametrize(("policy", "computed"), [(Branches, 60), (Interval, 20), (Messages, 8)])
def test_policies_keep_more_and_more(policy: type[CheckpointPolicy], computed: int) -> None:
    pair = Pair(PAGED, 40, policy=policy, end_ids=[TOKENS[53]])
    pair.read(TOKENS).sequence.close()
    assert pair.compute_again([*TOKENS[:58], 300, 301]) == computed


def test_a_text_begins_anew_if_the_one_ends_that_computes_its_tokens() -> None:
    pair = Pair(PAGED, 20)
    pair.read(TOKENS).sequence.close()
    pair.cache.strategy.evict(1 << 30)  # now there are checkpoints without keys
    first, second = pair.open(TOKENS), pair.open(TOKENS)
    assert first is not None
    assert second is not None
    assert (first.sequence.length, second.sequence.length) == (0, 96)
    assert pair.step([(first, 50)])
    assert not second.sequence.ready()
    first.sequence.close()
    assert second.sequence.ready()
    assert second.sequence.length == 40, "the last checkpoint within the tokens that were computed"
    while second.left:
        assert pair.step([(second, 30)])


def test_a_text_is_refused_if_there_is_no_slot_for_it() -> None:
    pair = Pair(PAGED, 1000, layers=[LayerSpec(1, 1, 8, 8)])
    memory = pair.memory
    pair.read(TOKENS[:3], 1)
    held = memory.get_held_bytes(NAME)
    second = pair.open(TOKENS[:2])
    assert second is not None
    enough = memory.get_held_bytes(NAME)
    second.sequence.close()
    for limit, is_refused in ((enough, False), (enough - pair.states_region.size, True)):
        memory.set_share(NAME, floor=0, limit=limit)
        second = pair.open(TOKENS[:2])
        assert (second is None) is is_refused
        if second is not None:
            second.sequence.close()
        assert memory.get_held_bytes(NAME) == held


def test_reserving_before_asking_whether_it_is_ready_changes_nothing() -> None:
    pair = Pair(PAGED, 20)
    pair.read(TOKENS).sequence.close()
    pair.cache.strategy.evict(1 << 30)
    first, second = pair.open(TOKENS), pair.open(TOKENS)
    assert first is not None
    assert second is not None
    assert pair.step([(first, 50)])
    first.sequence.close()
    second.sequence.reserve(4)
    assert second.sequence.ready()
    assert pair.step([(second, 30)])


def test_states_of_a_text_that_depends_on_its_rows_are_not_found() -> None:
    quest = StrategySettings(kind="quest", block_size=4, budget=24)
    pair = Pair(quest, 4, layers=[LayerSpec(1, 1, 8, 8)])
    pair.read(TOKENS).sequence.close()
    assert pair.states_region.num_held == 0


def test_states_of_a_prefix_that_may_be_nan_are_not_found_by_its_readers() -> None:
    pair = Pair(PAGED, 1000)
    pair.read(TOKENS).sequence.close()
    reader = pair.open(TOKENS)
    assert reader is not None
    assert reader.sequence.length == 96
    reader.sequence.spoiled = True
    reader.sequence.close()
    assert pair.compute_again(TOKENS) == len(TOKENS)


def test_the_end_of_a_text_is_evicted_before_its_beginning() -> None:
    pair = Pair(PAGED, 4, layers=[LayerSpec(1, 1, 8, 8)], clock=count().__next__)  # each look at it takes as long
    pair.read(TOKENS).sequence.close()
    pair.cache.evict(pair.cache.idle_bytes // 2)
    assert pair.compute_again(TOKENS) < 70, "what is left of keys and of checkpoints is the same prefix"


def test_a_refused_text_evicts_no_keys() -> None:
    pair = Pair(PAGED, 1000, layers=[LayerSpec(1, 1, 8, 8)])
    pair.read(TOKENS).sequence.close()
    running = pair.read([*range(300, 350)])
    idle = pair.cache.strategy.idle_bytes
    while pair.cache.slots.evict_one():
        pass
    held = pair.memory.get_held_bytes(NAME)
    pair.memory.set_share(NAME, floor=0, limit=held - idle + pair.states_region.size - 1)
    assert pair.open([*range(400, 430)]) is None
    running.sequence.close()


def test_a_row_that_is_not_located_again_holds_no_slots_for_checkpoints() -> None:
    pair = Pair(PAGED, 4)
    first, second = pair.open(TOKENS), pair.open([*range(200, 300)])
    assert first is not None
    assert second is not None
    assert pair.step([(first, 50)], fails=True)
    assert pair.step([(second, 1)])
    assert pair.states_region.num_held == 2, "one slot of each text"


def test_a_text_may_end_after_a_step_that_failed() -> None:
    pair = Pair(PAGED, 4)
    first, second = pair.open(TOKENS), pair.open([*range(200, 300)])
    assert first is not None
    assert second is not None
    assert pair.step([(first, 50)], fails=True)
    first.sequence.close()
    assert pair.step([(second, 50)])


@pytest.mark.parametrize("fault", ["truncates nothing", "no sequence", "no length", "twice", "forks nonsense"])
def test_a_strategy_at_fault_leaves_nothing_behind(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(PAGED, 20)
    pair.read(TOKENS).sequence.close()
    pair.cache.slots.clear(EVERYTHING)
    parent = pair.read([7] * 10)
    held = pair.states_region.num_held
    strategy = pair.cache.strategy
    right = strategy.open

    def open_wrongly(text: Text) -> Any:
        if fault == "no sequence":
            return SimpleNamespace(length=0)
        if fault == "twice":
            return next(iter(pair.cache.sequences)).keys
        opened: Any = right(text)
        if fault == "no length":
            opened.length = "x"
        elif fault == "truncates nothing":
            opened.truncate = lambda length: None
        else:
            opened.fork = lambda: "nonsense"
        return opened

    with monkeypatch.context() as patch:
        patch.setattr(strategy, "open", open_wrongly)
        if fault == "forks nonsense":
            reading = pair.open(TOKENS)
            assert reading is not None
            with pytest.raises(TypeError, match="not a KVSequence"):
                reading.sequence.fork()
            reading.sequence.close()
        else:
            with pytest.raises((TypeError, ValueError)):
                pair.open(TOKENS)
    assert pair.states_region.num_held == held
    assert list(pair.cache.sequences) == [parent.sequence]


def test_what_a_strategy_says_of_eviction_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(PAGED, 20)
    pair.read(TOKENS).sequence.close()
    right = pair.cache.strategy.evict
    monkeypatch.setattr(pair.cache.strategy, "evict", lambda num_bytes: right(num_bytes) and 1 << 40)
    pair.cache.evict(1 << 30)
    assert pair.memory.get_held_bytes(NAME) == 0


def test_states_that_may_be_nan_are_not_found() -> None:
    pair = Pair(PAGED, 8)
    reading = pair.read(TOKENS)
    reading.sequence.spoiled = True
    reading.sequence.close()
    assert pair.states_region.num_held == 0
    assert pair.compute_again(TOKENS) == 100


def test_checkpoints_are_found_under_their_salt_alone_and_cleared_by_it() -> None:
    pair = Pair(PAGED, 1000)
    for salt in SALTS:
        assert pair.compute_again(TOKENS, salt) == 100
    pair.cache.clear(SaltScope("tenant", "salt"))
    assert [pair.compute_again(TOKENS, salt) for salt in SALTS] == [4, 4, 100]


def test_a_running_text_leaves_no_checkpoint_once_its_salt_is_cleared() -> None:
    pair = Pair(PAGED, 8)
    reading = pair.open(TOKENS)
    assert reading is not None
    assert pair.step([(reading, 50)])
    pair.cache.clear(EVERYTHING)
    assert pair.step([(reading, 50)])
    reading.sequence.close()
    assert pair.states_region.num_held == 0


def test_a_text_goes_on_in_another_cache_with_checkpoints_that_were_read_as_bytes() -> None:
    first, second = Pair(PAGED, 20), Pair(PAGED, 20)
    first.read(TOKENS).sequence.close()
    for name in first.cache.list_data():
        data = first.cache.read_data(name)
        assert data is not None
        with pytest.raises(ValueError, match="bytes of data"):
            second.cache.write_data(name, data[:-1])
        assert second.cache.write_data(name, data)
        assert not second.cache.write_data(name, data), "it is there already"
    second.check_integrity()
    assert second.compute_again(TOKENS) == first.compute_again(TOKENS) == 4
    assert second.compute_again([*TOKENS[:50], 1, 2]) == 12


def test_a_running_text_gets_the_slots_of_idle_checkpoints() -> None:
    pair = Pair(PAGED, 4, max_seq_len=100)
    memory = pair.memory
    memory.set_share(NAME, floor=0, limit=memory.count_sequence_bytes(NAME, 100))
    for first in (0, 200, 400):
        pair.read(range(first, first + 100)).sequence.close()
    assert pair.compute_again(range(400, 500)) <= 100
