"""A mixture of experts: what the router is given for one token concerns that token alone."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.backends import REFERENCE
from kernels.ops import GatedMLP
from server.models.layers import SparseMoE
from tests.kernels.backend_matrix import BACKENDS, NAMES

EXPERTS, WIDTH, INNER, TOKENS = 5, 48, 64, 9


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", NAMES)
def test_a_token_that_is_no_number_takes_no_others_experts(backend: str, dtype: torch.dtype, poison: float) -> None:
    """The reference's products depend on how many rows there are, by rounding; the others' do not."""

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)

    ops = BACKENDS[backend]()
    experts = [GatedMLP(drawn(2 * INNER, WIDTH), None, drawn(WIDTH, INNER), None, "silu") for _ in range(EXPERTS)]
    mixture = SparseMoE(drawn(EXPERTS, WIDTH), experts, top_k=2, norm_topk_prob=True).pack(ops)
    h, token = drawn(TOKENS, WIDTH), random.randrange(TOKENS)
    poisoned = h.index_fill(0, torch.tensor([token]), poison)
    others = [i for i in range(TOKENS) if i != token]
    before, after = mixture(ops, h)[others], mixture(ops, poisoned)[others]
    assert before.isfinite().all()
    if backend == REFERENCE or not backend.startswith("cpu"):
        torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)
    else:
        assert torch.equal(after, before)
