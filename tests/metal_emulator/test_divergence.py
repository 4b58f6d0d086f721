"""Threads that wait in different places, lanes that do not exist, and integer divisions that trap on a CPU."""

from __future__ import annotations

import platform
import re

import pytest
import torch

from metal_emulator import KernelFault, Library, Order, compile_shader

KERNELS = """
#include <metal_stdlib>
using namespace metal;
#define ARGUMENTS                                                                                              \\
  const device float* x [[buffer(0)]], device float* out [[buffer(1)]], uint i [[thread_position_in_grid]],    \\
      uint lane [[thread_index_in_simdgroup]]
#define B threadgroup_barrier(mem_flags::mem_threadgroup)
#define S simdgroup_barrier(mem_flags::mem_none)
inline float total(float v) { return simd_sum(v) + simd_max(v); }

#line 1 "right.metal"
kernel void branches_around(ARGUMENTS) {
  float v = i < 16 ? sin(x[i]) : cos(x[i]);
  B; B;
  if (i < 16) v *= 2; else v -= 3;
  threadgroup_barrier(i < 16 ? mem_flags::mem_device : mem_flags(1));
  for (uint n = i; n < i + 5; ++n) { v += simd_sum(v * n); B; if (n % 2) v += 1; else v -= 1; }
  for (uint n = 0; n < uint(x[0]) + 3; ++n) { B; if (i < 16) v *= 0.5; v = simd_max(v); S; }
  out[i] = total(v) + metal::simd_min(total(v)) + simd_shuffle_xor(simd_sum(v), 1);
  if (simd_active_threads_mask().any() && simd_is_first()) out[i] = 0;
}

#line 1 "wrong.metal"
kernel void barriers(ARGUMENTS) { float v = x[i]; if (i < 32) { B; v *= 2; } else { v = sin(v); B; } out[i] = v; }
kernel void alike(ARGUMENTS) { if (i < 32) { B; } else { B; } }
kernel void in_a_simdgroup(ARGUMENTS) { if (i < 16) S; else S; }
kernel void sums(ARGUMENTS) { if (lane < 16) out[i] = simd_sum(1.0f) * 2; else out[i] = sin(simd_sum(2.0f)); }
kernel void votes(ARGUMENTS) { bool b = lane < 16 ? simd_ballot(1).any() : simd_ballot(1).all(); out[i] = b; }
kernel void flags(ARGUMENTS) { threadgroup_barrier(i < 16 ? mem_flags::mem_device : mem_flags::mem_threadgroup); }
kernel void flags_in_a_simdgroup(ARGUMENTS) { simdgroup_barrier(i == 3 ? mem_flags::mem_device : mem_flags::mem_none); }

#line 1 "lanes.metal"
kernel void shuffle(ARGUMENTS) { out[i] = simd_shuffle(x[i], ushort(x[63])); }
kernel void broadcast(ARGUMENTS) { out[i] = simd_broadcast(x[i], ushort(x[63])); }
kernel void to_xor(ARGUMENTS) { out[i] = simd_shuffle_xor(x[i], ushort(x[63])); }
kernel void down(ARGUMENTS) { out[i] = simd_shuffle_down(x[i], ushort(x[63])); }
kernel void up(ARGUMENTS) { out[i] = simd_shuffle_up(x[i], ushort(x[63])); }
kernel void rotate(ARGUMENTS) { out[i] = simd_shuffle_rotate_up(x[i], ushort(x[63])); }
kernel void fill(ARGUMENTS) { out[i] = simd_shuffle_and_fill_down(x[i], -x[i], ushort(x[63])); }
kernel void broadcasts(ARGUMENTS) { out[i] = simd_broadcast(x[i], ushort(lane / 4)); }

#line 1 "divided.metal"
kernel void divided(const device int* x, const device int* by, device int* out, uint i [[thread_position_in_grid]]) {
  threadgroup_barrier(mem_flags::mem_none);
  out[i] =
      x[i] / by[i];
}
"""


@pytest.fixture(scope="module")
def checked() -> Library:
    return compile_shader(KERNELS, checked=True)


@pytest.fixture(scope="module")
def fast() -> Library:
    return compile_shader(KERNELS)


def run(library: Library, kernel: str, threads: int = 64, lane: float = 0) -> torch.Tensor:
    """Run with x[63] = `lane`."""
    x, out = torch.arange(64.0), torch.zeros(64)
    x[63] = lane
    getattr(library, kernel)(x, out, threads=threads, group_size=threads)
    return out


def fault(library: Library, kernel: str, threads: int = 64, lane: float = 0) -> str:
    with pytest.raises(KernelFault) as raised:
        run(library, kernel, threads, lane)
    return str(raised.value)


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("is_checked", [True, False])
def test_what_meets_in_one_place_passes(order: Order, is_checked: bool) -> None:
    """Even if the compiler duplicates or merges the calls."""
    library = compile_shader(KERNELS, checked=is_checked, order=order, seed=7)
    assert run(library, "branches_around").isfinite().all()


