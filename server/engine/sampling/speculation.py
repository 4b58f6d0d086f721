"""Whether a request's next tokens are guessed, and how many: what it asks for, within what the settings allow.

Knows not how guesses are found (`ngram_proposer.py`), nor which come true (`rejection_sampler.py`).
"""

from __future__ import annotations

from server.engine.ipc.messages import Speculation
from server.engine.sampling.ngram_proposer import NgramProposer
from server.engine.scheduling.request import Request, RequestError
from server.engine.scheduling.scheduler import Limits


def resolve_speculation(requested: Speculation | None, limits: Limits) -> Speculation:
    """Return the speculation that a request asks for, else that of the settings. Raises RequestError."""
    if requested is None:
        return Speculation(limits.num_speculative_tokens)
    if (guesses := requested.num_speculative_tokens) > (most := limits.max_speculative_tokens):
        where = "speculative_config.num_speculative_tokens"
        raise RequestError(400, f"{where}: should be at most {most} on this server, not {guesses}", param=where)
    return requested


def make_proposer(request: Request, speculation: Speculation) -> NgramProposer | None:
    """Where its guesses come from, if it wants any.

    Nor has it any where the cut of a text into rows shows in what the strategy keeps: drafts would change the text.
    """
    wanted = speculation.num_speculative_tokens > 0 and request.cache.contract.chunk_invariant
    return NgramProposer(speculation, request.max_total_tokens) if wanted else None
