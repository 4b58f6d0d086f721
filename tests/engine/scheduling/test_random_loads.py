"""For any load, each step of the scheduler stays within the limits, and all requests end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.scheduling.step import Scheduled
from tests.engine.scheduling.fake_caches import FakeCache, FakeSequence, Memory
from tests.engine.scheduling.scheduler_driver import PerfectProposer, SchedulerDriver, enter


class Load(NamedTuple):
    """A request of a random load."""

    cache: int
    prompt: int
    max_tokens: int
    priority: int
    pause: int  # steps before it comes
    num_draft_tokens: int


LOADS = st.lists(
    st.builds(
        Load,
        st.integers(0, 4),
        st.integers(1, 20),
        st.integers(1, 6),
        st.integers(0, 2),
        st.integers(0, 4),
        st.sampled_from([0, 0, 3]),
    ),
    min_size=1,
    max_size=20,
)


class Watched:
    """An engine whose steps are all checked."""

    def __init__(self, budget: int, seats: int, overcommit: float) -> None:
        memory = Memory(40)
        self.caches = [
            FakeCache("free", memory),
            FakeCache("rows", memory, max_row=2),
            FakeCache("slab", memory, reserve=26),
            FakeCache("precious", memory, replayable=False, limit=30),
            FakeCache("lazy", memory, lazy=True),
        ]
        self.memory = memory
        self.engine = SchedulerDriver(
            max_num_batched_tokens=budget, max_num_seqs=seats, kv_bytes=memory.total, kv_overcommit=overcommit
        )

    def step(self) -> None:
        scheduler = self.engine.scheduler
        busy = bool(scheduler.running or scheduler.waiting)
        decoding = [r for r in scheduler.running if r.num_remaining_tokens == 1]
        rows, preempted, _, _ = scheduler.schedule()
        assert rows or not busy, "nobody progresses"
        assert all(request.sequence is None and request in scheduler.waiting for request in preempted)
        self._check_rows(rows)
        left_out = [r for r in decoding if r.sequence is not None and r not in {row.request for row in rows}]
        prefilling = [row for row in rows if row.request not in decoding]
        blocked = [r for r in left_out if not r.instance.at_limit]  # by others: not by the limit of their own instance
        assert not blocked or not prefilling or self.memory.free == 0, "a prompt came before a decoding request"
        for row in rows:
            enter(scheduler, row.request, row.num_tokens, accepted=len(row.draft) // 2)

    def _check_rows(self, rows: Sequence[Scheduled]) -> None:
        limits = self.engine.scheduler.limits
        prompts = sum(num_tokens for request, num_tokens, *_ in rows if request.num_remaining_tokens > 1)
        assert prompts <= limits.max_num_batched_tokens
        assert len(self.engine.scheduler.running) <= limits.max_num_seqs
        assert len({row.request for row in rows}) == len(rows)
        assert prompts + sum(len(row.draft) for row in rows) <= limits.max_num_batched_tokens
        for request, num_tokens, draft, samples, scores_prompt, _ in rows:
            assert samples == (num_tokens == request.num_remaining_tokens)
            assert scores_prompt == request.needs_prompt_logprobs
            assert isinstance(request.sequence, FakeSequence)
            entering = num_tokens + len(draft)
            assert 0 < num_tokens <= request.num_remaining_tokens
            assert entering <= (request.instance.strategy.max_row or entering)
            assert request.num_output_tokens + len(draft) < request.sampling.max_tokens
            assert request.sequence.held >= request.instance.bytes_for(request.sequence.length + entering)


@settings(max_examples=80)
@given(LOADS, st.integers(1, 12), st.integers(1, 5), st.sampled_from([1.0, 1.5, 9.0]))
def test_any_load_keeps_the_limits_and_comes_to_an_end(
    loads: list[Load], budget: int, seats: int, overcommit: float
) -> None:
    watched = Watched(budget, seats, overcommit)
    requests = []
    for i, load in enumerate(loads):
        for _ in range(load.pause):
            watched.step()
        cache = watched.caches[load.cache]
        requests.append(watched.engine.submit(str(i), cache, load.prompt, load.max_tokens, load.priority))
        if load.num_draft_tokens:
            requests[-1].proposer = PerfectProposer(load.num_draft_tokens)  # type: ignore[assignment]
    for _ in range(60 * len(loads)):
        watched.step()
    assert [request.finish_reason for request in requests] == ["length"] * len(loads)
    assert watched.memory.free == watched.memory.total
    assert not any(cache.open_sequences for cache in watched.caches)
