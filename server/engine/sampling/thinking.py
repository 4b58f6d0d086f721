"""Ends the reasoning of a text after a number of tokens, as vLLM's `thinking_token_budget` does.

The state follows from the tokens of the output alone; a draft changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from server.engine.ipc.messages import ThinkingBudget


@dataclass(frozen=True, slots=True)
class _State:
    """Where a text is after its last token."""

    is_thinking: bool
    recent: tuple[int, ...] = ()  # the last tokens, as many as the longest marker has
    num_tokens: int = 0  # of the reasoning so far
    num_closing: int = 0  # number of tokens of the closing text that have been written because the budget was used up


class ThinkingLimiter:
    """Limits the reasoning of one request."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._longest = max(map(len, (*budget.openings, *budget.ends)))
        self._state = _State(budget.is_open)
        self._num_read = 0  # tokens of the output

    def find_forced_tokens(self, output: Sequence[int], first: int, draft: Sequence[int]) -> list[int | None]:
        """Return for the token after the output, and after each token of the draft, which one it has to be, if any.

        The output are the tokens of `output` from index `first` on.
        """
        for token in output[first + self._num_read :]:
            self._state = self._follow(self._state, token)
            self._num_read += 1
        state, forced = self._state, [self._get_forced(self._state)]
        for token in draft:
            state = self._follow(state, token)
            forced.append(self._get_forced(state))
        return forced

    def _get_forced(self, state: _State) -> int | None:
        is_over = state.is_thinking and state.num_tokens >= self._budget.num_tokens
        return self._budget.closing[state.num_closing] if is_over else None

    def _follow(self, state: _State, token: int) -> _State:
        """Return the state after one more token."""
        budget, recent = self._budget, (*state.recent, token)[-self._longest :]
        forced = self._get_forced(state)
        state = replace(state, recent=recent)
        if forced is not None:
            num_closing = state.num_closing + (token == forced)
            is_closed = num_closing == len(budget.closing)
            return replace(state, is_thinking=not is_closed, num_closing=0 if is_closed else num_closing)
        if not state.is_thinking:
            return replace(state, is_thinking=_find_end(recent, budget.openings) > 0)
        if marker := _find_end(recent, budget.ends):
            return replace(state, is_thinking=False, num_tokens=state.num_tokens + 1 - marker)
        return replace(state, num_tokens=state.num_tokens + 1)


def _find_end(tokens: tuple[int, ...], markers: Sequence[tuple[int, ...]]) -> int:
    """Return the length of the longest marker that these tokens end with; 0 if there is none."""
    return max((len(marker) for marker in markers if tokens[-len(marker) :] == marker), default=0)
