"""Drafts are the tokens that followed an earlier match of the text's end, compared with a search of all positions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.ipc.messages import Speculation
from server.engine.sampling.ngram_proposer import NgramProposer
from server.engine.scheduling.request import RequestError
from tests.engine.scheduling.scheduler_driver import LIMITS


def found(text: Sequence[int], how: Speculation, most: int) -> list[int]:
    """Return the draft of the longest match, then the latest; tokens that it appends may be read again."""
    for same in range(min(how.prompt_lookup_max, len(text) - 1), how.prompt_lookup_min - 1, -1):
        for place in range(len(text) - 1, same - 1, -1):
            if list(text[place - same : place]) == list(text[-same:]):
                longer = list(text)
                for i in range(min(most, how.num_speculative_tokens)):
                    longer.append(longer[place + i])
                return longer[len(text) :]
    return []


HOW = st.integers(1, 4).flatmap(
    lambda most: st.builds(Speculation, st.integers(1, 6), st.just(most), st.integers(1, most))
)


@settings(max_examples=400)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), HOW, st.integers(1, 7), st.integers(1, 5))
def test_as_by_looking_at_every_place(text: list[int], how: Speculation, most: int, at_once: int) -> None:
    lookup = NgramProposer(how, len(text))
    for end in range(1, len(text) + 1, at_once):
        assert lookup.propose(text[:end], most) == found(text[:end], how, most)


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1, 2]),
        ([1, 2, 8, 5, 3, 2, 7, 5, 1, 2], [8, 5, 3, 2]),  # two in common are better than a later place with one
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9]),  # of equal ones the latest
        ([6, 4, 4], [4, 4, 4, 4]),
        ([6, 7, 8, 7, 8], [7, 8, 7, 8]),
        ([1, 2, 3], []),
        ([5], []),
    ],
)
def test_what_follows_where_the_end_stood_before(text: list[int], draft: list[int]) -> None:
    assert NgramProposer(Speculation(4), 20).propose(text, 9) == draft


def test_too_little_in_common_is_nothing() -> None:
    text = [1, 2, 8, 9, 5, 8, 9, 2]
    assert NgramProposer(Speculation(2, prompt_lookup_min=1), 20).propose(text, 9) == [8, 9]
    assert NgramProposer(Speculation(2, prompt_lookup_min=2), 20).propose(text, 9) == []


def test_the_next_draft_is_shorter_after_a_wrong_one_and_longer_after_a_right_one() -> None:
    lookup, text, lengths = NgramProposer(Speculation(7), 20), [4] * 10, []
    for accepted in (0, 1, 3, 7, 2, 0):
        lookup.update_draft_length(accepted)
        lengths.append(len(lookup.propose(text, 9)))
    assert lengths == [1, 3, 7, 7, 5, 1]


def test_a_request_asks_for_less_or_as_much_as_the_settings_allow_and_gets_theirs_if_it_says_nothing() -> None:
    limits = LIMITS._replace(num_speculative_tokens=2, max_speculative_tokens=5)
    assert limits.resolve_speculation(None) == Speculation(2)
    for num_tokens in (0, 5):
        assert limits.resolve_speculation(Speculation(num_tokens, 6, 3)) == Speculation(num_tokens, 6, 3)
    with pytest.raises(RequestError, match=r"num_speculative_tokens: should be at most 5 on this server, not 6"):
        limits.resolve_speculation(Speculation(6))
