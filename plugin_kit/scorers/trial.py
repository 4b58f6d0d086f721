"""One scorer that is checked: alone, on the past of a layer, and under the strategy `compressed`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.ops import Ops
from kernels.types import LayerSpec
from plugin_kit.scorers.texts import ScoredText, layer_specs, rotate
from plugin_kit.strategies.trial import StrategyTrial

BOUNDARIES = (40, 24, 40)  # tokens from one boundary to the next
UNDER_COMPRESSED = (  # options of `compressed`, beside those that follow from the scorer
    {"budget": 14, "recent": 3, "sinks": 2},
    {"budget": 0.3, "recent": 2, "sinks": 0, "by_head": True},
    {"budget": 0.4, "recent": 2, "sinks": 1, "by_layer": "pyramid"},
)
_ROTATED = partial(rotate, rotated=16)
LAYERS = (  # two layers of equal heads, as scorers that look at queries need them, and one with a window
    LayerSpec(2, 4, 16, 16, scale=0.25, rotate=_ROTATED),
    LayerSpec(2, 4, 16, 16, scale=0.4, softcap=4.0, rotate=_ROTATED),
    LayerSpec(1, 4, 16, 8, window=24, scale=0.3, rotate=_ROTATED),
)


@dataclass(frozen=True)
class ScorerTrial:
    """A scorer to be checked, with its options."""

    name: str  # as an option of `compressed`
    cls: type[Scorer]
    options: Mapping[str, Any]
    ops: Ops
    rng: random.Random

    def make_scorer(self) -> Scorer:
        """Return a new scorer."""
        return self.cls(self.cls.options_type.model_validate(dict(self.options)))

    def iter_layers(self, scorer: Scorer) -> Iterator[tuple[str, LayerSpec]]:
        """Yield layers that the scorer can serve, by name."""
        for name, spec in layer_specs().items():
            try:
                scorer.check_layers([spec])
            except SettingsError:
                continue
            yield name, spec

    def make_text(self, spec: LayerSpec, scorer: Scorer) -> ScoredText:
        """Return a random text that is long enough for the scorer's queries and for all boundaries."""
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 32))
        return ScoredText(spec, generator, sum(list_boundaries(scorer)))

    def make_strategy_trial(self, options: Mapping[str, Any]) -> StrategyTrial:
        """Return the trial of `compressed` with this scorer, and a budget that bites."""
        num_queries = self.make_scorer().num_queries
        every = max(16, num_queries or 0)
        settings = {"every": every, "block_size": 16, "scorer": self.name, "scorer_options": self.options, **options}
        return StrategyTrial(StrategySettings(kind="compressed", **settings), self.ops, self.rng, LAYERS)


def list_boundaries(scorer: Scorer) -> list[int]:
    """Return how many tokens come before each boundary of a text: at least as many as the scorer has queries."""
    return [max(tokens, scorer.num_queries or 0) for tokens in BOUNDARIES]


def check_stored(past: Past) -> None:
    """Assert that what a scorer has stored has the right types and shapes."""
    for what, stored in (("state", past.state), ("key_state", past.key_state)):
        for key, x in stored.items():
            assert isinstance(x, Tensor), f"past.{what}[{key!r}] is {type(x).__name__}, not a tensor"
    for key, x in past.key_state.items():
        wanted = list(past.positions.shape)
        assert list(x.shape) == wanted, f"past.key_state[{key!r}] has shape {list(x.shape)}, not [H, S] = {wanted}"


def score_text(
    scorer: Scorer, text: ScoredText, score: Callable[[Past], Tensor] | None = None
) -> Iterator[tuple[Past, Tensor]]:
    """Score a text at each boundary, by `score` if given, and keep the best two thirds of its keys.

    Yield what was scored, and the scores.
    """
    for num_tokens in list_boundaries(scorer):
        past = text.read(num_tokens, scorer)
        scores = (score or scorer.score)(past)
        yield past, scores
        check_stored(past)
        text.keep_highest(past, scores.float().nan_to_num(0.0), past.positions.shape[1] * 2 // 3)
