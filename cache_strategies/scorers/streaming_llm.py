"""streaming_llm: keeps the latest keys.

Together with the first tokens ("attention sinks"), which the strategy keeps by its option `sinks`, this is a sliding
window. Needs positions alone. Positions of the kept keys stay as they are in the text; they are not counted anew.

After Xiao et al., "Efficient streaming language models with attention sinks" (ICLR 2024, arXiv:2309.17453).
"""

from __future__ import annotations

from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer


class StreamingLLM(Scorer):
    """Scores a key by its position."""

    def score(self, past: Past) -> Tensor:
        return past.positions.float()
