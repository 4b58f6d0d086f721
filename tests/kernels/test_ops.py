"""Compares every operation of every backend with its formula, for shapes of models and lengths around tiles and blocks.

`make test` tries every pair of values once, but long sequences only where vectors are not computed independently;
`make test-slow` tries all combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor

from kernels.ops import DTYPES
from kernels.selfcheck.op_db import OPS
from kernels.selfcheck.op_info import OpInfo
from tests.kernels.backend_matrix import BACKENDS, NAMES
from tests.kernels.formulas import ACTIVATIONS, FORMULAS, VARIED, Shape

VALUES: Mapping[str, Sequence[Any]] = {
    "dtype": DTYPES,
    "head_dim": [64, 80, 96, 128, 256],
    "group": [1, 2, 4, 7, 8],
    "length": [1, 15, 16, 17, 1000, 4097],
    "lies": ["dense", "sliced"],
    "block_size": [16, 32, 5000],
    "window": [None, 100],
    "layers_before": [0, 2],
}

# Each vector by itself: the 4,097th tells no more than the thousandth.
BY_ITSELF = {"rms_norm", "add_rms_norm", "rope", "silu_mul"}

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)

Combine = Callable[[list[Sequence[Any]]], Iterable[Sequence[Any]]]


@pytest.fixture(scope="module", params=NAMES)
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def _shapes(op: OpInfo, combine: Combine, **only: Any) -> Iterator[Shape]:
    """Yield combinations of the values that are varied for an operation; `only` fixes some of them."""
    varied = VARIED.get(op.name, ACTIVATIONS)
    for values in combine([[only[name]] if name in only else VALUES[name] for name in varied]):
        yield Shape(**dict(zip(varied, values, strict=True)))


def _is_its_formula(op: OpInfo, backend: str, shapes: Iterable[Shape]) -> None:
    ops = BACKENDS[backend]()
    for shape in shapes:
        for got, want in FORMULAS[op.full_name](ops, shape):
            assert got.shape == want.shape, shape
            assert torch.equal(got, want) or _error(got, want.double()) <= op.tolerance[shape.dtype], shape


def _error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference as a share of the largest number."""
    return float((got.double() - want).abs().max() / want.abs().max())


def test_every_operation_has_a_formula() -> None:
    assert {op.full_name for op in OPS} == {*FORMULAS}, "give the new operation one in tests/kernels/formulas.py"


@every_op
def test_every_pair_of_values(backend: str, op: OpInfo) -> None:
    shapes = _shapes(op, _pairs_of_few_tokens if op.name in BY_ITSELF else AllPairs)
    _is_its_formula(op, backend, shapes)


def _pairs_of_few_tokens(values: list[Sequence[Any]]) -> Iterable[Sequence[Any]]:
    lengths = VALUES["length"]
    return AllPairs([lengths[:-1] if each is lengths else each for each in values])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", VALUES["head_dim"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_op
def test_the_full_product(backend: str, op: OpInfo, dtype: torch.dtype, head_dim: int) -> None:
    _is_its_formula(op, backend, _shapes(op, lambda values: product(*values), dtype=dtype, head_dim=head_dim))


@pytest.mark.slow
@every_op
def test_offsets_beyond_32_bits(backend: str, op: OpInfo) -> None:
    """Rows that are more than 4 GiB apart, or blocks after 4 GiB of unused ones."""
    shape = Shape(torch.bfloat16, group=2, length=2, lies="apart")
    if "block_size" in VARIED.get(op.name, ()):
        far = 1 + (1 << 32) // (2 * 2 * 32 * 64 * 2)  # blocks
        shape = Shape(torch.bfloat16, group=2, length=100, block_size=32, unused_blocks=far)
    _is_its_formula(op, backend, [shape])
