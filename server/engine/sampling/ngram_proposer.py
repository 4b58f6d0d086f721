"""Proposes draft tokens for speculative decoding from a request's own text. Knows no model.

Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"; vLLM's method `ngram`) searches the text for an earlier occurrence
of its last few tokens; the tokens that followed there are the draft. This helps where the output repeats the input:
summaries, edits, code, questions about a document. `sampler.py` verifies drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from server.engine.ipc.messages import Speculation


class NgramProposer:
    """Proposes drafts for the growing text of one request.

    It searches an array of the text's token ids, at 4 bytes per token. numpy compares all of them with one id in
    microseconds, so no index is needed.
    """

    def __init__(self, config: Speculation, max_tokens: int) -> None:
        """Make a proposer for a text of about `max_tokens` tokens; for a longer one, the array grows."""
        self._config = config
        self._ids: NDArray[np.int32] = np.empty(max_tokens, np.int32)
        self._length = 0  # number of the text's tokens that are in the array
        self._max_draft_tokens = config.num_speculative_tokens

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` draft tokens to follow the text; an empty list if its end has no earlier match.

        `text` must extend the text of the last call. The longest match is used, and of equally long ones the last. A
        draft that reaches the text's end continues with its own first tokens, as if the text repeated itself.
        """
        if len(text) > len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(len(text), np.int32)))
        self._ids[self._length : len(text)] = text[self._length :]
        self._length = len(text)
        begin = self._find_match()
        if begin is None:
            return []
        return [text[begin + i % (len(text) - begin)] for i in range(min(max_tokens, self._max_draft_tokens))]

    def update_draft_length(self, accepted: int) -> None:
        """Set the maximum length of the next draft to 2 * accepted + 1: longer after an accepted draft."""
        self._max_draft_tokens = min(self._config.num_speculative_tokens, 2 * accepted + 1)

    def _find_match(self) -> int | None:
        """Return the index after the longest (then latest) earlier match of the last tokens; None if there is none."""
        ids, config = self._ids[: self._length], self._config
        ends = np.flatnonzero(ids[:-1] == ids[-1]) + 1  # indices after earlier occurrences of the last token
        length = min(1, len(ends))  # number of tokens before each index in `ends` that are known to match
        while len(ends) and length < config.prompt_lookup_max:
            longer = ends[ends > length]
            longer = longer[ids[longer - length - 1] == ids[-length - 1]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return int(ends[-1]) if len(ends) and length >= config.prompt_lookup_min else None
