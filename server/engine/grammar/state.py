"""The state of a request's grammar: which tokens may come next, after the request's text or after a draft.

The state follows from the tokens of the output alone. Drafts are undone before every other use, so that a step that
fails leaves nothing behind, and a state that llguidance gave up because of a draft is made again from the output. So is
one whose lexer, which all texts of a grammar share, has reached its limits. Knows neither the batch nor the model.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from server.engine.grammar.compiled import CompiledGrammar
from server.engine.grammar.meter import GrammarMeter
from server.grammar.matcher import describe_error, may_be_lexer_error

# CPU seconds beyond which the work of one step on a grammar is slow, and the most slow seconds of a request. A grammar
# may come close to llguidance's limits in every step; this bounds what it takes from other requests.
SLOW_STEP = 0.01
MAX_SLOW_SECONDS = 0.5


class GrammarState:
    """The state of one request's grammar."""

    def __init__(self, grammar: CompiledGrammar, vocab_size: int, meter: GrammarMeter | None = None) -> None:
        """Begin at the start of a compiled grammar.

        `vocab_size`: the number of logits of the model; `meter` counts the time that the grammar takes in steps.
        """
        self._grammar = grammar
        self._start = grammar.start  # the matcher that was copied
        self._matcher = self._start.deep_copy()
        self._vocab_size = vocab_size
        self._meter = meter or GrammarMeter()
        self._accepted: list[int] = []  # the tokens of the output
        self._num_drafted = 0  # number of draft tokens that the matcher has consumed after the output
        self._has_new_lexer = False  # whether, since the call began, nothing else has used the lexer
        self._must_end = False  # whether the vocabulary has no token that may follow the output, which may end
        self._has_ended = False  # whether the output has ended for that reason
        self._slow_seconds = 0.0
        self.fault: str | None = None  # why the request cannot go on; None: it can
        self.draft_fault: str | None = None  # why there is no mask after some token of the last draft; None: there is

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow the output."""
        self._undo_draft()
        return self.fault is None and (self._has_ended or bool(self._matcher.is_stopped()))

    def accept(self, token: int) -> None:
        """Append an allowed token to the output. Sets `fault` if it is not allowed, or too much work."""
        if self._must_end:  # the token ends the model's texts, but is ignored by the request
            self._has_ended = True
            return
        began = self._begin()
        self._accepted.append(token)
        if not self._matcher.consume_token(token) and not self._renew():
            self.fault = self.fault or describe_error(self._matcher)
        self._count_time(began)

    def record_failure(self) -> None:
        """Count that the grammar ends its request."""
        self._meter.failures += 1

    def cut_draft(self, draft: Sequence[int]) -> list[int]:
        """Return the beginning of a draft that the grammar allows; after it, at least one token can follow."""
        began = self._begin()
        kept = list(draft[: self._matcher.validate_tokens(list(draft))])
        if kept and self._consume_draft(kept) and self._matcher.is_stopped():
            kept.pop()  # the token that completes the text is drawn, as the text ends with it
        self._undo_draft()
        self._count_time(began)
        return kept

    def compute_masks(
        self, draft: Sequence[int], end_ids: Collection[int], eos_ids: Collection[int]
    ) -> list[NDArray[np.bool_]]:
        """Return which tokens [V] may come after the output, and after each token of the draft; none after a fault.

        The tokens `end_ids`, which end the request's text, and the model's own `eos_ids` are allowed only where the
        grammar may end. Where nothing but the end is allowed, all of them are.
        """
        began = self._begin()
        masks = self._try_masks(draft, end_ids, eos_ids)
        while self._matcher.is_error() and self._renew():
            masks = self._try_masks(draft, end_ids, eos_ids)
        self.draft_fault = describe_error(self._matcher) if self._matcher.is_error() else None
        if not masks[0].any():
            self.fault = self.fault or self.draft_fault
        self._undo_draft()
        self._count_time(began)
        return masks + [self._make_empty_mask()] * (len(draft) + 1 - len(masks))

    def _try_masks(
        self, draft: Sequence[int], end_ids: Collection[int], eos_ids: Collection[int]
    ) -> list[NDArray[np.bool_]]:
        """Return the masks after the output and after the tokens of the draft, up to one that cannot be computed."""
        mask, self._must_end = self._compute_mask(end_ids, eos_ids)
        masks = [mask]
        for token in draft:
            if not self._consume_draft([token]):
                break
            mask, _ = self._compute_mask(end_ids, eos_ids)
            masks.append(mask)
        return masks

    def _compute_mask(self, end_ids: Collection[int], eos_ids: Collection[int]) -> tuple[NDArray[np.bool_], bool]:
        """Return which tokens [V] may come next, and what `allow_ends` returns; an empty mask after an error."""
        allowed = self._make_empty_mask()
        if self._matcher.is_error():
            return allowed, False
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return allowed, False
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        size = min(self._grammar.end_id, self._vocab_size)
        allowed[:size] = bits[:size]  # ids beyond the tokenizer's, which pad the model's vocabulary, are never allowed
        return allowed, allow_ends(allowed, end_ids, eos_ids, may_end=bool(bits[self._grammar.end_id]))

    def _make_empty_mask(self) -> NDArray[np.bool_]:
        return np.zeros(self._vocab_size, np.bool_)

    def _consume_draft(self, tokens: Sequence[int]) -> bool:
        """Consume draft tokens; return whether the grammar allows all of them. Stops before one that is not allowed."""
        for token in tokens:
            if not self._matcher.validate_tokens([token]) or not self._matcher.consume_token(token):
                return False
            self._num_drafted += 1
        return True

    def _undo_draft(self) -> None:
        """Roll the matcher back from the end of a draft to the end of the output."""
        if self.fault is not None or not (self._num_drafted or self._matcher.is_error()):
            return
        count, self._num_drafted = self._num_drafted, 0
        if self._matcher.is_error() or not self._matcher.rollback(count):
            self._has_new_lexer = False  # the draft is at fault, not the text
            if not self._restart() and not self._renew():
                self.fault = describe_error(self._matcher)

    def _restart(self) -> bool:
        """Make the state anew from the start of the grammar and the output; return whether that succeeded."""
        self._matcher, self._num_drafted = self._start.deep_copy(), 0
        return self._matcher.consume_tokens(self._accepted)

    def _renew(self) -> bool:
        """Go on with another lexer, if the error may be that of the shared one; return whether that succeeded.

        The text itself is at fault if a lexer that nothing else has used is not enough for it.
        """
        while may_be_lexer_error(self._matcher) and not self._has_new_lexer:
            if self._grammar.start is self._start:
                if not self._grammar.renew():
                    return False
                self._has_new_lexer = True
            self._start = self._grammar.start
            if self._restart():
                return True
        return False

    def _begin(self) -> float:
        """Begin a call: undo drafts; return the CPU time when it began."""
        began, self._has_new_lexer = time.thread_time(), False
        self._undo_draft()
        return began

    def _count_time(self, began: float) -> None:
        """Count the CPU time since `began`; set `fault` if the grammar has taken too much."""
        seconds = time.thread_time() - began
        self._meter.step_seconds += seconds
        self._slow_seconds += max(0.0, seconds - SLOW_STEP)
        if self._slow_seconds > MAX_SLOW_SECONDS:
            self.fault = self.fault or "it takes too much time for each token; send a simpler one"


def allow_ends(
    allowed: NDArray[np.bool_], end_ids: Collection[int], eos_ids: Collection[int], *, may_end: bool
) -> bool:
    """Allow tokens that end texts where the grammar may end, and only there: change the mask `allowed` [V].

    Return whether the text must end although the request has no token for that (`ignore_eos`): nothing else may follow.
    """
    ends = [*{*end_ids, *eos_ids}]
    as_text = allowed[ends]
    allowed[ends] = False
    if not may_end:
        if not allowed.any():
            allowed[ends] = as_text  # the text goes on with one of them, or not at all
        return False
    allowed[[*end_ids]] = True
    must_end = not allowed.any()
    if must_end:
        allowed[ends] = True
    return must_end
