"""Properties of `sample` beyond the formula: large vocabularies, ties, and rows that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.ops import DTYPES
from kernels.sampling import NO_TOKEN, SamplingRow
from tests.kernels.backend_matrix import BACKENDS

VOCABULARY = 150_001
DRAWINGS = (
    SamplingRow(1.0),
    SamplingRow(0.7, top_k=50),
    SamplingRow(1.0, top_p=0.9),
    SamplingRow(0.7, 20, 0.8),
    SamplingRow(1.5, min_p=0.02),
    SamplingRow(2.0, 70_000, 0.7, 1e-6),
)
ROUNDING = 1e-5  # of sums in float32

CPU = pytest.mark.parametrize("name", [name for name in BACKENDS if name == "reference" or name.startswith("cpu-")])


def drawn(name: str, logits: Tensor, *drawings: SamplingRow) -> list[int]:
    tokens: list[int] = BACKENDS[name]().sample(logits, torch.tensor(drawings, dtype=torch.float64)).tolist()
    return tokens


def stretches(logits: Tensor, of: SamplingRow) -> tuple[Tensor, Tensor]:
    """Return the ids kept, in order, and the ends of their intervals, in float64; no logits may be equal."""
    weights = (logits.double() - logits.double().max()).div(of.temperature).exp()
    ordered, ids = weights.sort(descending=True)
    kept = int((ordered >= of.min_p).sum())
    kept = min(kept, int(of.top_k) or kept)
    before = ordered[:kept].cumsum(0) - ordered[:kept]
    kept = int((before < of.top_p * ordered[:kept].sum()).sum())
    some = ids[:kept].sort().values
    return some, weights[some].cumsum(0) / weights[some].sum()


@CPU
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_large_vocabulary(name: str, scale: float) -> None:
    """The token drawn is the one in whose interval the noise lies, up to the rounding of sums."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(7)) * scale
    for of in DRAWINGS:
        ids, ends = stretches(logits, of)
        for noise in (0.0, 0.31, 0.77, 1 - 2**-53):
            (token,) = drawn(name, logits[None], of._replace(noise=noise))
            place = int(torch.searchsorted(ids, token))
            begins = float(ends[place - 1]) if place else 0.0
            assert begins - ROUNDING <= noise <= float(ends[place]) + ROUNDING, (of, noise)


@CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 15, 700, 5000])
def test_of_equal_logits_the_first_are_kept(name: str, dtype: torch.dtype, vocabulary: int) -> None:
    flat = torch.zeros(1, vocabulary, dtype=dtype)
    assert drawn(name, flat, SamplingRow()) == [0]
    for of, kept in ((SamplingRow(1.0, top_k=3), 3), (SamplingRow(1.0, top_p=0.4), math.ceil(0.4 * vocabulary))):
        want = min(kept, vocabulary) - 1
        assert drawn(name, flat, of._replace(noise=1 - 2**-53)) == [want], of
        assert drawn(name, flat, of) == [0]


@CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 37, 999, 1000])
def test_rows_that_are_no_numbers(name: str, dtype: torch.dtype, wrong: float, place: int) -> None:
    logits = torch.randn(4, 1001, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits[1:3, place] = wrong
    logits[:, 500] = -math.inf  # may be
    drawings = (SamplingRow(), SamplingRow(), SamplingRow(1.0, noise=0.5), SamplingRow(1.0, noise=0.5))
    first, second, third, fourth = drawn(name, logits, *drawings)
    assert second == third == NO_TOKEN
    assert [first] == drawn(name, logits[:1], SamplingRow()) == [logits[0].tolist().index(max(logits[0].tolist()))]
    assert [fourth] == drawn(name, logits[3:], drawings[3])
    assert drawn(name, torch.full((1, 20), -math.inf, dtype=dtype), SamplingRow()) == [NO_TOKEN]


@CPU
def test_the_coldest_is_greedy(name: str) -> None:
    logits = torch.randn(1, 1003, generator=torch.Generator().manual_seed(5)) * 30
    for temperature in (1e-3, 1e-20, 5e-324):
        assert drawn(name, logits, SamplingRow(temperature, noise=0.99)) == [int(logits.argmax())]
    for top_p in (1e-9, 1e-50, 5e-324):
        assert drawn(name, logits, SamplingRow(2.0, top_p=top_p, noise=0.99)) == [int(logits.argmax())]
