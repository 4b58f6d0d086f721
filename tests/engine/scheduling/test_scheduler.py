"""Tests of the scheduler by steps: rows, budget, preemption, rejected requests, drafts. Imports no torch."""

from __future__ import annotations

import pytest

from cache_strategies.base import KVCache
from server.engine.scheduling.request import Request, RequestError
from tests.engine.scheduling.fake_caches import FakeCache, Memory
from tests.engine.scheduling.scheduler_driver import PerfectProposer, SchedulerDriver


# -------------------------------------------------------------------- rows of a step
def test_prompts_are_cut_to_the_budget_and_decoding_goes_on_beside_them() -> None:
    engine, cache = SchedulerDriver(), FakeCache("a", Memory(1000))
    engine.submit("short", cache, 4)
    engine.submit("long", cache, 25)
    assert [engine.step() for _ in range(4)] == [
        {"short": 4, "long": 6},
        {"short": 1, "long": 10},
        {"short": 1, "long": 9},
        {"long": 1},
    ]


def test_prompts_that_end_do_not_wait_for_those_behind_them() -> None:
    engine, cache = SchedulerDriver(), FakeCache("a", Memory(1000))
    for name in ("first", "second", "third"):
        engine.submit(name, cache, 3)
    assert [engine.step() for _ in range(2)] == [
        {"first": 3, "second": 3},  # half a step, and one that ends
        {"first": 1, "second": 1, "third": 3},
    ]


def test_decode_comes_first_though_it_is_last_in_line() -> None:
    engine, cache = SchedulerDriver(), FakeCache("a", Memory(1000))
    engine.submit("low", cache, 3, 9, priority=5)
    engine.step()
    engine.submit("high", cache, 60, 9, priority=0)
    steps = [engine.step() for _ in range(4)]
    assert [list(step) for step in steps[1:]] == [["low", "high"]] * 3
    assert [step["high"] for step in steps[1:]] == [10] * 3, "decoding takes nothing of the budget"
    assert [step["low"] for step in steps[1:]] == [1, 1, 1]


def test_everybody_decodes_however_small_the_budget() -> None:
    engine, cache = SchedulerDriver(max_num_batched_tokens=2), FakeCache("a", Memory(1000))
    for i in range(3):
        engine.submit(str(i), cache, 1, 3)
    engine.submit("long", cache, 5, 1)
    assert engine.step() == {"0": 1, "1": 1, "2": 1, "long": 2}
    assert engine.step() == {"0": 1, "1": 1, "2": 1, "long": 2}


def test_rows_are_cut_to_what_the_instance_takes() -> None:
    engine, memory = SchedulerDriver(max_num_batched_tokens=50), Memory(1000)
    engine.submit("ring", FakeCache("ring", memory, max_row=3), 8)
    engine.submit("free", FakeCache("free", memory), 20)
    assert [engine.step() for _ in range(3)] == [
        {"ring": 3, "free": 20},
        {"free": 1, "ring": 3},
        {"free": 1, "ring": 2},
    ]


def test_seats_are_limited() -> None:
    engine, cache = SchedulerDriver(max_num_seqs=2), FakeCache("a", Memory(1000))
    for i in range(3):
        engine.submit(str(i), cache, 2, 2)
    assert engine.step() == {"0": 2, "1": 2}
    assert engine.step() == {"0": 1, "1": 1}
    assert engine.step() == {"2": 2}


def test_what_a_waiting_request_waits_for() -> None:
    engine, memory = SchedulerDriver(max_num_seqs=3, max_num_batched_tokens=3), Memory(22)
    wide, narrow = FakeCache("wide", memory, reserve=12), FakeCache("narrow", memory)
    engine.submit("first", wide, 3, 9)
    engine.submit("big", wide, 4)
    engine.submit("later", narrow, 2, 5)
    engine.step()
    waits = engine.scheduler.count_waiting
    assert waits() == {("wide", "turn"): 1, ("narrow", "turn"): 1}, "the step's tokens were the first one's"
    engine.step()
    assert waits() == {("wide", "memory"): 1}
    engine.submit("behind", wide, 4)
    assert waits() == {("wide", "memory"): 2}, "though nobody has asked for it"
    engine.submit("other", narrow, 1)
    engine.submit("last", narrow, 1)
    engine.step()
    assert waits() == {("wide", "seats"): 2, ("narrow", "seats"): 1}


