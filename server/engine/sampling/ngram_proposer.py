"""Guesses at a text's next tokens, from the text itself. Knows no model, and not whether its guesses come true.

Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"; vLLM's method `ngram`): the last few tokens are looked for where
they stood before, and what followed there is the draft. Summaries, edits, code and questions about a document repeat
what they were given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from server.engine.ipc.messages import Speculation


class NgramProposer:
    """One growing text.

    Its ids stand in an array, which numpy compares with one of them in microseconds: there is no index to keep, and a
    token takes 4 bytes.
    """

    def __init__(self, config: Speculation, max_tokens: int) -> None:
        """`max_tokens`: as long as the text can get."""
        self._config = config
        self._ids = np.empty(max_tokens, np.int32)
        self._length = 0  # tokens of the text that stand there
        self._max_draft_tokens = config.num_speculative_tokens  # guesses that are made at once, at most

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens that may follow the text, which begins as it did last; none: its end is new.

        Of several places those count where more tokens are the same, and of these the last one. A draft that reaches
        the text's end goes on with its own beginning, so that a loop is found in full.
        """
        self._ids[self._length : len(text)] = text[self._length :]
        self._length = len(text)
        begin = self._find_match()
        if begin is None:
            return []
        return [text[begin + i % (len(text) - begin)] for i in range(min(max_tokens, self._max_draft_tokens))]

    def update_draft_length(self, accepted: int) -> None:
        """So many tokens of the last draft came true: the next one is as long as seems worth it."""
        self._max_draft_tokens = min(self._config.num_speculative_tokens, 2 * accepted + 1)

    def _find_match(self) -> int | None:
        """Return the index after the longest (then latest) earlier match of the last tokens; None if there is none."""
        ids, how = self._ids[: self._length], self._config
        behind = np.flatnonzero(ids[:-1] == ids[-1]) + 1  # places whose last token is the text's
        same = min(1, len(behind))  # tokens before all of these places that are also the text's last ones
        while len(behind) and same < how.prompt_lookup_max:
            longer = behind[behind > same]
            longer = longer[ids[longer - same - 1] == ids[-same - 1]]
            if not len(longer):
                break
            behind, same = longer, same + 1
        return int(behind[-1]) if len(behind) and same >= how.prompt_lookup_min else None
