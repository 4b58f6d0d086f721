"""Tests of scorers that run presses of kvpress, with presses written here: kvpress need not be installed.

`make test-kvpress` runs those of kvpress itself (tests/kvpress).
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_strategies.compressed.options import CompressedOptions, make_scorer
from cache_strategies.scorers import load_scorer
from cache_strategies.scorers.base import Past, Scorer
from cache_strategies.scorers.kvpress import adapt, compute_ratio, simplify_name
from config.errors import SettingsError
from kernels.types import LayerSpec
from plugin_kit.scorers.texts import ScoredText, layer_specs, rotate
from tests.cache_strategies.scorers.generators import new_generator

H, G, D = 2, 3, 16
LAYER = LayerSpec(H, H * G, D, D, scale=D**-0.5, rotate=partial(rotate, rotated=D))


@dataclass
class BasePress:
    """As in kvpress: what all presses have."""

    def post_init_from_model(self, model: Any) -> None: ...
    def compress(self) -> None: ...


@dataclass
class ScorerPress(BasePress):
    compression_ratio: float = 0.0

    def score(self, *arguments: Any) -> Tensor:
        raise NotImplementedError


@dataclass
class MyNormPress(ScorerPress):
    """Scores by norms, and says what it was called with."""

    factor: float = 2.0
    count: int = 3
    _inner: int = 0

    def __post_init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def score(self, *arguments: Any) -> Tensor:
        self.calls.append(arguments)
        assert self.count > 1, "it counts to one"
        return self.factor * arguments[2].norm(dim=-1)


class MyDrawPress(ScorerPress):
    def score(self, *arguments: Any) -> Tensor:
        return torch.rand(arguments[2].shape[:3])


class MyWrapperPress(ScorerPress):
    def __init__(self, press: Any) -> None: ...


class MyWeightsPress(ScorerPress):
    def post_init_from_model(self, model: Any) -> None: ...


class MyBudgetsPress(ScorerPress):
    def compress(self) -> None: ...


@pytest.fixture
def kvpress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let presses of this file be those of kvpress."""
    library = ModuleType("kvpress")
    found = {name: cls for name, cls in globals().items() if name.endswith("Press")}
    vars(library).update(found, __all__=list(found))
    monkeypatch.setitem(sys.modules, "kvpress", library)


# ---------------------------------------------------------------- names and options
def test_without_kvpress_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(SettingsError) as caught:
        load_scorer("kvpress:MyAbsent")
    message = str(caught.value)
    assert message.startswith("scorer 'kvpress:MyAbsent' needs kvpress and a transformers that it works with (")
    assert message.endswith("): pip install kvpress==0.5.5 'transformers>=5.2,<5.3'")
    assert "\n" not in message


@pytest.mark.parametrize("name", ["SnapKVPress", "SnapKV", "snapkv", "snap_kv", "snapkv_press", "SNAPKV"])
def test_a_press_is_named_in_several_ways(name: str) -> None:
    assert simplify_name(name) == "snapkv"


def test_a_name_may_leave_out_press_and_capitals(kvpress: None) -> None:
    names = ("MyNormPress", "MyNorm", "my_norm", f"{__name__}:MyNormPress")
    classes = [load_scorer(f"kvpress:{name}") for name in names]
    assert {cls.__name__ for cls in classes} == {"MyNormPressScorer"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MyNothing", "kvpress has no press 'MyNothing'"),
        ("MyWrapper", r"it is made of other objects \(press\)"),
        ("MyWeights", "it loads weights or statistics that were made for one model"),
        ("MyBudgets", "it also decides how many keys stay"),
        ("Base", "it is not a ScorerPress"),
        ("Scorer", "it is not a ScorerPress"),
    ],
)
def test_a_press_that_cannot_run_is_refused_with_the_reason(name: str, reason: str, kvpress: None) -> None:
    with pytest.raises(SettingsError, match=f"{reason}.*; those that can be used are MyDraw, MyNorm$"):
        load_scorer(f"kvpress:{name}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, "scorer_options.window is not known; remove it; the options of scorer .* are: count, factor"),
        ({"compression_ratio": 0.5}, "compression_ratio is not known"),
        ({"_inner": 0}, "_inner is not known"),
        ({"count": -1}, "count: should be 0 or more, not -1"),
        ({"factor": "much"}, "factor: should be a number"),
        ({"count": 1}, "fails to score 512 keys of this model with these scorer_options: it counts to one"),
    ],
    ids=str,
)
def test_options_are_the_fields_of_a_press(options: dict[str, Any], message: str, kvpress: None) -> None:
    wanted = CompressedOptions(scorer="kvpress:MyNorm", scorer_options=options, every=600)
    with pytest.raises(SettingsError, match=message):
        make_scorer("mine", wanted, [LAYER])