def test_who_is_not_ready_is_left_out_and_keeps_its_seat() -> None:
    engine, cache = SchedulerDriver(), FakeCache("a", Memory(1000))
    cache.opens_ready = False
    waits = engine.submit("waits", cache, 5)
    assert engine.step() == {}
    assert waits.sequence is not None
    cache.opens_ready = True
    engine.submit("goes", cache, 5)
    assert engine.step() == {"goes": 5}
    assert engine.step() == {"goes": 1}
    cache.not_ready.clear()
    assert engine.step() == {"waits": 5, "goes": 1}


def test_if_nobody_is_ready_everybody_waits() -> None:
    engine, cache = SchedulerDriver(max_num_batched_tokens=20), FakeCache("a", Memory(1000))
    cache.opens_ready = False
    requests = [engine.submit(str(i), cache, 5) for i in range(2)]
    for _ in range(2):
        assert engine.step() == {}
    cache.not_ready.clear()
    assert engine.step() == {"0": 5, "1": 5}
    assert [request.num_preemptions for request in requests] == [0, 0]


def test_if_nobody_who_is_ready_has_room_the_last_in_line_gives_way() -> None:
    engine, cache = SchedulerDriver(max_num_batched_tokens=20), FakeCache("a", Memory(10))
    cache.opens_ready = False
    waits = engine.submit("waits", cache, 5)
    assert engine.step() == {}
    cache.opens_ready = True
    needs = engine.submit("needs", cache, 5, priority=1)
    assert engine.step() == {"needs": 5}
    assert engine.step() == {}
    assert (waits.num_preemptions, needs.num_preemptions) == (0, 1)
    cache.not_ready.clear()
    assert engine.step() == {"waits": 5}


# -------------------------------------------------------------------- victims
def test_the_last_in_line_gives_way() -> None:
    engine, cache = SchedulerDriver(max_num_batched_tokens=20), FakeCache("a", Memory(9))
    requests = [engine.submit(str(i), cache, 3, 5) for i in range(3)]
    engine.step()
    small = engine.submit("small", FakeCache("b", cache.memory), 1)
    assert engine.step() == {"0": 1, "1": 1}
    assert [request.num_preemptions for request in requests] == [0, 0, 1]
    assert engine.scheduler.waiting == [requests[2], small], "nobody is taken in where somebody had to go"


def test_what_cannot_be_recomputed_gives_way_last() -> None:
    engine, memory = SchedulerDriver(max_num_batched_tokens=20), Memory(9)
    first = engine.submit("first", FakeCache("a", memory), 3, 5)
    second = engine.submit("second", FakeCache("b", memory), 3, 5)
    precious = engine.submit("precious", FakeCache("c", memory, replayable=False), 3, 5)
    engine.step()
    engine.step()
    assert (first.num_preemptions, second.num_preemptions, precious.num_preemptions) == (0, 1, 0)


def test_the_own_instance_gives_way_before_another() -> None:
    engine, memory = SchedulerDriver(max_num_batched_tokens=20), Memory(9)
    cache = FakeCache("a", memory)
    engine.submit("first", cache, 3, 5)
    own = engine.submit("own", cache, 3, 5)
    other = engine.submit("other", FakeCache("b", memory, reserve=3), 3, 5)
    engine.step()
    engine.step()
    assert (own.num_preemptions, other.num_preemptions) == (1, 0)


def test_nobody_in_the_step_already_gives_way() -> None:
    engine, cache = SchedulerDriver(max_num_batched_tokens=3), FakeCache("a", Memory(9), lazy=True)
    second = engine.submit("second", cache, 2, 7, priority=1)
    assert engine.step() == {"second": 2}
    engine.submit("first", cache, 8, 1)
    assert engine.step() == {"second": 1, "first": 3}
    for _ in range(3):  # the first has no room, but who decodes is in the step before it is asked
        assert engine.step() == {"second": 1}
    assert engine.step() == {"first": 3}, "now neither has room, and who is behind gives way"
    assert second.num_preemptions == 1


def test_nobody_gives_way_where_it_would_not_be_enough() -> None:
    engine, memory = SchedulerDriver(kv_bytes=20), Memory(20)
    engine.submit("equal", FakeCache("a", memory), 12, 4)
    low = engine.submit("low", FakeCache("b", memory), 3, 3, priority=5)
    engine.step()
    engine.step()
    high = engine.submit("high", FakeCache("c", memory), 10, 1)
    engine.step()
    assert (high.sequence, low.num_preemptions) == (None, 0)


