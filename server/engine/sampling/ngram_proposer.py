"""Proposes drafts of a text's next tokens from the text itself. Knows no model.

Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"; vLLM's method `ngram`) searches the text for earlier occurrences
of its last few tokens; the tokens that followed there are the draft. Summaries, edits, code and questions about a
document repeat their input. `sampler.py` verifies drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from server.engine.ipc.messages import Speculation
from server.engine.scheduling.request import Request, RequestError
from server.engine.scheduling.scheduler import Limits


def resolve_speculation(requested: Speculation | None, limits: Limits) -> Speculation:
    """Return the speculation that a request asks for, else that of the settings. Raises RequestError."""
    if requested is None:
        return Speculation(limits.num_speculative_tokens)
    if (wanted := requested.num_speculative_tokens) > (most := limits.max_speculative_tokens):
        where = "speculative_config.num_speculative_tokens"
        raise RequestError(400, f"{where}: should be at most {most} on this server, not {wanted}", param=where)
    return requested


def make_proposer(request: Request, speculation: Speculation) -> NgramProposer | None:
    """Return the proposer of a request's drafts; None if it has none.

    A strategy whose state depends on how a text is cut into rows gets no drafts: they would change the text.
    """
    wanted = speculation.num_speculative_tokens > 0 and request.cache.contract.chunk_invariant
    return NgramProposer(speculation, request.max_total_tokens) if wanted else None


class NgramProposer:
    """Proposes drafts for one growing text.

    An array holds the text's ids. numpy compares all of them with one id in microseconds, so there is no index to
    maintain, and a token takes 4 bytes.
    """

    def __init__(self, config: Speculation, max_tokens: int) -> None:
        """Make a proposer for a text of up to `max_tokens` tokens."""
        self._config = config
        self._ids = np.empty(max_tokens, np.int32)
        self._length = 0  # tokens of the text in the array
        self._max_draft_tokens = config.num_speculative_tokens

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` draft tokens to follow the text; an empty list if its end has no earlier match.

        `text` begins with the text of the last call. Of several matches the longest counts, and of these the last. A
        draft that reaches the text's end goes on with its own beginning, so that a loop is proposed in full.
        """
        self._ids[self._length : len(text)] = text[self._length :]
        self._length = len(text)
        begin = self._find_match()
        if begin is None:
            return []
        return [text[begin + i % (len(text) - begin)] for i in range(min(max_tokens, self._max_draft_tokens))]

    def update_draft_length(self, accepted: int) -> None:
        """Set the length of the next draft from the number of accepted tokens of the last one."""
        self._max_draft_tokens = min(self._config.num_speculative_tokens, 2 * accepted + 1)

    def _find_match(self) -> int | None:
        """Return the index after the longest (then latest) earlier match of the last tokens; None if there is none."""
        ids, config = self._ids[: self._length], self._config
        behind = np.flatnonzero(ids[:-1] == ids[-1]) + 1  # places whose last token is the text's
        same = min(1, len(behind))  # tokens before all of these places that are also the text's last ones
        while len(behind) and same < config.prompt_lookup_max:
            longer = behind[behind > same]
            longer = longer[ids[longer - same - 1] == ids[-same - 1]]
            if not len(longer):
                break
            behind, same = longer, same + 1
        return int(behind[-1]) if len(behind) and same >= config.prompt_lookup_min else None
