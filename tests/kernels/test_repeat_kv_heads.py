"""KV heads repeated for kernels without grouped heads: all at once or step by step into a mirror, with equal bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.ops import DTYPES
from tests.kernels.backend_matrix import BACKENDS, NAMES

backends = pytest.mark.parametrize("backend", NAMES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dtypes
@pytest.mark.parametrize("groups", [1, 2, 7])
@backends
def test_a_query_head_finds_its_kv_head_in_a_tensor_of_its_own(backend: str, groups: int, dtype: torch.dtype) -> None:
    x = torch.randn(9, 6, 20).to(dtype)[2:, 1:4, 3:19]
    got = BACKENDS[backend]().repeat_kv_heads(x, groups)
    assert got.shape == (3 * groups, 7, 16)
    assert got.dtype is dtype
    assert got.is_contiguous()
    assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    for head in range(3 * groups):
        assert torch.equal(got[head], x[:, head // groups])


@backends
@settings(deadline=None, max_examples=30)
@given(
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    heads=st.integers(1, 3),
    groups=st.integers(1, 8),
    dim=st.sampled_from([1, 5, 16, 80]),
    dtype=st.sampled_from(DTYPES),
    sliced=st.booleans(),
)
def test_a_mirror_kept_in_any_steps_is_the_whole_text_repeated(
    backend: str, steps: list[int], heads: int, groups: int, dim: int, dtype: torch.dtype, sliced: bool
) -> None:
    ops, length = BACKENDS[backend](), sum(steps)
    text = torch.randn(length, heads + 2, dim + 3).to(dtype)[:, 1:-1, 2:-1]
    whole = torch.full((heads * groups + 2, length + 7, dim + 3), torch.nan, dtype=dtype)
    mirror = whole[1:-1, 1:-1, 2:-1] if sliced else whole[1:-1, 1:-1, 2:-1].contiguous()
    start = 0
    for n in steps:
        ops.repeat_kv_heads_step(mirror, text[start : start + n], start)
        start += n
        assert mirror[:, start:].isnan().all()
    assert torch.equal(mirror[:, :length], ops.repeat_kv_heads(text, groups))
    if sliced:
        assert whole.isnan().sum() == whole.numel() - heads * groups * length * dim


@backends
@pytest.mark.parametrize(
    ("x", "start"),
    [(torch.ones(1, 2, 4), 8), (torch.ones(3, 2, 4), 6), (torch.ones(1, 4, 4), 0)],
    ids=["past the end", "over the end", "no multiple of the heads"],
)
def test_columns_and_heads_that_do_not_fit_are_refused(backend: str, x: Tensor, start: int) -> None:
    mirror = torch.zeros(6, 8, 4)
    with pytest.raises(ValueError, match="repeat_kv_heads_step"):
        BACKENDS[backend]().repeat_kv_heads_step(mirror, x, start)
    assert not mirror.any()