def test_who_gave_way_in_vain_does_so_only_once() -> None:
    """If the caches have less memory than they claim, a preempted request could be preempted again and again."""
    engine, memory = SchedulerDriver(kv_bytes=1000), Memory(20)
    engine.submit("equal", FakeCache("a", memory, reserve=12), 3, 9)
    low = engine.submit("low", FakeCache("b", memory), 3, 3, priority=5)
    engine.step()
    high = engine.submit("high", FakeCache("c", memory), 10, 2)
    steps = [engine.step() for _ in range(14)]
    assert high.finish_reason == low.finish_reason == "length"
    assert low.num_preemptions == 1
    assert [name for name in ("high", "low") for step in steps[:8] if name in step] == [], "before the equal has ended"


# -------------------------------------------------------------------- refusals
def test_what_can_never_run_is_refused_before_it_takes_a_place() -> None:
    engine, cache = SchedulerDriver(max_queued_requests=0, max_num_seqs=1), FakeCache("a", Memory(60), limit=50)
    with pytest.raises(RequestError, match="prompt \\(90 tokens\\) and max_tokens \\(11\\) add up to 101 tokens"):
        engine.submit("long", cache, 90, 11)
    with pytest.raises(RequestError, match="needs 51 bytes of KV memory, and strategy 'a' may hold 50"):
        engine.submit("large", cache, 48, 3)
    engine.submit("fits", cache, 47, 3)
    with pytest.raises(RequestError) as caught:
        engine.submit("late", cache, 1, 1)
    assert caught.value.status == 429


# -------------------------------------------------------------------- drafts
def decoding(
    engine: SchedulerDriver, name: str, cache: KVCache, prompt: int, max_tokens: int, num_draft_tokens: int
) -> Request:
    """Return a request that has its first token and a proposer of drafts."""
    request = engine.submit(name, cache, prompt, max_tokens)
    engine.step()
    request.proposer = PerfectProposer(num_draft_tokens)  # type: ignore[assignment]
    return request


def drafts(engine: SchedulerDriver) -> dict[str, int]:
    rows, preempted, _, _ = engine.scheduler.schedule()
    assert not preempted
    return {engine.names[row.request]: len(row.draft) for row in rows}


def test_a_draft_comes_behind_the_last_token_of_a_text() -> None:
    engine, memory = SchedulerDriver(), Memory(1000)
    decoding(engine, "all", FakeCache("a", memory), 3, 20, num_draft_tokens=4)
    decoding(engine, "ring", FakeCache("ring", memory, max_row=3), 3, 20, num_draft_tokens=4)
    decoding(engine, "end", FakeCache("b", memory), 3, 4, num_draft_tokens=4)
    engine.submit("prompt", FakeCache("c", memory), 1).proposer = PerfectProposer(4)  # type: ignore[assignment]
    assert drafts(engine) == {"all": 4, "ring": 2, "end": 2, "prompt": 0}


def test_drafts_take_what_is_left_of_a_step() -> None:
    engine, cache = SchedulerDriver(max_num_batched_tokens=9, max_num_seqs=9), FakeCache("a", Memory(1000))
    decoding(engine, "first", cache, 3, 20, num_draft_tokens=3)
    decoding(engine, "second", cache, 3, 20, num_draft_tokens=3)
    engine.submit("prompt", cache, 5)
    assert drafts(engine) == {"first": 3, "second": 1, "prompt": 0}


def test_drafts_take_no_more_logits_than_a_step_has_room_for() -> None:
    engine, cache = SchedulerDriver(max_logprob_tokens=2), FakeCache("a", Memory(1000))
    decoding(engine, "first", cache, 3, 20, num_draft_tokens=4)
    decoding(engine, "second", cache, 3, 20, num_draft_tokens=4)
    assert drafts(engine) == {"first": 2, "second": 0}


def test_nobody_gives_way_for_a_draft() -> None:
    engine, cache = SchedulerDriver(), FakeCache("a", Memory(12), lazy=True)
    requests = [engine.submit(name, cache, 4, 6) for name in ("first", "second")]
    engine.step()
    for request in requests:
        request.proposer = PerfectProposer(3)  # type: ignore[assignment]
    assert drafts(engine) == {"first": 0, "second": 0}, "there is room for 4 more tokens, of which the two take 2"
    assert len(engine.scheduler.running) == 2
