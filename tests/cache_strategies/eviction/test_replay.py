"""Tests of the optimum against brute force, of replay against the optimum, and of the eviction policies' hit rates."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache_strategies.eviction import list_policies
from cache_strategies.eviction.optimum import compute_max_hits, count_distinct_blocks, make_visits
from cache_strategies.eviction.replay import RecordedRequest, compare_policies, main, read_requests, replay
from config.errors import SettingsError
from loadtest.traces import format_line, generate_trace

Text = tuple[int, ...]
Texts = list[tuple[Text, Text]]  # prompts and answers

POLICIES = sorted(list_policies())
TWO_TOKENS = st.integers(0, 1)
BUDGET = settings(max_examples=60)


def texts(prompt: int, answer: int, most: int) -> st.SearchStrategy[Texts]:
    """Return random texts of few distinct tokens, so that many prefixes are common."""
    pair = st.tuples(
        st.lists(TWO_TOKENS, min_size=1, max_size=prompt).map(tuple),
        st.lists(TWO_TOKENS, min_size=0, max_size=answer).map(tuple),
    )
    return st.lists(pair, min_size=1, max_size=most)


def blocks_of(text: Text, block_size: int) -> list[Text]:
    """Return every full block of a text, identified by all tokens up to its end."""
    return [text[:end] for end in range(block_size, len(text) + 1, block_size)]


def found(kept: frozenset[Text], prompt: Text, block_size: int) -> int:
    """Return the number of leading blocks of a prompt that are cached; its last token is always computed."""
    hits = 0
    for block in blocks_of(prompt[:-1], block_size):
        if block not in kept:
            break
        hits += 1
    return hits


def best_of_all_choices(asked: Texts, capacity: int) -> int:
    """Return the most hits on blocks of one token, by trying every set of blocks that could be kept."""

    @cache
    def best(i: int, kept: frozenset[Text]) -> int:
        if i == len(asked):
            return 0
        prompt, answer = asked[i]
        there = kept | set(blocks_of(prompt + answer, 1))
        choices = combinations(sorted(there), min(capacity, len(there)))
        return found(kept, prompt, 1) + max(best(i + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


def requests_of(asked: Sequence[tuple[Text, Text]]) -> list[RecordedRequest]:
    return [RecordedRequest(float(i), prompt, answer) for i, (prompt, answer) in enumerate(asked)]


# ---------------------------------------------------------------- the best there is
KEPT_IN_VAIN: Texts = [((0, 0), ()), ((1,), ()), ((0,), ()), ((1, 1), ())]  # a lone token is computed anyway


@BUDGET
@given(texts(4, 2, 5), st.integers(0, 3))
@example(KEPT_IN_VAIN, 1)
def test_belady_is_what_the_best_of_all_choices_finds(asked: Texts, capacity: int) -> None:
    """Brute force may not skip a missing block: that the bound may does not change the result."""
    assert compute_max_hits(make_visits(asked, 1), capacity) == best_of_all_choices(asked, capacity)


@BUDGET
@given(texts(12, 6, 12), st.integers(1, 3))
def test_with_room_for_all_everything_said_before_is_found(asked: Texts, block_size: int) -> None:
    known, hits = frozenset[Text](), 0
    for prompt, answer in asked:
        hits += found(known, prompt, block_size)
        known |= set(blocks_of(prompt + answer, block_size))
    visited = make_visits(asked, block_size)
    assert count_distinct_blocks(visited) == len(known)
    assert compute_max_hits(visited, len(known)) == hits
    for policy in POLICIES:
        result = replay(requests_of(asked), len(known) + 20, policy, block_size)
        assert result.cached_tokens == hits * block_size
        assert result.prompt_tokens == sum(len(prompt) for prompt, _ in asked)
        assert not result.evictions


@pytest.mark.parametrize("policy", POLICIES)
@BUDGET
@given(asked=texts(8, 4, 14), spare=st.integers(0, 8))
def test_no_policy_finds_more_than_the_best(policy: str, asked: Texts, spare: int) -> None:
    blocks = max(-(-len(prompt + answer) // 2) for prompt, answer in asked) + spare
    assert replay(requests_of(asked), blocks, policy, 2).cached_tokens <= 2 * compute_max_hits(
        make_visits(asked, 2), blocks
    )


def test_the_best_passes_over_what_is_never_wanted_again() -> None:
    asked = [((1, 1, 1), ()), *(((n, n, n), ()) for n in range(2, 30)), ((1, 1, 1), ())]
    assert compute_max_hits(make_visits(asked, 1), 2) == 2
    assert replay(requests_of(asked), 5, "lru", 1).cached_tokens == 0


# ---------------------------------------------------------------- how good the policies are
def test_with_half_the_memory_the_better_policy_comes_close_to_the_best() -> None:
    requests = list(read_requests(format_line(request) for request in generate_trace(0, 200)))
    results = list(compare_policies(requests, ["lru", "s3fifo"], [0.5]))
    assert min(r.hit_rate_gap for r in results) <= 5.0
    assert all(0.5 < r.rate < r.best_rate < 1 for r in results)
    assert all(r.evictions for r in results)


# ---------------------------------------------------------------- the command
TRACE = "".join(f"{format_line(request)}\n" for request in generate_trace(3, 10))


def test_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TRACE))
    main(["--policy", "lru", "--blocks-share", "0.9", "1"])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("| policy | share of the blocks | hit rate |")
    assert lines[2].startswith("| lru | 0.9 (")
    assert lines[3].endswith("| 0.0 points |")
    assert err.startswith("lru, ")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TRACE))
    main(["--blocks-share", "1", "--json"])
    results = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert [r["policy"] for r in results] == POLICIES
    assert all(r["rate"] == r["best_rate"] for r in results)


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ("", [], "the trace is empty"),
        ('{"time": 1}\n', [], "line 1 of the trace is not a request"),
        (TRACE + "{\n", [], "of the trace is not a request"),
        (TRACE, ["--blocks-share", "0.001"], "does not fit in"),
        (TRACE, ["--policy", "fifo"], "policies are lru, s3fifo"),
    ],
)
def test_what_cannot_be_replayed(
    lines: str, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    with pytest.raises(SystemExit):
        main(flags)
    assert message in capsys.readouterr().err


def test_a_request_that_can_never_fit_is_told() -> None:
    with pytest.raises(SettingsError, match="a request of 5 tokens does not fit in 1 blocks"):
        replay([RecordedRequest(0.0, (1, 2, 3), (4, 5))], 1, "lru", 4)
