"""The options of `compressed`, and how many keys they allow: of each layer, at each boundary of a text.

Knows numbers of tokens only; which keys are kept is the scorer's choice (selection.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from cache_strategies.block_table import TableOptions
from cache_strategies.scorers import load_scorer
from cache_strategies.scorers.base import Scorer
from cache_strategies.token_budget import TokenBudget
from config.errors import SettingsError
from config.wording import explain_problem
from kernels.types import LayerSpec

PYRAMID_SPREAD = 20  # `beta` of PyramidKV (arXiv:2406.02069): the last layer keeps about 1/20 of the mean


class CompressedOptions(TableOptions):
    """Options of a compressed cache: the scorer, how many keys it keeps, and when the others are dropped."""

    scorer: str = Field("keydiff", description="what ranks the keys: a built-in scorer, or one of a plug-in")
    scorer_options: Mapping[str, Any] = Field({}, description="options of the scorer")
    budget: TokenBudget = Field(
        0.5, description="keys that stay of each KV head: a number of tokens, or a share of the text (below 1)"
    )
    sinks: int = Field(4, ge=0, description="first tokens of a text that are never dropped")
    recent: int = Field(32, ge=0, description="latest tokens that are not dropped")
    every: int = Field(256, ge=1, description="tokens from one boundary to the next; keys are dropped at boundaries")
    by_layer: Literal["uniform", "pyramid"] = Field(
        "uniform", description="uniform: all layers keep equally many keys; pyramid: the first layers keep more"
    )
    by_head: bool = Field(False, description="let the KV heads of a layer share its budget by their scores (Ada-KV)")
    block_size: int = Field(32, ge=1, le=1024, description="tokens in a block")

    @model_validator(mode="after")
    def _check_protected(self) -> CompressedOptions:
        protected = self.sinks + self.recent
        if isinstance(self.budget, int) and self.budget <= protected:
            raise ValueError(
                f"a budget of {self.budget} tokens leaves nothing to choose beside {self.sinks} sinks and "
                f"{self.recent} recent tokens: make it at least {protected + 1}, or protect fewer"
            )
        return self


def make_scorer(name: str | None, options: CompressedOptions, layers: Sequence[LayerSpec]) -> Scorer:
    """Return the scorer of an instance, whose name is None while that is not known.

    Raises SettingsError for wrong options, or layers that it cannot serve.
    """
    cls = load_scorer(options.scorer)
    where = "" if name is None else f"strategies.{name}."
    given = dict(options.scorer_options)
    if "sinks" in cls.options_type.model_fields:
        given.setdefault("sinks", options.sinks)
    try:
        parsed = cls.options_type.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        option = ".".join((f"{where}scorer_options", *(str(part) for part in problem["loc"])))
        known = ", ".join(sorted(cls.options_type.model_fields)) or "none"
        message = explain_problem(option, problem)
        raise SettingsError(f"{message}; the options of scorer {options.scorer!r} are: {known}") from None
    scorer = cls(parsed)
    if scorer.num_queries is not None and scorer.num_queries > options.every:
        raise SettingsError(
            f"{where}every={options.every}: scorer {options.scorer!r} looks at the latest {scorer.num_queries} "
            "queries, more than there are from one boundary to the next: raise `every`, or let the scorer look at fewer"
        )
    try:
        scorer.check_layers([spec for spec in layers if spec.window is None])
    except SettingsError as error:
        raise SettingsError(f"{where}scorer: {error}") from None
    return scorer


class Budgets:
    """How many keys each KV head of a layer keeps at a boundary; a mean over its heads with `by_head`."""

    def __init__(self, options: CompressedOptions, windows: Sequence[int | None]) -> None:
        """Make the budgets of layers, of which those with a window keep the tokens that their next query sees."""
        self._options = options
        self._windows = windows
        self._ranks = {layer: i for i, layer in enumerate(i for i, w in enumerate(self._windows) if w is None)}

    def count_kept(self, layer: int, length: int) -> int:
        """Return the most keys that stay of a layer's heads when a text has `length` tokens."""
        window = self._windows[layer]
        if window is not None:
            return min(length, max(1, window - 1))
        options = self._options
        mean = options.budget if isinstance(options.budget, int) else math.ceil(options.budget * length)
        least = options.sinks + options.recent + 1
        if options.by_layer == "pyramid":
            mean = self._compute_pyramid(self._ranks[layer], mean, least)
        return min(length, max(least, mean))

    def _compute_pyramid(self, rank: int, mean: int, least: int) -> int:
        """Return the budget of the rank-th layer: they fall evenly from the first layer to the last, about a mean."""
        last = max(least, mean // PYRAMID_SPREAD)
        first = max(last, 2 * mean - last)
        steps = max(1, len(self._ranks) - 1)
        return round(first - (first - last) * rank / steps)
