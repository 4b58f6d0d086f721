"""The operations beside attention match their formulas in float64, and keep the dtype of their input."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from tests.kernels.backend_matrix import BACKENDS, NAMES

backends = pytest.mark.parametrize("backend", NAMES)
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@dtypes
@pytest.mark.parametrize("bias", [True, False])
@backends
def test_linear(backend: str, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(5, 12).to(dtype), torch.randn(7, 12).to(dtype)
    b = torch.randn(7).to(dtype) if bias else None
    got = BACKENDS[backend]().linear(x, weight, b)
    want = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@backends
def test_linear_multiplies_in_the_type_of_the_weight(backend: str) -> None:
    x, weight = torch.randn(5, 12), torch.randn(7, 12).bfloat16()
    got = BACKENDS[backend]().linear(x, weight)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, torch.nn.functional.linear(x.bfloat16(), weight).float(), rtol=1e-2, atol=1e-2)


@dtypes
@backends
def test_rms_norm(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    x, weight = (torch.randn(5, 12) * 30).to(dtype), torch.randn(12).to(dtype)
    got = BACKENDS[backend]().rms_norm(x, weight, 1e-6)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@backends
def test_rms_norm_with_a_float32_weight_rounds_last_as_gemma_does(backend: str) -> None:
    theirs = Gemma2RMSNorm(256)
    theirs.weight.data = torch.randn(256).bfloat16()
    x = torch.randn(40, 256).bfloat16()
    got = BACKENDS[backend]().rms_norm(x, 1.0 + theirs.weight.data.float(), theirs.eps)
    assert torch.equal(got, theirs(x))


@dtypes
@backends
def test_rope_turns_pairs_of_the_two_halves(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    x, positions = torch.randn(4, 3, 8).to(dtype), torch.tensor([0, 1, 17, 99_999])
    rates = 10_000.0 ** -(torch.arange(0, 8, 2).double() / 8)
    angles = torch.arange(100_000).double()[:, None] * rates
    got = BACKENDS[backend]().rope(x, angles.cos().float(), angles.sin().float(), positions)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    turned = pairs * torch.polar(torch.ones(4, 1, 4).double(), angles[positions][:, None])
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), torch.cat((turned.real, turned.imag), -1), rtol=tolerance, atol=tolerance)


@dtypes
@backends
def test_silu_mul(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(5, 12).to(dtype)
    got = BACKENDS[backend]().silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), gate / (1 + (-gate).exp()) * up, rtol=tolerance, atol=tolerance)