@pytest.mark.parametrize("build", ["checked", "fast"])
@pytest.mark.parametrize(
    ("kernel", "line", "operation"),
    [
        ("barriers", 1, "threadgroup_barrier"),
        ("alike", 2, "threadgroup_barrier"),
        ("in_a_simdgroup", 3, "simdgroup_barrier"),
        ("sums", 4, "simd_sum"),
        ("votes", 5, "simd_ballot"),
    ],
)
def test_two_places_of_a_line(
    request: pytest.FixtureRequest, build: str, kernel: str, line: int, operation: str
) -> None:
    message = fault(request.getfixturevalue(build), kernel)
    first, second, *_ = message.split(" waits in ")[1:]
    columns = [part.removeprefix(f"{operation} at wrong.metal:{line}:").split(",")[0] for part in (first, second)]
    later, earlier = (int(part.split(":")[0]) for part in columns)
    assert later > earlier > 1
    assert message.endswith("all threads must come to the same one")


@pytest.mark.parametrize("build", ["checked", "fast"])
@pytest.mark.parametrize(("kernel", "line", "thread"), [("flags", 6, 16), ("flags_in_a_simdgroup", 7, 3)])
def test_flags_of_one_barrier(request: pytest.FixtureRequest, build: str, kernel: str, line: int, thread: int) -> None:
    message = fault(request.getfixturevalue(build), kernel)
    assert f"thread {thread} of group 0 waits in" in message
    assert f"wrong.metal:{line}:" in message
    assert message.endswith("all must give it the same flags")


@pytest.mark.parametrize(
    ("kernel", "threads", "asked", "lane", "lanes"),
    [
        ("shuffle", 20, 25, 25, 20),
        ("shuffle", 52, 25, 25, 20),
        ("shuffle", 64, 32, 32, 32),
        ("broadcast", 20, 25, 25, 20),
        ("broadcast", 64, 40, 40, 32),
        ("to_xor", 20, 16, None, 20),
        ("to_xor", 64, 32, None, 32),
        ("down", 20, 3, None, 20),
        ("rotate", 20, 1, 31, 20),
        ("fill", 20, 2, None, 20),
    ],
)  # fmt: skip
def test_lanes_that_do_not_exist(
    checked: Library, kernel: str, threads: int, asked: int, lane: int | None, lanes: int
) -> None:
    message = fault(checked, kernel, threads, asked)
    told = re.search(
        r"thread (\d+) of group 0 asks for lane (\d+) in simd_\w+ at lanes.metal:\d, .* has (\d+):", message
    )
    assert told is not None, message
    thread = int(told[1]) % 32
    expected = lane if lane is not None else thread ^ asked if kernel == "to_xor" else thread + asked
    assert (int(told[2]), int(told[3])) == (expected, lanes)
    assert expected >= lanes


@pytest.mark.parametrize(
    ("kernel", "threads", "asked", "first"),
    [("shuffle", 20, 19, 19), ("down", 64, 3, 3), ("down", 64, 40, 0), ("up", 20, 3, 0), ("up", 64, 40, 0),
     ("rotate", 64, 1, 31), ("fill", 64, 2, 2), ("broadcast", 20, 7, 7), ("to_xor", 64, 5, 5)],
)  # fmt: skip
def test_lanes_that_exist(checked: Library, fast: Library, kernel: str, threads: int, asked: int, first: int) -> None:
    found = run(checked, kernel, threads, asked)
    assert found[0] == first
    assert found.equal(run(fast, kernel, threads, asked))


def test_one_broadcast_has_one_lane(checked: Library) -> None:
    message = fault(checked, "broadcasts")
    assert "do not ask for the same lane in simd_broadcast at lanes.metal:8: use simd_shuffle" in message


@pytest.mark.parametrize("build", ["checked", "fast"])
@pytest.mark.parametrize(("x", "by"), [(7, 0), (-(2**31), -1)])
def test_divisions_end_the_launch_alone(request: pytest.FixtureRequest, build: str, x: int, by: int) -> None:
    library = request.getfixturevalue(build)
    xs, bys, out = torch.full((64,), 7).int(), torch.full((64,), 2).int(), torch.zeros(64).int()
    xs[5], bys[5] = x, by
    if platform.machine() == "x86_64":  # others have a result
        where = " at divided.metal:[34]" if build == "checked" else ""
        for _ in range(3):
            with pytest.raises(KernelFault, match=f"division by thread 5 of group 0{where}: an integer is divided by"):
                library.divided(xs, bys, out, threads=64, group_size=64)
    library.divided(xs, bys.fill_(2), out, threads=64, group_size=64)
    assert out.equal(torch.div(xs, 2, rounding_mode="trunc"))
