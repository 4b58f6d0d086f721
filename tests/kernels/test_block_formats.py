"""Weights in the block formats of GGUF files: values and products, compared with gguf's own and with float64."""

from __future__ import annotations

import random
from functools import partial

import gguf
import pytest
import torch
from torch import Tensor

from kernels.ops import PackedWeight
from kernels.weights.block_formats import FORMATS, BlockFormat, BlockTensor
from kernels.weights.stored import ConcatenatedWeight, dequantize_weight
from tests.kernels.backend_matrix import BACKENDS, NAMES
from tests.kernels.block_weights import draw_weight

formats = pytest.mark.parametrize("name", FORMATS)
backends = pytest.mark.parametrize("backend", NAMES)
ROUNDING = 1e-5  # of sums in float32, relative to the largest


def compute_values(weight: BlockTensor) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(weight.blocks.numpy(), weight.format.kind))


def draw_sizes(rng: random.Random, format: BlockFormat) -> tuple[int, int]:
    """Return numbers of rows and of blocks in a row."""
    return rng.choice([1, 15, 64, 100, 200]), rng.randint(1, 24 if format.columns == 32 else 4)


@formats
@backends
def test_rows_have_the_values_of_the_file(backend: str, name: str, rng: random.Random) -> None:
    """Bit for bit, in whatever order they are read."""
    weight = draw_weight(rng, FORMATS[name], *draw_sizes(rng, FORMATS[name]))
    packed = BACKENDS[backend]().pack(weight)
    which = torch.tensor(rng.choices(range(len(weight.blocks)), k=7))
    expected = compute_values(weight)[which]
    assert not isinstance(packed, ConcatenatedWeight)
    assert packed.shape == weight.shape
    found = packed.rows(which) if isinstance(packed, PackedWeight) else dequantize_weight(packed.rows(which))
    assert torch.equal(found, expected)


@formats
@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(backend: str, name: str, dtype: torch.dtype, rng: random.Random) -> None:
    """Exact but for the rounding of sums, once the rows of x are rounded as the backend does."""
    format = FORMATS[name]
    weight = draw_weight(rng, format, *draw_sizes(rng, format))
    ops = BACKENDS[backend]()
    for count in (1, 3, rng.randint(5, 40)):
        x = torch.randn(count, weight.shape[1]).to(dtype)
        packed = ops.pack(weight)
        rounds = isinstance(packed, PackedWeight)
        wide = (round_units(x) if rounds else x).double()
        expected = wide @ compute_values(weight).double().T
        found = ops.linear(x, packed).double()
        error = (found - expected).abs().max() / (wide.abs() @ compute_values(weight).double().abs().T).max()
        assert error < (ROUNDING if dtype is torch.float32 else 2**-8), (count, error)


def round_units(x: Tensor) -> Tensor:
    """Round each 32 columns to 127 steps of their largest magnitude, as products with integers do."""
    grouped = x.float().unflatten(-1, (-1, 32))
    most = grouped.abs().amax(-1, keepdim=True)
    factor = torch.tensor(127.0) / most  # `127 / most` would be the rounded inverse, times 127: not the same bits
    return ((grouped * factor).round().double() * (most.double() / 127)).flatten(-2)


@formats
def test_a_row_of_a_product_is_the_same_beside_any_others(name: str, rng: random.Random) -> None:
    weight = draw_weight(rng, FORMATS[name], 100, 3)
    for ops in (load() for backend, load in BACKENDS.items() if backend.startswith("cpu-")):
        packed, x = ops.pack(weight), torch.randn(50, weight.shape[1])
        whole = ops.linear(x, packed)
        for begin, end in ((0, 1), (7, 10), (20, 50)):
            assert torch.equal(ops.linear(x[begin:end], packed), whole[begin:end])


@formats
@backends
def test_a_scale_that_is_no_number_spoils_its_row_only(backend: str, name: str, rng: random.Random) -> None:
    weight = draw_weight(rng, FORMATS[name], 70, 2)
    if not FORMATS[name].halves:
        return  # a power of 2 is always a number
    place = FORMATS[name].halves[0]
    weight.blocks[5, place : place + 2] = torch.tensor([0xFF, 0x7F], dtype=torch.uint8)  # a NaN
    ops = BACKENDS[backend]()
    found = ops.linear(torch.randn(3, weight.shape[1]), ops.pack(weight))
    assert found[:, 5].isnan().all()
    assert not found[:, [*range(5), *range(6, 70)]].isnan().any()


@backends
def test_weights_of_several_formats_are_used_as_one(backend: str, rng: random.Random) -> None:
    """Whether they fill blocks of rows or not; and with the bits that each has alone, if they do."""
    ops, x = BACKENDS[backend](), torch.randn(3, 256)
    for sizes in ((64, 192, 10), (7, 64, 33)):
        drawn = [(FORMATS[rng.choice([*FORMATS])], rows) for rows in sizes]
        parts = [draw_weight(rng, format, rows, 256 // format.columns, spread=0.1) for format, rows in drawn]
        packed = ops.pack(ConcatenatedWeight(parts))
        assert packed.shape == (sum(sizes), 256)
        alone = torch.cat([ops.linear(x, ops.pack(part)) for part in parts], 1)
        found = ops.linear(x, packed)
        if sizes[0] == 64 or not isinstance(packed, PackedWeight):
            assert torch.equal(found, alone)
        else:
            exact = x.double() @ torch.cat([compute_values(part) for part in parts]).double().T
            assert (found - exact).abs().max() < 1e-2 * exact.abs().max()
        if isinstance(packed, PackedWeight):
            which = torch.tensor(rng.choices(range(sum(sizes)), k=9))
            assert torch.equal(packed.rows(which), torch.cat([compute_values(part) for part in parts])[which])


@formats
def test_rows_that_are_cut_off_are_refused(name: str) -> None:
    format = FORMATS[name]
    make = partial(BlockTensor, format=format)
    for wrong in (
        torch.zeros(3, format.nbytes + 1, dtype=torch.uint8),
        torch.zeros(3, 0, dtype=torch.uint8),
        torch.zeros(format.nbytes, dtype=torch.uint8),
        torch.zeros(3, format.nbytes),
    ):
        with pytest.raises(ValueError, match=f"blocks of {name}, of {format.nbytes} bytes each, do not fit"):
            make(wrong)
