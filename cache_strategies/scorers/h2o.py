"""h2o: keeps the keys that got the most attention from all queries so far ("heavy hitters").

The attention weights of all queries of a text are summed, for each key. Needs the queries since the boundary before,
and keeps one number for each key. Queries see only the keys that were kept when they came, so a dropped key's weight
goes to others. Early keys have been seen by more queries, and so have higher sums: combine it with the strategy's
`recent`, as the paper does with half the budget.

After Zhang et al., "H2O: heavy-hitter oracle for efficient generative inference of large language models" (NeurIPS
2023, arXiv:2306.14048); the mean over a group's query heads as in kvpress.
"""

from __future__ import annotations

from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer


class H2O(Scorer):
    """Scores a key by the sum of the attention weights that it got from all queries, averaged over a group's heads."""

    num_queries = None

    def score(self, past: Past) -> Tensor:
        mass = past.sum_attention_weights() / past.num_groups
        known = past.key_state.get("attention_mass")
        past.key_state["attention_mass"] = mass if known is None else known + mass
        return past.key_state["attention_mass"]
