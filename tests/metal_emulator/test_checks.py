"""The emulator catches planted bugs, and its message says where they are."""

from __future__ import annotations

import re

import pytest
import torch

from metal_emulator import Compiler, KernelFault, Library, compile_shader

# Each kernel gets x and out of 64 floats and runs as two threadgroups of 32 or one of 64. `BUG` stands in its comment.
KERNELS = """
#include <metal_stdlib>
using namespace metal;
#define ARGUMENTS                                                                                              \\
  const device float* x [[buffer(0)]], device float* out [[buffer(1)]], uint i [[thread_position_in_grid]],    \\
      uint t [[thread_position_in_threadgroup]]
constant float TABLE[4] = {1, 2, 3, 4};

#line 1 "right.metal"
kernel void right(ARGUMENTS) {
  threadgroup float s[64];
  s[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[t ^ 1] * TABLE[t % 4];
}
kernel void right_in_simdgroups(ARGUMENTS) {
  threadgroup float s[64];
  s[t] = x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[t ^ 1];
}
kernel void right_on_device(ARGUMENTS) {
  out[i] = x[i];
  threadgroup_barrier(mem_flags::mem_device);
  const float other = out[i ^ 1];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = other;
}
kernel void right_atomics(ARGUMENTS) {
  atomic_fetch_add_explicit((device atomic_uint*)out, 1u, memory_order_relaxed);
}

#line 1 "races.metal"
kernel void no_barrier(ARGUMENTS) {
  threadgroup float s[64];
  s[t] = x[i];
  out[i] = s[t ^ 1];
}
kernel void mem_none(ARGUMENTS) {
  threadgroup float s[64];
  s[t] = x[i];
  threadgroup_barrier(mem_flags::mem_none);
  out[i] = s[t ^ 1];
}
kernel void wrong_kind(ARGUMENTS) {
  threadgroup float s[64];
  s[t] = x[i];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = s[t ^ 1];
}
kernel void wrong_kind_on_device(ARGUMENTS) {
  out[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = out[i ^ 1];
}
kernel void simdgroup_barrier_for_all(ARGUMENTS) {
  threadgroup float s[64];
  s[t] = x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[t ^ 32];
}
kernel void two_writers(ARGUMENTS) { out[i % 32] = x[i]; }
kernel void same_value(ARGUMENTS) { out[0] = 1.0f; }
kernel void read_by_the_other(ARGUMENTS) {
  if (t == 0) out[i / 32 * 32 + 1] = out[32 - i / 32 * 32 + 1];
}
kernel void atomic_and_not(ARGUMENTS) {
  if (t == 0) out[0] = 0.0f;
  atomic_fetch_add_explicit((device atomic_uint*)out, 1u, memory_order_relaxed);
}
kernel void write_after_reads(ARGUMENTS) {
  threadgroup float s[64];
  s[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[0];
  if (t == 1) s[0] = 1.0f;
}

#line 1 "places.metal"
kernel void beyond_threadgroup(ARGUMENTS) {
  threadgroup float a[31];
  threadgroup float b[32];
  a[t] = b[t] = x[i];
}
kernel void beyond(ARGUMENTS) { out[i + 1] = x[i]; }
kernel void before(ARGUMENTS) { out[i] = (x - 1)[i]; }
kernel void nowhere(ARGUMENTS) { out[i] = *(const device float*)(16 + ulong(x) % 4); }
kernel void misaligned(ARGUMENTS) { ((device float4*)(out + 1))[0] = float4(x[0]); }
kernel void constant_written(ARGUMENTS) { ((device float*)x)[i] = 1.0f; }
kernel void vectors(ARGUMENTS) {
  const float4 four = ((const device float4*)x)[i];
  out[i] = dot(four, four);
}

#line 1 "divergence.metal"
kernel void barrier_in_branch(ARGUMENTS) {
  if (t < 16)
    threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = x[i];
}
kernel void simd_sum_in_branch(ARGUMENTS) {
  if (t < 16)
    out[i] = simd_sum(x[i]);
}
kernel void early_return(ARGUMENTS) {
  if (t == 5) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = x[i];
}
kernel void two_barriers(ARGUMENTS) {
  if (t < 32)
    threadgroup_barrier(mem_flags::mem_threadgroup);
  else
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
kernel void two_operations(ARGUMENTS) {
  out[i] = t & 1 ? simd_sum(x[i])
                 : simd_max(x[i]);
}

#line 1 "memory.metal"
kernel void uninitialised(ARGUMENTS) {
  threadgroup float s[64];
  if (t != 3) s[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[t];
}
kernel void unassigned(ARGUMENTS) {
  float one, array[4];
  float4 vector;
  half4 halves;
  if (t != 3) one = x[i];
  if (t != 4) array[t % 4] = x[i];
  if (t != 5) vector.y = x[i];
  if (t != 6) halves.z = half(x[i]);
  out[i] = (one + array[t % 4] + vector.y + float(halves.z)) / 4;
}
kernel void too_large(ARGUMENTS) {
  threadgroup float s[8192];
  threadgroup float one;
  s[t] = one = x[i];
}
"""