# ---------------------------------------------------------------- what a press is given
def score_once(scorer: Scorer, rng: random.Random) -> tuple[Past, Tensor]:
    """Score a text at its second boundary, after keys were dropped at the first."""
    text = ScoredText(LAYER, new_generator(), 60)
    text.drop(text.read(rng.randint(20, 30), scorer), rng.randint(5, 15), same_in_all_heads=False)
    past = text.read(rng.randint(10, 30), scorer)
    past.num_kept = rng.randint(1, 9)
    return past, scorer.score(past)


def test_a_press_gets_keys_queries_and_weights_as_a_model_has_them(rng: random.Random) -> None:
    cls = adapt(MyNormPress)
    scorer: Any = cls(cls.options_type(factor=0.5))
    past, scores = score_once(scorer, rng)
    module, hidden, keys, values, weights, others = scorer.press.calls[-1]
    T, S = len(past.queries), past.positions.shape[1]
    assert torch.equal(scores, 0.5 * past.keys.norm(dim=-1))
    assert torch.equal(keys[0], past.keys)
    assert torch.equal(values[0], past.values)
    assert torch.equal(weights, past.attention_weights().reshape(1, H * G, T, S))
    assert (module.layer_idx, module.head_dim, module.num_key_value_groups) == (past.layer_idx, D, G)
    assert (module.config.num_attention_heads, module.config.num_key_value_heads) == (H * G, H)
    # what is projected is before RoPE, and cos and sin rotate it to where queries and keys are
    cos, sin = others["position_embeddings"]
    for projected, wanted in (
        (module.q_proj(hidden), past.queries),
        (module.k_proj(hidden), past.keys[:, -T:].transpose(0, 1)),
    ):
        a, b = projected.view(T, -1, D).chunk(2, dim=-1)
        turned = torch.cat((a, b), -1) * cos[0][:, None] + torch.cat((-b, a), -1) * sin[0][:, None]
        torch.testing.assert_close(turned, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(AttributeError, match="'o_proj' of the attention module, which kvmux does not give"):
        _ = module.o_proj


def test_rotations_to_later_positions_are_those_of_the_model(rng: random.Random) -> None:
    """Though the model's tables end with the text."""

    def short_rotate(x: Tensor, delta: Tensor) -> Tensor:
        assert delta.max() < 90
        return rotate(x, delta, rotated=D)

    cls = adapt(MyNormPress)
    scorer: Any = cls(cls.options_type())
    text = ScoredText(LAYER._replace(rotate=short_rotate), new_generator(), 90)
    past = text.read(90, scorer)
    scorer.score(past)
    module = scorer.press.calls[-1][0]
    ahead = torch.arange(90, 90 + rng.randint(1, 400))
    cos, sin = module.rotary_emb(past.keys, ahead[None])
    x = torch.randn(len(ahead), 1, D, generator=new_generator())
    a, b = x.chunk(2, dim=-1)
    turned = x * cos[0][:, None] + torch.cat((-b, a), dim=-1) * sin[0][:, None]
    torch.testing.assert_close(turned, rotate(x, ahead, rotated=D), rtol=1e-3, atol=1e-4)


def test_models_that_rotate_other_dimensions_are_refused() -> None:
    cls = adapt(MyNormPress)
    with pytest.raises(SettingsError, match="this model rotates other dimensions"):
        cls(cls.options_type()).check_layers([layer_specs()["plain"]])
    with pytest.raises(SettingsError, match="for which this model's layers have no function"):
        cls(cls.options_type()).check_layers([LAYER._replace(rotate=None)])


def test_random_numbers_of_a_press_are_repeated_and_others_go_on(rng: random.Random) -> None:
    cls = adapt(MyDrawPress)
    scorer = cls(cls.options_type())
    past, scores = score_once(scorer, rng)
    torch.manual_seed(rng.randrange(1 << 32))
    expected = torch.rand(3, generator=torch.Generator().manual_seed(torch.initial_seed()))
    assert torch.equal(scorer.score(past), scores)
    assert torch.equal(torch.rand(3), expected)
    past.layer_idx += 1
    assert not torch.equal(scorer.score(past), scores)


def test_the_ratio_is_that_with_which_kvpress_keeps_as_many_keys(rng: random.Random) -> None:
    cls = adapt(MyNormPress)
    scorer: Any = cls(cls.options_type())
    past, _ = score_once(scorer, rng)
    assert int(past.positions.shape[1] * (1 - scorer.press.compression_ratio)) == past.num_kept
    for _ in range(1000):
        total = rng.randint(1, 100_000)
        kept = rng.randint(1, total)
        assert int(total * (1 - compute_ratio(kept, total))) == kept
