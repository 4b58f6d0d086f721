"""Tests of all scorers: scores are those of the formulas, whatever was dropped before, and nothing else counts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cache_strategies.scorers import BUILTIN, load_scorer
from cache_strategies.scorers.base import Scorer
from plugin_kit.scorers.texts import ScoredText, layer_specs
from tests.cache_strategies.scorers import formulas
from tests.cache_strategies.scorers.generators import new_generator

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "expected_attention": [
        {"num_future_positions": 50, "sinks": 3},
        {"num_future_positions": 7, "use_covariance": False, "sinks": 0},
        {"num_future_positions": 32, "epsilon": 0.1},
        {"num_future_positions": 65, "use_vnorm": False},
    ],
    "lagkv": [{"lag_size": 8, "sinks": 2}, {"lag_size": 5, "sinks": 0}, {}],
    "r_kv": [{}, {"window": 5, "kernel_size": 3, "mix_lambda": 0.7, "threshold": 0.2}],
    "random": [{}, {"seed": 2**32 - 1}, {"per_head": False}],
    "snapkv": [{"window": 8, "kernel_size": 3}, {"window": 13, "kernel_size": 1}, {}],
}
CASES = [(name, options) for name in sorted(BUILTIN) for options in OPTIONS.get(name, [{}])]
LAYERS = layer_specs()
MARGIN = 1e-5  # float32 may be on the other side of a threshold that is nearer

every_scorer = pytest.mark.parametrize("name", sorted(BUILTIN))


def make_scorer(name: str, options: dict[str, Any] | None = None) -> Scorer:
    cls = load_scorer(name)
    return cls(cls.options_type(**(options or OPTIONS.get(name, [{}])[0])))


def assert_scores_follow_the_formula(name: str, scorer: Scorer, text: ScoredText, boundaries: list[int]) -> bool:
    """Score a text at boundaries; return False if it is too near to a jump of its formula to be compared."""
    history: dict[Any, Any] = {}
    formula: formulas.Formula = getattr(formulas, name)
    for num_tokens in boundaries:
        past = text.read(num_tokens, scorer)
        scores = scorer.score(past)
        wanted, margin = formula(text, past, scorer.options, history)
        if margin < MARGIN:
            return False
        assert scores.shape == past.positions.shape
        assert scores.is_floating_point()
        torch.testing.assert_close(scores.double(), torch.tensor(wanted).double(), rtol=5e-4, atol=2e-6)
        text.drop(past, past.positions.shape[1] * 2 // 3, same_in_all_heads=name == "tova")
    return True


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_scores_are_those_of_the_formula_at_each_boundary(
    name: str, options: dict[str, Any], rng: random.Random
) -> None:
    """In two kinds of layers, which are drawn anew in each run."""
    generator, scorer = new_generator(), make_scorer(name, options)
    for layer in rng.sample(sorted(LAYERS), 2):
        print(layer)
        # the third boundary is near: the last queries are also those of tokens whose keys were dropped
        while not assert_scores_follow_the_formula(
            name, scorer, ScoredText(LAYERS[layer], generator, 80), boundaries=[36, 20, 4]
        ):
            pass


@every_scorer
def test_keys_in_bfloat16_lead_to_nearly_the_same_choice(name: str) -> None:
    """Products in bfloat16 may choose otherwise only between keys of nearly equal scores, which are few."""
    generator, scorer = new_generator(), make_scorer(name)
    formula: formulas.Formula = getattr(formulas, name)
    num_same = num_kept = 0
    for _ in range(5):
        text, history = ScoredText(LAYERS["plain"], generator, 60), dict[Any, Any]()
        text.keys, text.values, text.queries = (x.bfloat16() for x in (text.keys, text.values, text.queries))
        for num_tokens in (40, 20):
            past = text.read(num_tokens, scorer)
            scores = scorer.score(past)
            wanted = torch.tensor(formula(text, past, scorer.options, history)[0])
            count = past.positions.shape[1] // 2
            kept, expected = (x.double().topk(count).indices for x in (scores, wanted))
            num_same += sum(len({*a} & {*b}) for a, b in zip(kept.tolist(), expected.tolist(), strict=True))
            num_kept += kept.numel()
            text.drop(past, 30, same_in_all_heads=name == "tova")
    assert num_same / num_kept > 0.95


@pytest.mark.parametrize(
    ("name", "constant", "value"),
    [
        ("h2o", "base.WEIGHTS_AT_ONCE", 3 * 6 * 40),
        ("snapkv", "base.WEIGHTS_AT_ONCE", 1),
        ("r_kv", "r_kv.KEYS_AT_ONCE", 7),
        ("r_kv", "r_kv.FIRST_KEYS", 1),
        ("expected_attention", "expected_attention.KEYS_AT_ONCE", 7),
    ],
)
def test_keys_and_queries_are_taken_a_few_at_a_time(
    name: str, constant: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"cache_strategies.scorers.{constant}", value)
    generator, scorer = new_generator(), make_scorer(name)
    while not assert_scores_follow_the_formula(
        name, scorer, ScoredText(LAYERS["plain"], generator, 60), boundaries=[36, 20]
    ):
        pass


@pytest.mark.parametrize("name", ["r_kv", "snapkv"])
def test_queries_that_see_none_of_the_kept_keys_have_no_weight(name: str) -> None:
    scorer, text = make_scorer(name), ScoredText(LAYERS["window"], new_generator(), 40)
    text.read(30, scorer)
    text.positions = text.positions[:, :10]  # out of the window of the last queries before the boundary
    past = text.read(4, scorer)
    wanted, margin = getattr(formulas, name)(text, past, scorer.options, {})
    scores = scorer.score(past)
    assert not scores.isnan().any()
    if margin > MARGIN:
        torch.testing.assert_close(scores.double(), torch.tensor(wanted).double(), rtol=5e-4, atol=2e-6)


@every_scorer
def test_a_scorer_changes_no_tensor_of_the_past_and_scores_it_again_alike(name: str) -> None:
    scorer, text = make_scorer(name), ScoredText(LAYERS["sinks"], new_generator(), 80)
    past = text.read(40, scorer)
    scorer.score(past)
    text.drop(past, 30, same_in_all_heads=True)
    past = text.read(20, scorer)
    tensors = {"positions": past.positions, "keys": past.keys, "values": past.values, "all queries": text.queries}
    tensors |= past.state | past.key_state
    before = {name: x.clone() for name, x in tensors.items()}
    scores = scorer.score(past)
    assert all(torch.equal(x, before[name]) for name, x in tensors.items())
    assert torch.equal(scores, scorer.score(text.past(20, scorer)))
    assert torch.equal(scores, make_scorer(name).score(text.past(20, scorer)))


@pytest.mark.parametrize("name", sorted(set(BUILTIN) - {"tova"}))
def test_other_heads_have_no_influence(name: str) -> None:
    scorer, text = make_scorer(name), ScoredText(LAYERS["plain"], new_generator(), 60)
    before = scorer.score(text.read(60, scorer))
    text.keys[:, 1] *= -3
    text.values[:, 1] += 5
    text.queries[:, text.spec.num_q_heads // 2 :] += 1
    after = scorer.score(text.past(60, scorer))
    torch.testing.assert_close(after[0], before[0])


@every_scorer
def test_a_text_of_one_token_has_a_score(name: str) -> None:
    for options in OPTIONS.get(name, [{}]):
        scorer, text = make_scorer(name, options), ScoredText(LAYERS["plain"], new_generator(), 1)
        scores = scorer.score(text.read(1, scorer))
        assert scores.shape == (2, 1)
        assert not scores.isnan().any()


@every_scorer
def test_keys_that_are_all_alike_have_scores(name: str) -> None:
    scorer, text = make_scorer(name), ScoredText(LAYERS["plain"], new_generator(), 60)
    for value in (0.0, 1.0):
        text.keys.fill_(value)
        text.values.fill_(value)
        assert not scorer.score(text.read(30, scorer)).isnan().any()


@every_scorer
def test_the_docstrings_name_the_scorer_and_say_what_it_does(name: str) -> None:
    cls = load_scorer(name)
    module = __import__(cls.__module__, fromlist=["_"])
    assert module.__doc__.startswith(f"{name}: keeps ")
    assert cls.__doc__ is not None
    assert cls.__doc__.startswith("Scores a ")
