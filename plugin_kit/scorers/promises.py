"""The promises of scorers: about `score` alone, and about the strategy `compressed` with the scorer.

With a budget that bites, `compressed` makes the promises of any strategy. It keeps them if the scorer keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer
from plugin_kit.promise import Promise, promise
from plugin_kit.scorers.texts import ScoredText
from plugin_kit.scorers.trial import UNDER_COMPRESSED, ScorerTrial, list_boundaries, score_text
from plugin_kit.strategies import PROMISES as STRATEGY_PROMISES
from plugin_kit.strategies.trial import StrategyTrial

UNDER = (  # of strategies: those that a scorer can break
    "attends to the keys it lists",
    "replayable",
    "chunk_invariant",
    "forkable",
    "survives a failed step",
    "survives a failed compaction",
    "same bits in a mixed batch",
    "frees all memory",
)


# ---------------------------------------------------------------- the scores
@promise(
    "a score for each key",
    "score() returns a floating-point number for each key of each head, [H, S], and never NaN for ordinary keys",
)
def check_shape(trial: ScorerTrial) -> None:
    """Score texts of several layers, and look at what is returned."""
    scorer = trial.make_scorer()
    queries = scorer.num_queries
    assert queries is None or (type(queries) is int and queries >= 0), f"num_queries is {queries!r}, not a number"
    names = []
    for name, spec in trial.iter_layers(scorer):
        names.append(name)
        for past, scores in score_text(scorer, trial.make_text(spec, scorer)):
            wanted = list(past.positions.shape)
            assert isinstance(scores, Tensor), f"score() returned {type(scores).__name__}, not a tensor"
            assert list(scores.shape) == wanted, f"score() returned shape {list(scores.shape)}, not [H, S] = {wanted}"
            assert scores.is_floating_point(), f"score() returned {scores.dtype}, not floating-point numbers"
            assert not scores.isnan().any(), f"score() returned NaN for ordinary keys of the layer {name!r}"
    assert names, "check_layers() refuses every kind of layer"


@promise("pure", "the same past gets the same scores, whatever was scored before, and is not changed")
def check_purity(trial: ScorerTrial) -> None:
    """Score the same past again, also with a new scorer, and look at what was only to be read."""
    scorer = trial.make_scorer()
    for name, spec in trial.iter_layers(scorer):
        _check_repeated_scores(trial.make_text(spec, scorer), scorer)
        twin, other = trial.make_text(spec, scorer), trial.make_scorer()
        found = [[scores for _, scores in score_text(each, _copy(twin))] for each in (other, scorer)]
        for boundary, (a, b) in enumerate(zip(*found, strict=True)):
            assert torch.equal(a, b), (
                f"a scorer that has seen other texts returns other scores (layer {name!r}, boundary {boundary + 1}): "
                "keep what belongs to a sequence in past.state or past.key_state"
            )


def _check_repeated_scores(text: ScoredText, scorer: Scorer) -> None:
    """Score a text twice at each boundary. Raises AssertionError if the scores, or what is read only, differ."""
    for num_tokens in list_boundaries(scorer):
        past = text.read(num_tokens, scorer)
        again = text.past(num_tokens, scorer)
        before = [x.clone() for x in _read_only(past, scorer)]
        scores, second = scorer.score(past).clone(), scorer.score(again)
        assert torch.equal(scores, second), (
            f"score() returned other scores for the same past (a text of {past.length} tokens): they must depend on "
            "`past` alone, or a sequence that is computed again keeps other keys"
        )
        for what, x, old in zip(
            ("keys", "values", "positions", "queries"), _read_only(past, scorer), before, strict=False
        ):
            assert torch.equal(x, old), f"score() changed past.{what}, which are read only"
        text.keep_highest(past, scores.float().nan_to_num(0.0), past.positions.shape[1] * 2 // 3)


def _read_only(past: Past, scorer: Scorer) -> list[Tensor]:
    return [past.keys, past.values, past.positions, *([] if scorer.num_queries == 0 else [past.queries])]


def _copy(text: ScoredText) -> ScoredText:
    """Return the text as it was before it was read."""
    copy = ScoredText(text.spec, torch.Generator(), len(text.keys), text.layer_idx)
    copy.keys, copy.values, copy.queries = text.keys, text.values, text.queries
    return copy


# ---------------------------------------------------------------- what is remembered
@promise(
    "remembers by sequence",
    "what is remembered from one boundary to the next is in past.state and past.key_state, apart for each sequence",
)
def check_state(trial: ScorerTrial) -> None:
    """Score two texts by turns, and look at what is stored of each."""
    scorer = trial.make_scorer()
    for name, spec in trial.iter_layers(scorer):
        texts = [trial.make_text(spec, scorer) for _ in range(2)]
        alone = [[scores for _, scores in score_text(scorer, _copy(text))] for text in texts]
        turns = zip(*(score_text(scorer, _copy(text)) for text in texts), strict=True)
        for boundary, pasts in enumerate(turns):
            for (_, scores), wanted in zip(pasts, alone, strict=True):
                assert torch.equal(scores, wanted[boundary]), (
                    f"scores depend on another sequence that is scored in between (layer {name!r}): keep what belongs "
                    "to a sequence in past.state or past.key_state, not in the scorer"
                )


@promise(
    "assigns new state", "tensors that were stored at the boundary before are left as they are, as forks share them"
)
def check_new_state(trial: ScorerTrial) -> None:
    """Look at whether score() changes the tensors that were stored before."""
    scorer = trial.make_scorer()
    for name, spec in trial.iter_layers(scorer):

        def score(past: Past, name: str = name) -> Tensor:
            old = {**past.state, **past.key_state}
            before = {key: x.clone() for key, x in old.items()}
            scores = scorer.score(past)
            for key, x in old.items():
                assert torch.equal(x, before[key]), (
                    f"score() changed the stored tensor {key!r} in place (layer {name!r}); forks of a sequence share "
                    "it, so assign a new one"
                )
            return scores

        for _ in score_text(scorer, trial.make_text(spec, scorer), score):
            pass


class FailingPast(Past):
    """A past of which the n-th look at keys, values or queries raises."""

    looks_left: int

    def _look(self) -> None:
        self.looks_left -= 1
        if self.looks_left < 0:
            raise RuntimeError("injected")

    @property
    def keys(self) -> Tensor:
        """Return the keys, or raise."""
        self._look()
        return super().keys

    @property
    def values(self) -> Tensor:
        """Return the values, or raise."""
        self._look()
        return super().values

    @property
    def queries(self) -> Tensor:
        """Return the queries, or raise."""
        self._look()
        assert self._queries is not None, "a scorer that reads queries sets num_queries"
        return self._queries.float()


@promise("survives a failed call", "a call of score() that raises changes nothing, and can be repeated")
def check_failed_calls(trial: ScorerTrial) -> None:
    """Let score() fail at each place where it looks at the past, call it again, and compare."""
    scorer = trial.make_scorer()
    for name, spec in trial.iter_layers(scorer):

        def score(past: Past, name: str = name) -> Tensor:
            wanted = scorer.score(_derive(past))
            for looks in range(12):
                failing = _derive(past, FailingPast)
                assert isinstance(failing, FailingPast)
                failing.looks_left = looks
                before = _list_stored(failing)
                try:
                    scorer.score(failing)
                except RuntimeError:
                    pass
                else:
                    break
                assert _list_stored(failing) == before, (
                    f"a call of score() that raised has stored something (layer {name!r}): assign state last"
                )
                assert torch.equal(scorer.score(_derive(past)), wanted), (
                    f"score() returns other scores after a call that raised (layer {name!r})"
                )
            return scorer.score(past)

        for _ in score_text(scorer, trial.make_text(spec, scorer), score):
            pass


def _list_stored(past: Past) -> list[tuple[str, int]]:
    return [(key, id(x)) for key, x in (*past.state.items(), *past.key_state.items())]


def _derive(past: Past, cls: type[Past] = Past) -> Past:
    """Return the same past, with the dictionaries of its state copied."""
    return cls(
        past.layer_idx,
        past.spec,
        past.length,
        past.num_new,
        past.positions,
        past._load_keys,
        past._load_values,
        past._queries,
        dict(past.state),
        dict(past.key_state),
        past.first_head,
        past.num_kept,
    )


# ---------------------------------------------------------------- under `compressed`
def _under(options: Mapping[str, Any], made: Promise[StrategyTrial]) -> Promise[ScorerTrial]:
    return Promise(
        f"under compressed: {made.name} ({', '.join(f'{name}={value}' for name, value in options.items())})",
        made.expected,
        lambda trial: made.check(trial.make_strategy_trial(options)),
        lambda trial: made.is_made(trial.make_strategy_trial(options)),
    )


PROMISES: Sequence[Promise[ScorerTrial]] = [  # those above, then those of strategies
    *(found for found in list(globals().values()) if isinstance(found, Promise)),
    *(_under(options, each) for options in UNDER_COMPRESSED for each in STRATEGY_PROMISES if each.name in UNDER),
]
