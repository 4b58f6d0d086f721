"""The emulated device computes what the CPU computes, and refuses what torch refuses on mps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from metal_emulator import DEVICE, compile_shader, register_device

register_device()

COMPUTE: list[Callable[[Tensor], Tensor]] = [
    lambda x: (x @ x.T).softmax(-1) + 1,
    lambda x: x[1:, ::2].clone().mul_(3).add_(x[:-1, ::2]),
    lambda x: x.to(torch.float16).float().sum(0),
    lambda x: x.sort(stable=True, descending=True).values.cumsum(-1),
    lambda x: x[x > 0].unique(),
    lambda x: x[torch.tensor([2, 0])],  # indices of the host are copied
    lambda x: x * torch.tensor(2.0),  # so is a number
    lambda x: torch.where(x > 0, x, 0.0).repeat_interleave(2, 1),
    lambda x: torch.full_like(x, 3.0).index_fill_(0, torch.tensor([1], device=x.device), 2.0),
    lambda x: torch.arange(3, device=x.device) + torch.eye(3, device=x.device),
    lambda x: nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3),
    lambda x: x.new_ones(15, 32_767) @ x.new_ones(32_767, 17),
    lambda x: x.new_zeros(2).copy_(torch.ones(2)),
]


@pytest.mark.parametrize("compute", COMPUTE)
def test_it_computes_what_the_cpu_computes(compute: Callable[[Tensor], Tensor]) -> None:
    numbers = torch.randn(3, 4)
    with torch.inference_mode():
        found = compute(numbers.to(DEVICE))
        assert found.device == DEVICE
        torch.testing.assert_close(found.cpu(), compute(numbers))
        assert found.tolist() == found.cpu().tolist()


REFUSED: list[tuple[Callable[[Tensor], object], type[Exception], str]] = [
    (lambda x: x.double(), TypeError, "float64"),
    (lambda x: torch.zeros(2, dtype=torch.float64, device=x.device), TypeError, "float64"),
    (lambda x: torch.tensor([1.0], dtype=torch.float64, device=x.device), TypeError, "float64"),
    (lambda x: torch.eye(2, dtype=torch.float64, device=x.device), TypeError, "float64"),
    (lambda x: x.mode(), NotImplementedError, "'aten.mode.default' is not currently implemented for the MPS device"),
    (lambda x: x + torch.ones(3, 4), RuntimeError, "expected all tensors to be on the same device"),
    (lambda x: torch.cat([x, torch.ones(3, 4)]), RuntimeError, "expected all tensors to be on the same device"),
    (lambda x: x.numpy(), TypeError, "to numpy"),
    (lambda x: x.new_ones(16, 32_767) @ x.new_ones(32_767, 17), RuntimeError, "wrong on M1 and M2"),
    (lambda x: nn.functional.linear(x.new_ones(16, 32_767), x.new_ones(16, 32_767)), RuntimeError, "wrong on M1"),
    (lambda x: x.copy_(torch.ones(3, 4), non_blocking=True), RuntimeError, "read their source later"),
    (lambda x: x.to("cpu", non_blocking=True), RuntimeError, "read their source later"),
]


@pytest.mark.parametrize(("compute", "error", "message"), REFUSED)
def test_it_refuses_what_torch_refuses_on_mps(
    compute: Callable[[Tensor], object], error: type[Exception], message: str
) -> None:
    with torch.inference_mode(), pytest.raises(error, match=message):
        compute(torch.ones(3, 4, device=DEVICE))


def test_its_argmax_passes_over_nan_as_that_of_mps() -> None:
    tensor = torch.tensor([[1.0, torch.nan, 3.0], [torch.inf, 2.0, 3.0]], device=DEVICE)
    assert tensor.argmax(-1).tolist() == [2, 0]


def test_views_share_memory() -> None:
    tensor = torch.zeros(3, 4, device=DEVICE)
    tensor[1:].view(-1)[:2] += 5
    assert tensor.cpu()[1].tolist() == [5, 5, 0, 0]


def test_a_module_moves_there() -> None:
    module = nn.Linear(4, 2)
    with torch.inference_mode():
        expected = module(torch.ones(4))
        torch.testing.assert_close(module.to(DEVICE)(torch.ones(4, device=DEVICE)).cpu(), expected)


def test_every_thread_has_it() -> None:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(2, device=DEVICE) + 1))
    thread.start()
    thread.join()
    assert found[0].tolist() == [2, 2]


def test_kernels_write_to_its_tensors() -> None:
    source = "#include <metal_stdlib>\nkernel void f(device float* o, uint i [[thread_position_in_grid]]) { o[i] = i; }"
    tensor = torch.zeros(6, device=DEVICE)
    compile_shader(source).f(tensor[2:], threads=(4,))
    assert tensor.tolist() == [0, 0, 0, 1, 2, 3]
