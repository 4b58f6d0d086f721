"""Blocks with the largest bounds are selected, by the definition in float64, in any layout of memory."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.kernels.backend_matrix import BACKENDS, NAMES

backends = pytest.mark.parametrize("backend", NAMES)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
UNWRITTEN = -7


def compute_bounds(q: Tensor, summaries: Tensor) -> Tensor:
    """Return the largest bound of each block [C] for the queries q [group, D], in float64."""
    largest, smallest = summaries.double()[:, None].chunk(2, 2)  # [C, 1, D]
    return torch.maximum(q.double() * largest, q.double() * smallest).sum(2).amax(1)


@pytest.mark.fuzz
@backends
@pytest.mark.parametrize("_", range(6))
def test_the_best_candidates_are_selected_for_rows_of_any_sizes(backend: str, _: int, rng: random.Random) -> None:
    rows, heads, group = rng.randint(1, 5), rng.randint(1, 3), rng.choice([1, 2, 7, 9])
    dim, num_blocks = rng.choice([1, 5, 16, 24, 64, 256]), rng.randint(1, 200)
    dtypes = rng.choice(FLOATS), rng.choice(FLOATS)
    most = rng.randint(1, num_blocks)
    print(rows, heads, group, dim, num_blocks, dtypes, most)
    counts = [(own := rng.randint(0, most), rng.randint(0, own)) for _ in range(rows)]
    columns = max(selected for _, selected in counts) + rng.randint(0, 3)
    q = torch.randn(rows, heads * group, dim + 3).to(dtypes[0])[..., 1:-2]
    summaries = torch.zeros(num_blocks, 2 * dim + 3, dtype=dtypes[1])[:, 2:-1]
    largest_first = torch.randn(num_blocks, 2, dim).sort(1, descending=True).values
    summaries.copy_(largest_first.flatten(1))
    candidates = torch.stack([torch.randperm(num_blocks)[:most] for _ in range(rows * heads)])
    candidates = candidates.int().view(rows, heads, most)
    out = torch.full((rows, heads, columns + 5), UNWRITTEN, dtype=torch.int32)
    BACKENDS[backend]().select_blocks(
        out[..., 2 : columns + 2], q, summaries, candidates, torch.tensor(counts, dtype=torch.int32)
    )
    assert (out[..., :2] == UNWRITTEN).all()
    for row, (own, selected) in enumerate(counts):
        for head in range(heads):
            found = out[row, head, 2 : 2 + selected]
            assert (out[row, head, 2 + selected :] == UNWRITTEN).all()
            blocks = candidates[row, head, :own].long()
            is_selected = torch.isin(blocks, found.long())
            assert torch.equal(blocks[is_selected], found.long()), "in the order of the candidates, each once"
            bounds = compute_bounds(q[row, head * group : (head + 1) * group], summaries[blocks])
            if 0 < selected < own:
                tolerance = 1e-5 * float(bounds.abs().max())
                assert bounds[is_selected].min() >= bounds[~is_selected].max() - tolerance


@backends
def test_of_equal_bounds_the_first_candidates_are_selected(backend: str) -> None:
    summaries = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])[:, None].expand(6, 2).contiguous()
    candidates = torch.tensor([[[5, 4, 0, 3, 1, 2]]], dtype=torch.int32)
    out = torch.zeros(1, 1, 3, dtype=torch.int32)
    BACKENDS[backend]().select_blocks(
        out, torch.ones(1, 1, 1), summaries, candidates, torch.tensor([[6, 3]], dtype=torch.int32)
    )
    assert out.tolist() == [[[4, 3, 1]]]


@backends
def test_a_block_with_a_nan_is_selected_and_no_other_row_notices(backend: str) -> None:
    ops, q, summaries = BACKENDS[backend](), torch.randn(3, 3, 4), torch.randn(30, 8)
    candidates = torch.arange(30, dtype=torch.int32).view(3, 1, 10)
    counts = torch.tensor([[10, 4]] * 3, dtype=torch.int32)
    clean, found = torch.zeros(2, 3, 1, 4, dtype=torch.int32)
    ops.select_blocks(clean, q, summaries, candidates, counts)
    summaries[17, 3] = torch.nan
    q[2, 1, 0] = torch.nan
    ops.select_blocks(found, q, summaries, candidates, counts)
    assert torch.equal(found[0], clean[0])
    assert 17 in found[1, 0].tolist()
    assert found[2, 0].tolist() == [20, 21, 22, 23], "all bounds are NaN, so the first are taken"


@backends
@pytest.mark.parametrize(
    ("counts", "id_", "words"),
    [
        ([4, 5], 0, "select_blocks"),
        ([-1, -1], 0, "select_blocks"),
        ([9, 2], 0, "select_blocks"),
        ([8, 7], 0, "select_blocks"),
        ([8, 3], 12, "candidates must be blocks from 0 to 11"),
        ([8, 3], -1, "candidates must be blocks from 0 to 11"),
    ],
    ids=str,
)
def test_counts_and_blocks_that_do_not_fit_are_refused(backend: str, counts: list[int], id_: int, words: str) -> None:
    out, candidates = torch.zeros(2, 1, 6, dtype=torch.int32), torch.zeros(2, 1, 8, dtype=torch.int32)
    candidates[1, 0, 7] = id_
    with pytest.raises(ValueError, match=words):
        BACKENDS[backend]().select_blocks(
            out,
            torch.ones(2, 3, 4),
            torch.ones(12, 8),
            candidates,
            torch.tensor([[8, 6], counts], dtype=torch.int32),
        )
    assert not out.any()


@backends
def test_ids_beyond_a_rows_own_candidates_are_not_read(backend: str) -> None:
    candidates = torch.tensor([[[1, 0, 1 << 30, -5]]], dtype=torch.int32)
    out = torch.zeros(1, 1, 2, dtype=torch.int32)
    BACKENDS[backend]().select_blocks(
        out, torch.ones(1, 1, 4), torch.ones(2, 8), candidates, torch.tensor([[2, 2]], dtype=torch.int32)
    )
    assert out.tolist() == [[[1, 0]]]


@backends
@pytest.mark.parametrize("rows", [0, 2])
def test_without_candidates_nothing_is_selected(backend: str, rows: int) -> None:
    out = torch.full((rows, 1, 3), UNWRITTEN, dtype=torch.int32)
    BACKENDS[backend]().select_blocks(
        out,
        torch.ones(rows, 2, 4),
        torch.ones(5, 8),
        torch.empty(rows, 1, 0, dtype=torch.int32),
        torch.zeros(rows, 2, dtype=torch.int32),
    )
    assert (out == UNWRITTEN).all()
