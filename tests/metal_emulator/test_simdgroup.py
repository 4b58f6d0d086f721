"""Simd operations and barriers, in every order of threads and with both kinds of fibers, against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from metal_emulator import EmulatedKernel, Library, Order, compile_shader

OPERATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "simd_sum": ("simd_sum(v)", lambda x: x.sum(1, keepdim=True).expand_as(x)),
    "simd_max": ("simd_max(v)", lambda x: x.amax(1, keepdim=True).expand_as(x)),
    "simd_min": ("simd_min(v)", lambda x: x.amin(1, keepdim=True).expand_as(x)),
    "simd_product": ("simd_product(v % 3 + 1)", lambda x: (x % 3 + 1).prod(1, keepdim=True).int().expand_as(x)),
    "simd_and": ("simd_and(v | 1024)", lambda x: _folded(x | 1024, torch.bitwise_and)),
    "simd_or": ("simd_or(v)", lambda x: _folded(x, torch.bitwise_or)),
    "simd_xor": ("simd_xor(v)", lambda x: _folded(x, torch.bitwise_xor)),
    "simd_all": ("simd_all(v < 100) + 2 * simd_all(v >= 0)", lambda x: _all(x < 100) + 2 * _all(x >= 0)),
    "simd_any": ("simd_any(v > 190) + 2 * simd_any(v < 0)", lambda x: 1 - _all(x <= 190)),
    "simd_ballot": ("int(ulong(simd_ballot(v & 1)) & 0xFFFF)", lambda x: _ballot(x & 1)),
    "simd_shuffle": ("simd_shuffle(v, (lane * 5) % 32)", lambda x: x[:, torch.arange(32) * 5 % 32]),
    "simd_shuffle_xor": ("simd_shuffle_xor(v, 5)", lambda x: x[:, torch.arange(32) ^ 5]),
    "simd_shuffle_up": ("simd_shuffle_up(v, 3)", lambda x: torch.cat([x[:, :3], x[:, :-3]], 1)),
    "simd_shuffle_down": ("simd_shuffle_down(v, 3)", lambda x: torch.cat([x[:, 3:], x[:, -3:]], 1)),
    "simd_shuffle_rotate_up": ("simd_shuffle_rotate_up(v, 3)", lambda x: x.roll(3, 1)),
    "simd_shuffle_rotate_down": ("simd_shuffle_rotate_down(v, 3)", lambda x: x.roll(-3, 1)),
    "simd_shuffle_and_fill_up": (
        "simd_shuffle_and_fill_up(v, -v, 2)",
        lambda x: torch.cat([-x[:, -2:], x[:, :-2]], 1),
    ),
    "simd_shuffle_and_fill_down": (
        "simd_shuffle_and_fill_down(v, -v, 2)",
        lambda x: torch.cat([x[:, 2:], -x[:, :2]], 1),
    ),
    "simd_broadcast": ("simd_broadcast(v, 7)", lambda x: x[:, 7:8].expand_as(x)),
    "simd_broadcast_first": ("simd_broadcast_first(v)", lambda x: x[:, :1].expand_as(x)),
    "simd_prefix_inclusive_sum": ("simd_prefix_inclusive_sum(v)", lambda x: x.cumsum(1)),
    "simd_prefix_exclusive_sum": ("simd_prefix_exclusive_sum(v)", lambda x: x.cumsum(1) - x),
    "simd_is_first": ("int(simd_is_first())", lambda x: (torch.arange(32) == 0).expand_as(x).int()),
    "vectors": ("simd_sum(int3(v, 1, -v)).z", lambda x: -x.sum(1, keepdim=True).expand_as(x)),
}


def _folded(x: Tensor, fold: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    all_of_it = x[:, 0]
    for lane in range(1, 32):
        all_of_it = fold(all_of_it, x[:, lane])
    return all_of_it[:, None].expand_as(x)


def _all(x: Tensor) -> Tensor:
    return x.all(1, keepdim=True).expand_as(x).int()


def _ballot(x: Tensor) -> Tensor:
    return (x[:, :16] << torch.arange(16)).sum(1, keepdim=True).expand_as(x)


SOURCE = """
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;
""" + "".join(
    f"kernel void {name}_(const device int* x, device int* out, uint i [[thread_position_in_grid]],\n"
    f"    ushort lane [[thread_index_in_simdgroup]]) {{ const int v = x[i]; out[i] = {text}; }}\n"
    for name, (text, _) in OPERATIONS.items()
)
SOURCE += """
// A sum over a threadgroup, as kernels do it: simdgroups first, then the first of them.
kernel void total(const device float* x, device float* out, uint i [[thread_position_in_grid]],
                  uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                  uint sg [[simdgroup_index_in_threadgroup]], uint sgs [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[32];
  for (int round = 0; round < 3; round++) {
    const float sum = simd_sum(x[i] * float(round + 1));
    if (lane == 0) sums[sg] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float all = simd_sum(lane < sgs ? sums[lane] : 0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0 && sg == 0) out[group * 3 + round] = all;
  }
}
// One simdgroup runs ahead of the others, which meet at the barrier.
kernel void uneven(const device float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                   uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float kept[256];
  float v = x[t];
  for (uint round = 0; round < sg * 3; round++) v = simd_shuffle_xor(v, 1) + 1.0f;
  kept[t] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = kept[(t + 32) % 256];
}
kernel void part(const device float* x, device float* out, uint i [[thread_position_in_grid]]) {
  out[i] = simd_sum(x[i]) + simd_shuffle(x[i], 0);
}
"""
ORDERS = [(Order.FORWARD, 0), (Order.REVERSED, 0), (Order.RANDOM, 1), (Order.RANDOM, 2)]


@pytest.fixture(scope="module", params=ORDERS, ids=str)
def library(request: pytest.FixtureRequest) -> Library:
    order, seed = request.param
    return compile_shader(SOURCE, order=order, seed=seed)


def test_operations(library: Library) -> None:
    x = torch.randint(0, 200, (4, 32), dtype=torch.int32)
    for name, (_, wanted) in OPERATIONS.items():
        out = torch.zeros_like(x)
        getattr(library, f"{name}_")(x, out, threads=128, group_size=64)
        assert out.equal(wanted(x).int()), name


def test_a_sum_over_a_threadgroup(library: Library) -> None:
    """The same bits in every order of threads, as lanes are summed in order."""
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(1))
    out, forward = torch.zeros(5, 3), torch.zeros(5, 3)
    library.total(x, out, threads=5 * 1024, group_size=1024)
    compile_shader(SOURCE).total(x, forward, threads=5 * 1024, group_size=1024)
    assert out.equal(forward)
    assert out.double().allclose(x.double().sum(1, keepdim=True) * torch.tensor([1.0, 2, 3]), atol=1e-3)


def test_simdgroups_that_run_ahead(library: Library) -> None:
    x, out = torch.arange(256.0), torch.zeros(256)
    library.uneven(x, out, threads=256, group_size=256)
    wanted = x.view(8, 32).clone()
    for group in range(8):
        for _ in range(group * 3):
            wanted[group] = wanted[group].view(16, 2).flip(1).flatten() + 1
    assert out.equal(wanted.roll(-1, 0).flatten())


def test_a_simdgroup_with_fewer_lanes(library: Library) -> None:
    x, out = torch.arange(41.0), torch.zeros(41)
    library.part(x, out, threads=41, group_size=64)
    assert out[:32].eq(31 * 16.0).all()
    assert out[32:].eq(sum(range(32, 41)) + 32.0).all()


def _run(kernel: EmulatedKernel) -> Tensor:
    out = torch.zeros(5, 3)
    kernel(torch.arange(5 * 256.0), out, threads=5 * 256, group_size=256)
    return out


@pytest.mark.parametrize("checked", [False, True])
def test_fibers_of_the_c_library(checked: bool) -> None:
    """Used on processors other than x86-64."""
    portable = compile_shader(SOURCE, checked=checked, ucontext=True)
    assert _run(portable.total).equal(_run(compile_shader(SOURCE).total))
    assert portable.total.stats is not None
    assert portable.total.stats.switches > 5 * 256
