"""Tokens are drawn from the distribution of the parameters, with noise that only depends on seed and position."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sampling import compute_probabilities, draw_token
from server.engine.ipc.messages import SamplingParams
from server.engine.sampling.draw import Draw, Noise, draw_tokens

VOCABULARY = 150_000
ROUNDING = 1e-5

many = settings(max_examples=70)


# -------------------------------------------------------------------- the distribution
class Expected(NamedTuple):
    """The tokens that must, and that may, remain by the definition in float64, and all weights after temperature."""

    surely: list[bool]
    maybe: list[bool]
    weights: list[float]


def by_definition(logits: Sequence[float], sampling: SamplingParams) -> Expected:
    """Apply temperature, min-p, top-k and top-p; a token within float32 rounding of the threshold may remain."""
    top = max(logits)
    weights = [math.exp((x - top) / sampling.temperature) for x in logits]
    total = sum(weights)
    weights = [w / total for w in weights]
    in_line = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    in_line = [i for i in in_line if weights[i] >= sampling.min_p * max(weights) * (1 - ROUNDING)]
    if sampling.top_k:
        in_line = in_line[: sampling.top_k]
    surely, maybe = [False] * len(logits), [False] * len(logits)
    limit = sampling.top_p * sum(weights[i] for i in in_line)
    before = 0.0
    for i in in_line:
        maybe[i] = sampling.top_p >= 1 or before < limit + ROUNDING
        surely[i] = sampling.top_p >= 1 or before < limit - ROUNDING
        surely[i] = surely[i] and weights[i] >= sampling.min_p * max(weights) * (1 + ROUNDING)
        before += weights[i]
    return Expected(surely, maybe, weights)


LOGITS = st.lists(
    st.one_of(st.integers(-20, 20).map(lambda n: n / 4), st.just(-math.inf)), min_size=1, max_size=40
).filter(lambda logits: max(logits) > -math.inf)
PARAMETERS = st.builds(
    SamplingParams,
    st.just(1),
    temperature=st.one_of(st.sampled_from([1e-3, 0.01, 0.5, 1.0, 2.0]), st.floats(1e-3, 2)),
    top_k=st.one_of(st.just(0), st.integers(1, 45)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
)


@many
@given(LOGITS, PARAMETERS)
@example([1.0, 1.0, 1.0, 1.0], SamplingParams(1, top_k=2, top_p=0.5))
@example([0.0, 5.0, 5.0, -math.inf], SamplingParams(1, top_k=1))
@example([0.0, 5.0, 5.0], SamplingParams(1, min_p=1.0))
@example([1.0] * 8, SamplingParams(1, top_k=4, top_p=0.5))
@example([1.0] * 6000, SamplingParams(1, top_p=0.5))
def test_probabilities_are_those_of_the_definition(logits: list[float], sampling: SamplingParams) -> None:
    expected, got = by_definition(logits, sampling), compute_probabilities(torch.tensor(logits), sampling).double()
    assert torch.isfinite(got).all()
    kept = (got > 0).tolist()
    for i, weight in enumerate(expected.weights):
        assert expected.maybe[i] or not kept[i], f"token {i} should be out"
        assert kept[i] or not expected.surely[i] or weight < 1e-30, f"token {i} should be in"
    wanted = torch.tensor(expected.weights, dtype=torch.float64) * (got > 0)
    torch.testing.assert_close(got / got.sum(), wanted / wanted.sum(), rtol=1e-4, atol=1e-7)


@many
@given(LOGITS, st.integers(0, 2**63 - 1), st.integers(1, 10**6))
def test_what_leaves_one_token_is_greedy_and_of_equal_ones_the_first(
    logits: list[float], seed: int, position: int
) -> None:
    greedy = draw_tokens(torch.tensor([logits]), [Draw(SamplingParams(1, temperature=0), position)])
    assert greedy == [logits.index(max(logits))]
    for one in (
        SamplingParams(1, temperature=1.0, top_k=1, seed=seed),
        SamplingParams(1, temperature=2.0, top_p=1e-9, seed=seed),
        SamplingParams(1, temperature=1e-3, top_k=1, top_p=0.1, min_p=0.5, seed=seed),
    ):
        assert draw_tokens(torch.tensor([logits]), [Draw(one, position)]) == greedy


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-45, 5e-324])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 30
    for position in range(20):
        assert draw_tokens(logits[None], [Draw(SamplingParams(1, temperature=temperature), position)]) == [
            int(logits.argmax())
        ]


@pytest.mark.parametrize("top_p", [1e-9, 1e-50, 5e-324])
def test_the_smallest_top_p_is_greedy(top_p: float) -> None:
    logits = torch.zeros(64)
    logits[9:12] = 1.0
    for position in range(20):
        assert draw_tokens(logits[None], [Draw(SamplingParams(1, temperature=2.0, top_p=top_p), position)]) == [9]


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_huge_logits_are_no_trouble(scale: float) -> None:
    logits = torch.linspace(1, -1, 50) * scale
    p = compute_probabilities(logits, SamplingParams(1, temperature=2.0))
    assert float(p.sum()) == pytest.approx(1)
    assert int(p.argmax()) == 0
    assert draw_tokens(logits[None], [Draw(SamplingParams(1, temperature=1e-20), 3)]) == [0]


# -------------------------------------------------------------------- draws
def chi_square(counts: Counter[int], p: Sequence[float]) -> tuple[float, float]:
    """Return the statistic, and the value that it exceeds once in 10 000 times (Wilson & Hilferty 1931)."""
    n = counts.total()
    statistic = sum((counts[i] - n * x) ** 2 / (n * x) for i, x in enumerate(p) if x > 0)
    freedom = sum(x > 0 for x in p) - 1
    return statistic, freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.4),
        SamplingParams(1, top_k=7),
        SamplingParams(1, temperature=1.7, top_p=0.8),
        SamplingParams(1, min_p=0.2, top_p=0.95, top_k=9),
    ],
    ids=["plain", "cold", "top_k", "top_p", "all"],
)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(3))
    p = compute_probabilities(logits, sampling)
    exact = (p.double() / p.double().sum()).tolist()
    for places in ([(seed, 17) for seed in range(800)], [(17, position) for position in range(800)]):
        counts = Counter(int(draw_token(p, Noise().draw_uniform(*place))) for place in places)
        assert all(exact[token] > 0 for token in counts), "a token that was filtered out"
        statistic, limit = chi_square(counts, exact)
        assert statistic < limit


@many
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.1, 0.25, 3.0]), min_size=1, max_size=30).filter(any),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53)),
)
def test_a_draw_is_the_token_whose_stretch_holds_the_number(p: list[float], u: float) -> None:
    token = int(draw_token(torch.tensor(p), u))
    assert p[token] > 0
    total = math.fsum(p)
    assert math.fsum(p[:token]) <= u * total + 1e-6 * total
    assert math.fsum(p[: token + 1]) >= u * total - 1e-6 * total


def test_noise_is_uniform_and_no_two_places_share_it() -> None:
    grid = np.array([[Noise().draw_uniform(seed, position) for position in range(60)] for seed in range(-30, 30)])
    assert len(np.unique(grid)) == grid.size
    assert grid.min() >= 0
    assert grid.max() < 1
    tenths = Counter((grid * 10).astype(int).ravel().tolist())
    statistic, limit = chi_square(tenths, [0.1] * 10)
    assert statistic < limit
    for one, other in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):  # neighbours in position, in seed
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / math.sqrt(grid.size)


@many
@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40))
def test_noise_is_numpys(seed: int, position: int) -> None:
    bits = np.random.Philox(key=seed % 2**64, counter=position)
    assert Noise().draw_uniform(seed, position) == np.random.Generator(bits).random()


def test_every_64_bit_seed_is_one_of_its_own() -> None:
    seeds = [0, 1, -1, 2**62, 2**63 - 1, -(2**63)]
    assert len({Noise().draw_uniform(seed, 5) for seed in seeds}) == len(seeds)
    assert Noise().draw_uniform(-1, 5) == Noise().draw_uniform(2**64 - 1, 5)


# -------------------------------------------------------------------- the batch
def a_batch() -> tuple[Tensor, list[Draw]]:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(5)) * 3
    draws = [
        Draw(SamplingParams(1, temperature=t, seed=s), p) for t, s, p in ((1, 3, 9), (0, 0, 9), (0.7, 3, 9), (1, 4, 9))
    ]
    return logits, [*draws, Draw(SamplingParams(1, seed=3), 10), Draw(SamplingParams(1, top_k=3, seed=3), 9)]


def test_noise_depends_on_neither_batch_nor_order() -> None:
    logits, draws = a_batch()
    together = draw_tokens(logits, draws)
    assert together == [draw_tokens(logits[i : i + 1], [one])[0] for i, one in enumerate(draws)]
    backwards = draw_tokens(logits.flip(0), draws[::-1])
    assert backwards == together[::-1]
    assert together == draw_tokens(logits, draws), "drawing again gives the same"


@pytest.mark.parametrize("temperature", [0.2, 0.4, 1.0, 2.0])
def test_a_token_is_drawn_from_its_probabilities_by_its_noise(temperature: float) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    sampling = SamplingParams(1, temperature=temperature, seed=11)
    drawn = [draw_tokens(logits, [Draw(sampling, position)])[0] for position in range(30)]
    p = compute_probabilities(logits[0], sampling)
    assert drawn == [int(draw_token(p, Noise().draw_uniform(11, position))) for position in range(30)]
    assert len(set(drawn)) > 1


def test_logits_are_left_as_they_were() -> None:
    logits, draws = a_batch()
    before = logits.clone()
    draw_tokens(logits, draws)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1),
        SamplingParams(1, top_k=50),
        SamplingParams(1, top_p=0.9),
        SamplingParams(1, min_p=0.1, top_k=1000, top_p=0.5),
    ],
)
def test_a_large_vocabulary_is_drawn_from(sampling: SamplingParams) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(7)) * 4
    p = compute_probabilities(logits, sampling)
    kept = (p > 0).sum()
    assert kept <= (sampling.top_k or VOCABULARY)
    tokens = [draw_tokens(logits[None], [Draw(sampling, position)])[0] for position in range(5)]
    assert all(p[token] > 0 for token in tokens)
    flat = torch.zeros(VOCABULARY)
    assert len({draw_tokens(flat[None], [Draw(SamplingParams(1, seed=1), position)])[0] for position in range(5)}) == 5


def test_a_large_vocabulary_is_drawn_from_evenly() -> None:
    """Sums of many small probabilities lose no token: each quarter of the vocabulary is drawn equally often."""
    p = torch.full((VOCABULARY,), 1 / VOCABULARY)
    quarters = Counter(int(draw_token(p, Noise().draw_uniform(1, i))) * 4 // VOCABULARY for i in range(300))
    statistic, limit = chi_square(quarters, [0.25] * 4)
    assert statistic < limit


def test_however_small_top_p_is_the_likeliest_token_stays() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    for top_p in (1e-300, 1e-46, 1e-45, 1e-7):
        assert compute_probabilities(logits, SamplingParams(1, top_p=top_p)).nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_give_no_token(wrong: float, temperature: float) -> None:
    logits = torch.randn(3, 10)
    logits[1, 4] = wrong
    draws = [Draw(SamplingParams(1, temperature=temperature), position) for position in range(3)]
    before, broken, after = draw_tokens(logits, draws)
    assert broken is None
    assert [before] == draw_tokens(logits[:1], draws[:1])
    assert [after] == draw_tokens(logits[2:], draws[2:])
