"""The divergence of logits against float64 arithmetic, with ties, impossible tokens and NaN."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from server.engine.shadow.divergence import measure_divergence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergences_are_those_of_float64_arithmetic(dtype: torch.dtype, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    served = (3 * torch.randn(40, 500, generator=generator)).to(dtype)
    candidate = (served + 0.5 * torch.randn(40, 500, generator=generator)).to(dtype)
    tokens = [rng.randrange(500) for _ in range(40)]
    p, q = (logits.double().softmax(-1).numpy() for logits in (served, candidate))
    for i, found in enumerate(measure_divergence(served, candidate, tokens)):
        assert found.kl == pytest.approx(float((p[i] * np.log(p[i] / q[i])).sum()), rel=1e-4, abs=1e-6)
        assert found.agreed == (p[i].argmax() == q[i].argmax())
        row = candidate[i].tolist()
        assert found.rank == 1 + sum(logit > row[tokens[i]] for logit in row)


def test_equal_logits_have_no_divergence() -> None:
    logits = torch.randn(5, 70)
    best = logits.argmax(-1).tolist()
    assert measure_divergence(logits, logits.clone(), best) == [(0.0, True, 1)] * 5


def test_a_token_has_the_best_rank_of_those_with_its_logit() -> None:
    candidate = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert [measure_divergence(candidate, candidate, [token])[0].rank for token in range(4)] == [3, 1, 1, 4]


def test_tokens_that_the_served_instance_excludes_add_nothing() -> None:
    served = torch.tensor([[0.0, 0.0, -math.inf]])
    assert measure_divergence(served, torch.zeros(1, 3), [0])[0].kl == pytest.approx(math.log(3 / 2))


def test_tokens_that_only_the_candidate_excludes_give_an_infinite_divergence() -> None:
    (found,) = measure_divergence(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, -math.inf]]), [0])
    assert found.kl == math.inf
    assert not found.is_finite


@pytest.mark.parametrize("broken", ["served", "shadow"])
def test_logits_that_are_not_numbers_give_a_divergence_that_is_none(broken: str) -> None:
    logits = {"served": torch.zeros(2, 3), "shadow": torch.zeros(2, 3)}
    logits[broken][1, 2] = math.nan
    first, second = measure_divergence(**logits, tokens=[0, 0])
    assert first.kl == 0.0
    assert math.isnan(second.kl)


def test_the_divergence_of_a_token_may_be_from_the_shadow(rng: random.Random) -> None:
    served, shadow = torch.randn(4, 9), torch.randn(4, 9)
    tokens, flags = [3, 1, 8, 0], [True, False, True, False]
    found = measure_divergence(served, shadow, tokens, flags)
    plain, swapped = measure_divergence(served, shadow, tokens), measure_divergence(shadow, served, tokens)
    assert [each.kl for each in found] == [
        (s if flag else p).kl for flag, p, s in zip(flags, plain, swapped, strict=True)
    ]
    assert [each.rank for each in found] == [each.rank for each in plain]  # always under the shadow