GROUPS_OF_32 = 32
GROUP_OF_64 = 64


@pytest.fixture(scope="module")
def checked() -> Library:
    return compile_shader(KERNELS, checked=True)


@pytest.fixture(scope="module")
def fast() -> Library:
    return compile_shader(KERNELS)


def run(library: Library, kernel: str, group: int) -> torch.Tensor:
    x, out = torch.arange(64.0), torch.zeros(64)
    getattr(library, kernel)(x, out, threads=64, group_size=group)
    return out


def fault(library: Library, kernel: str, group: int) -> str:
    with pytest.raises(KernelFault) as raised:
        run(library, kernel, group)
    return str(raised.value)


@pytest.mark.parametrize("group", [GROUPS_OF_32, GROUP_OF_64])
def test_what_is_right_passes(checked: Library, group: int) -> None:
    x = torch.arange(64.0)
    swapped = x.view(32, 2).flip(1).flatten()
    assert run(checked, "right", group).equal(swapped * torch.tensor([1.0, 2, 3, 4]).repeat(16))
    assert run(checked, "right_in_simdgroups", group).equal(swapped)
    assert run(checked, "right_on_device", group).equal(swapped)
    assert run(checked, "right_atomics", group).view(torch.int32)[0] == 64
    stats = checked.right_atomics.stats
    assert stats is not None
    assert stats.accesses == 64


@pytest.mark.parametrize(
    ("kernel", "group", "told"),
    [
        ("no_barrier", 64, r"'s', byte 4: write of 4 bytes by thread 1 of group 0 at races.metal:3; "
         r"earlier read by thread 0 of group 0 at races.metal:4; no barrier with mem_flags::mem_threadgroup"),
        ("mem_none", 64, r"'s', byte \d+: read .* races.metal:10; earlier write .* races.metal:8; no barrier with"),
        ("wrong_kind", 64, r"'s'.* races.metal:16.* races.metal:14.*mem_threadgroup"),
        ("wrong_kind_on_device", 64, r"argument 1 'out', element \d+ .* races.metal:21; .*races.metal:19.*mem_device"),
        ("simdgroup_barrier_for_all", 64, r"'s'.*write .*races.metal:25; .*read .*races.metal:27"),
        ("two_writers", 32, r"argument 1 'out', element 0 \(byte 0\): write of 4 bytes by thread 0 of group 1 at "
         r"races.metal:29; earlier write by thread 0 of group 0 at races.metal:29; nothing orders threadgroups"),
        ("same_value", 64, r"'out', element 0.*thread 1 of group 0.*thread 0 of group 0"),
        ("read_by_the_other", 32, r"'out', element 1 .*read .*group 1 at races.metal:32; earlier write .*group 0"),
        ("atomic_and_not", 64, r"'out', element 0.*atomic write.*earlier write by thread 0 .*races.metal:35"),
        ("write_after_reads", 64, r"'s', byte 0: write .* thread 1 .*races.metal:43; earlier read .*races.metal:42"),
    ],
)  # fmt: skip
def test_races(checked: Library, kernel: str, group: int, told: str) -> None:
    message = fault(checked, kernel, group)
    assert message.startswith(f"{kernel}: data race on ")
    assert re.search(told, message), message


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        ("beyond_threadgroup", r"out of bounds: write of 4 bytes by thread 31 of group 0 at places.metal:4, "
         r"4 bytes beyond the end of threadgroup variable 'a', which has 124 bytes"),
        ("beyond", r"out of bounds: write of 4 bytes by thread 31 of group 1 at places.metal:6, "
         r"4 bytes beyond the end of argument 1 'out', which has 256 bytes"),
        ("before", r"read of 4 bytes by thread 0 .* places.metal:7, 4 bytes before the begin of argument 0 'x'"),
        ("nowhere", r"out of bounds: read .*places.metal:8, nowhere near any argument"),
        ("misaligned", r"misaligned: write of 16 bytes .*places.metal:9 at argument 1 'out', element 1 \(byte 4\)"),
        ("constant_written", r"write to constant argument 0 'x', element 0 .*places.metal:10"),
        ("vectors", r"out of bounds: read of \d+ bytes by thread 16 .*places.metal:12, \d+ bytes beyond .* 'x'"),
    ],
)  # fmt: skip
def test_places(checked: Library, kernel: str, told: str) -> None:
    message = fault(checked, kernel, GROUPS_OF_32)
    assert re.search(told, message), message


