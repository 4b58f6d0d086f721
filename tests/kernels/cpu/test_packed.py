"""Packed weights: the values they keep, and products with them compared with numpy, on every instruction set."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.composite import CompositeOps
from kernels.cpu.packed import PackedMatrix
from kernels.ops import AttentionWeights, GatedMLP, Ops
from kernels.weights.quantization import QuantizedTensor, dequantize
from tests.kernels.backend_matrix import BACKENDS
from tests.kernels.quantized_weights import quantize_as_mlx

CPUS = [name for name in BACKENDS if name.startswith("cpu-")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (16, 32), (37, 131), (64, 64), (129, 300), (70, 2100)]  # [out, in]: whole tiles, odd, long chunks
FORMATS = [*product((8, 4), (32, 64, 96, None))]  # bits, columns of a group
ROWS = (*range(1, 18), 25, 31, 32, 33, 64, 70)  # around what goes together somewhere

pytestmark = pytest.mark.parametrize("backend", CPUS)


def weights(out: int, bits: int, group: int | None) -> list[QuantizedTensor]:
    """Return quantized weights with scales of several dtypes."""
    weight = torch.randn(out, 192, generator=torch.Generator().manual_seed(out))
    return [quantize_as_mlx(weight.to(dtype), bits, group or 192) for dtype in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_floats_come_back_as_they_were(backend: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = BACKENDS[backend]().pack(weight)
    assert isinstance(packed, PackedMatrix)
    which = torch.randint(shape[0], (50,))
    assert torch.equal(packed.rows(which), weight[which])
    assert (packed.shape, packed.format) == (shape, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(("bits", "group"), FORMATS, ids=str)
def test_rows_of_whole_numbers_have_the_values_that_they_stand_for(backend: str, bits: int, group: int | None) -> None:
    for weight in weights(70, bits, group):
        packed = BACKENDS[backend]().pack(weight)
        assert isinstance(packed, PackedMatrix)
        which = torch.tensor([69, 0, 15, 16, 69, 64])
        torch.testing.assert_close(packed.rows(which), dequantize(weight.rows(which)), rtol=3e-7, atol=1e-6)
        assert (packed.shape, packed.format) == ((70, 192), f"int{bits}")


def test_a_row_that_is_not_there_is_refused(backend: str) -> None:
    packed = BACKENDS[backend]().pack(torch.ones(5, 8))
    assert isinstance(packed, PackedMatrix)
    for row in (5, -1):
        with pytest.raises(ValueError, match=f"from 0 to 4, and there is {row}"):
            packed.rows(torch.tensor([row]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_float64_however_many_rows(
    backend: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    ops, weight, x = BACKENDS[backend](), torch.randn(shape).to(dtype), torch.randn(70, shape[1]).to(dtype)
    packed, bias = ops.pack(weight), torch.randn(shape[0]).to(dtype)
    expected = x.double() @ weight.double().T + bias.double()
    together = ops.linear(x.float(), packed, bias)  # rounded to the weight's type, and the result not at all
    error = 2e-6 * max(1, shape[1] / 300) ** 0.5  # of float32 sums, which grows as that of random steps does
    assert (together.double() - expected).abs().max() < error * expected.abs().max()
    for rows in ROWS:
        assert torch.equal(ops.linear(x[:rows].float(), packed, bias), together[:rows]), rows


def test_a_bias_ends_where_outputs_end(backend: str) -> None:
    """The weight is so wide that threads share its only block, and one of them has only padding."""
    ops, bias = BACKENDS[backend](), torch.tensor([0.5])
    packed = ops.pack(torch.randn(1, 9000))
    assert ops.linear(torch.zeros(2, 9000), packed, bias).tolist() == [[0.5], [0.5]]


def rounded(x: Tensor) -> np.ndarray:
    """Return x [N, in] quantized to 8 bits by 32 columns and dequantized, by numpy in float32 as in the kernels."""
    grouped = x.float().numpy().reshape(len(x), -1, 32)
    largest = np.abs(grouped).max(-1, keepdims=True)
    factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    numbers = np.rint(grouped * factor)
    return (numbers.astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize(("bits", "group"), FORMATS, ids=str)
@pytest.mark.parametrize("out", [1, 37, 128])
def test_products_of_whole_numbers_round_x_and_nothing_else(
    backend: str, out: int, bits: int, group: int | None
) -> None:
    ops, x, bias = BACKENDS[backend](), torch.randn(70, 192), torch.randn(out)
    x[3] = 0
    for weight in weights(out, bits, group):
        packed = ops.pack(weight)
        expected = rounded(x) @ dequantize(weight).double().numpy().T + bias.double().numpy()
        together = ops.linear(x, packed, bias)
        assert np.abs(together.double().numpy() - expected).max() < 1e-5 * np.abs(expected).max()
        for rows in ROWS:
            assert torch.equal(ops.linear(x[:rows], packed, bias), together[:rows]), rows


def test_products_of_whole_numbers_have_the_same_bits_everywhere(backend: str) -> None:
    first, ours = BACKENDS[CPUS[0]](), BACKENDS[backend]()
    x = torch.randn(20, 192)
    for bits, group in FORMATS:
        for weight in weights(50, bits, group):
            theirs = first.linear(x, first.pack(weight))
            assert torch.equal(ours.linear(x, ours.pack(weight)), theirs)


@pytest.mark.parametrize("unsound", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_what_is_no_number_stays_in_its_row(backend: str, bits: int, unsound: float) -> None:
    ops, x = BACKENDS[backend](), torch.randn(20, 192)
    x[7, 100] = unsound
    for weight in weights(40, bits, 32) if bits else [torch.randn(40, 192), torch.randn(40, 192).bfloat16()]:
        multiplied = ops.linear
        found = multiplied(x, ops.pack(weight)).isfinite()
        assert not found[7].any()
        assert found[:7].all()
        assert found[8:].all()


def layer(ops: Ops, dtype: torch.dtype) -> AttentionWeights:
    norm, angle = torch.rand(96).to(dtype), torch.randn(9, 8)
    q_norm, k_norm = torch.rand(2, 16).to(dtype).unbind()
    qkv, o = torch.randn(128, 96).to(dtype), torch.randn(96, 64).to(dtype)
    tables = angle.cos(), angle.sin()
    bias = torch.randn(128).to(dtype)
    return AttentionWeights(norm, qkv, bias, (q_norm, k_norm), tables, 4, 2, o, None, norm, norm, 1e-6).pack(ops)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_fused_operations_have_the_bits_of_single_ones(backend: str, rows: int, dtype: torch.dtype) -> None:
    ops = BACKENDS[backend]()
    weights, positions = layer(ops, dtype), torch.randint(9, (rows,))
    x, added, mixed = (torch.randn(rows, width).to(dtype) for width in (96, 96, 64))
    gated = GatedMLP(torch.randn(160, 96).to(dtype), None, torch.randn(96, 80).to(dtype), None, "silu").pack(ops)
    for also in (None, added):
        found = ops.qkv_proj_rope(weights, x, also, positions)
        for ours, theirs in zip(found, CompositeOps.qkv_proj_rope(ops, weights, x, also, positions), strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(
        ops.o_proj_add_norm(weights, x, mixed), CompositeOps.o_proj_add_norm(ops, weights, x, mixed), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(ops.mlp(gated, x), CompositeOps.mlp(ops, gated, x))