@pytest.mark.parametrize("build", ["checked", "fast"])
@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        ("barrier_in_branch", r"thread 16 of group 0 has returned, but thread 0 of group 0 waits in "
         r"threadgroup_barrier at divergence.metal:3"),
        ("simd_sum_in_branch", r"thread 16 of group 0 has returned, but thread 0 of group 0 waits in simd_sum at "
         r"divergence.metal:8"),
        ("early_return", r"thread 5 of group 0 has returned, but thread \d of group 0 waits in threadgroup_barrier at "
         r"divergence.metal:12"),
        ("two_barriers", r"thread 32 .* waits in threadgroup_barrier at divergence.metal:19, but thread 0 .* "
         r"divergence.metal:17"),
        ("two_operations", r"thread 1 .* waits in simd_sum at divergence.metal:22, but thread 0 .* simd_max at "
         r"divergence.metal:23"),
    ],
)  # fmt: skip
def test_divergence(request: pytest.FixtureRequest, build: str, kernel: str, told: str) -> None:
    message = fault(request.getfixturevalue(build), kernel, GROUP_OF_64)
    assert message.startswith(f"{kernel}: divergence: ")
    assert re.search(told, message), message


@pytest.mark.parametrize("build", ["checked", "fast"])
def test_memory_of_a_threadgroup_begins_as_nan(request: pytest.FixtureRequest, build: str) -> None:
    """In every threadgroup, also after another one has written all of it."""
    library: Library = request.getfixturevalue(build)
    run(library, "right", GROUPS_OF_32)
    out = run(library, "uninitialised", GROUPS_OF_32)
    assert out.isnan().nonzero().flatten().tolist() == [3, 35]


def test_variables_of_a_thread_begin_as_garbage(checked: Library) -> None:
    if not Compiler.find().can_fill_variables():
        pytest.skip("the compiler is too old: g++ 12 and clang++ 8 know -ftrivial-auto-var-init")
    out = run(checked, "unassigned", GROUPS_OF_32)
    wrong = ~(out - torch.arange(64.0)).abs().lt(1e30)  # NaN, or a number that nothing else gives
    assert wrong.nonzero().flatten().tolist() == [3, 4, 5, 6, 35, 36, 37, 38]
    assert out[~wrong].equal(torch.arange(64.0)[~wrong])


@pytest.mark.parametrize("build", ["checked", "fast"])
def test_memory_of_a_threadgroup_is_limited(request: pytest.FixtureRequest, build: str) -> None:
    message = fault(request.getfixturevalue(build), "too_large", GROUPS_OF_32)
    assert message == "too_large: 'one' makes 32784 bytes of threadgroup memory, and Metal has 32768"


def test_variables_of_a_threadgroup_are_counted_by_kernel() -> None:
    """The source may have more than a kernel."""
    names = [f"t{i}" for i in range(64)]
    kernels = "".join(
        f"kernel void {kernel}(device float* out) {{\n"
        f"threadgroup float {', '.join(names)}; {' '.join(f'{name} = {i};' for i, name in enumerate(names))}\n"
        f"out[0] = {' + '.join(names)}; (&t63)[{past}] = 1;\n}}\n"
        for kernel, past in (("inside", 0), ("outside", 1))
    )
    library, out = compile_shader(f"#include <metal_stdlib>\n{kernels}", checked=True), torch.zeros(1)
    library.inside(out)
    assert out == 64 * 63 / 2
    with pytest.raises(KernelFault, match="4 bytes beyond the end of threadgroup variable 't63', which has 4 bytes"):
        library.outside(out)


def test_a_library_goes_on_after_a_failure(checked: Library) -> None:
    for _ in range(3):
        fault(checked, "barrier_in_branch", GROUP_OF_64)
        fault(checked, "no_barrier", GROUP_OF_64)
        assert run(checked, "right_in_simdgroups", GROUP_OF_64).sum() == 63 * 32
