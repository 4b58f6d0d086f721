"""Calls of kernels: accepts what torch.mps.compile_shader accepts, and refuses what that would read wrongly."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from metal_emulator import KernelFault, Library, Order, Stats, compile_shader
from metal_emulator.arguments import extent_bytes

KERNELS = """
#include <metal_stdlib>
using namespace metal;

kernel void full(device float* out, constant float& val, uint idx [[thread_position_in_grid]]) { out[idx] = val; }

struct Place {
  uint grid[3], group[3], local[3], size[3], nominal[3], groups[3], threads[3], index, lane, sg, sgs, lanes;
};
kernel void places(device Place* out, uint3 grid [[thread_position_in_grid]],
                   uint3 group [[threadgroup_position_in_grid]],
                   ushort3 local [[thread_position_in_threadgroup]], uint3 size [[threads_per_threadgroup]],
                   uint3 nominal [[dispatch_threads_per_threadgroup]], uint3 groups [[threadgroups_per_grid]],
                   uint3 threads [[threads_per_grid]], uint index [[thread_index_in_threadgroup]],
                   ushort lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]],
                   uint sgs [[simdgroups_per_threadgroup]], uint lanes [[threads_per_simdgroup]]) {
  device Place& p = out[(grid.z * threads.y + grid.y) * threads.x + grid.x];
  for (int d = 0; d < 3; d++) {
    p.grid[d] = grid[d]; p.group[d] = group[d]; p.local[d] = local[d]; p.size[d] = size[d];
    p.nominal[d] = nominal[d]; p.groups[d] = groups[d]; p.threads[d] = threads[d];
  }
  p.index = index; p.lane = lane; p.sg = sg; p.sgs = sgs; p.lanes = lanes;
}

kernel void values(device float* out, constant long& i8 [[buffer(1)]], constant uint& u4 [[buffer(2)]],
                   constant half& h [[buffer(3)]], constant short& s [[buffer(4)]], constant float4& f4 [[buffer(5)]],
                   constant long* list [[buffer(6)]], constant bfloat& b [[buffer(7)]],
                   constant bool& flag [[buffer(8)]]) {
  out[0] = float(i8); out[1] = float(u4); out[2] = float(h); out[3] = float(s);
  out[4] = f4.w; out[5] = float(list[2]); out[6] = float(b); out[7] = flag ? 1 : 0;
}

kernel void dtypes(device float* f, device half* h, device bfloat* b, device int* i, device uint* u, device long* l,
                   device char* c, device short* s, device bool* t, device uint4* any) {
  f[0] = 1; h[0] = 2; b[0] = bfloat(3); i[0] = -4; u[0] = 5; l[0] = 6; c[0] = 7; s[0] = 8; t[0] = true; any[0].w = 9;
}

kernel void strided(const device float* x, device float* out, constant uint2& strides,
                    uint2 at [[thread_position_in_grid]], uint2 size [[threads_per_grid]]) {
  out[at.y * size.x + at.x] = x[at.y * strides.x + at.x * strides.y];
}
kernel void numbered(device atomic_uint* turns, device uint* out, uint i [[thread_position_in_grid]]) {
  out[i] = atomic_fetch_add_explicit(turns, 1, memory_order_relaxed);
}
kernel void increments(const device float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i] + 1; }

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(64)]] void repeated(device T* out [[buffer(0)]],
                                                                uint i [[thread_position_in_grid]]) {
  out[i] = T(N);
}
template [[host_name("repeated_half_3")]] [[kernel]] void repeated<half, 3>(device half*, uint);
template [[host_name("repeated_" "int_4")]] [[kernel]] decltype(repeated<int, 4>) repeated<int, 4>;

[[host_name("named")]] kernel void has_another_name(device float* out) { out[0] = 1; }
[[kernel]] [[max_total_threads_per_threadgroup(32)]] void narrow(device float* out,
                                                                uint i [[thread_position_in_grid]]) {
  out[i] = simd_sum(1.0f);
}
"""


@pytest.fixture(scope="module")
def library() -> Library:
    return compile_shader(KERNELS)


@pytest.fixture(scope="module")
def checked() -> Library:
    return compile_shader(KERNELS, checked=True)


def test_kernels_are_attributes(library: Library) -> None:
    assert {"full", "repeated_half_3", "repeated_int_4", "named"} <= set(dir(library))
    assert library.full is library.full
    with pytest.raises(RuntimeError, match="Failed to create function state object for: nothing"):
        _ = library.nothing
    assert not hasattr(library, "__deepcopy__")


def test_the_example_of_torchs_documentation(library: Library) -> None:
    x = torch.zeros(16)
    library.full(x, 3.14)
    assert x.eq(torch.tensor(3.14)).all()


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize(
    ("threads", "group"),
    [((70,), (32,)), ((5, 7), (4, 3)), ((5, 3, 4), (2, 2, 3)), ((1, 1, 1), (1, 1, 1)), ((40,), None), ((3, 2), None)],
)
def test_what_a_thread_knows_of_itself(order: Order, threads: tuple[int, ...], group: tuple[int, ...] | None) -> None:
    places = compile_shader(KERNELS, order=order, seed=3).places
    x, y, z = (*threads, 1, 1)[:3]
    if group is None:
        gx, gy, gz = (min(x, 1024) if len(threads) == 1 else 1024), 1, 1
    else:
        gx, gy, gz = (*group, 1, 1)[:3]
    out = torch.zeros(z * y * x, 26, dtype=torch.int32)
    places(out, threads=threads, group_size=group)
    for index, found in enumerate(out.tolist()):
        grid = (index % x, index // x % y, index // (x * y))
        which = tuple(at // each for at, each in zip(grid, (gx, gy, gz), strict=True))
        local = tuple(at % each for at, each in zip(grid, (gx, gy, gz), strict=True))
        size = tuple(min(each, all_ - at * each) for each, all_, at in zip((gx, gy, gz), (x, y, z), which, strict=True))
        number = (local[2] * size[1] + local[1]) * size[0] + local[0]
        simdgroups = -(-size[0] * size[1] * size[2] // 32)
        groups = (-(-x // gx), -(-y // gy), -(-z // gz))
        wanted = [*grid, *which, *local, *size, gx, gy, gz, *groups, x, y, z]
        assert found == [*wanted, number, number % 32, number // 32, simdgroups, 32]


def test_every_threadgroup_has_its_turn() -> None:
    turns = {}
    for order, seed in ((Order.FORWARD, 0), (Order.REVERSED, 0), (Order.RANDOM, 1), (Order.RANDOM, 2)):
        out = torch.zeros(100, dtype=torch.int32)
        library = compile_shader(KERNELS, order=order, seed=seed)
        library.numbered(torch.zeros(1, dtype=torch.int32), out, threads=100, group_size=1)
        turns[order, seed] = out.tolist()
    assert turns[Order.FORWARD, 0] == list(range(100))
    assert turns[Order.REVERSED, 0] == list(range(99, -1, -1))
    assert all(sorted(each) == list(range(100)) for each in turns.values())
    assert len({tuple(each) for each in turns.values()}) == 4


def test_numbers_and_lists(library: Library, checked: Library) -> None:
    for each in (library, checked):
        out = torch.zeros(8)
        args = (-(2**40), 7, 1.5, -3, [1.0, 2.0, 3.0, 4.0], (5, 6, 7), 0.3, True)
        each.values(out, *args, threads=1, arg_casts={3: "fp16", 4: "int16", 7: "bf16"})
        assert out.tolist() == [-(2.0**40), 7, 1.5, -3, 4, 7, torch.tensor(0.3).bfloat16().item(), 1]


def test_one_cast_for_all(library: Library) -> None:
    out = torch.zeros(2)
    library.full(out, torch.tensor(2.5))
    assert out.tolist() == [2.5, 2.5]
    with pytest.raises(TypeError, match="argument 1 'val': the kernel reads float, not 2 bytes each"):
        library.full(out, 2.5, arg_casts="fp16")


def test_dtypes(library: Library) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.uint32, torch.int32, torch.uint64, torch.uint8,
              torch.int16, torch.bool, torch.float16)  # fmt: skip
    tensors = [torch.zeros(16, dtype=dtype) for dtype in dtypes]
    library.dtypes(*tensors, threads=1)
    found = [tensor.view(torch.uint8).view(dtype)[0].item() for tensor, dtype in zip(tensors, dtypes, strict=True)][:9]
    assert found == [1, 2, 3, 2**32 - 4, 5, 6, 7, 8, 1]
    assert tensors[9].view(torch.int32)[3] == 9


def test_every_scalar_is_told_by_its_name() -> None:
    names = ("float", "half", "bfloat", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "bool")
    kernels = "".join(f"kernel void take_{name}(device {name}* out) {{}}\n" for name in names)
    library = compile_shader(f"#include <metal_stdlib>\n{kernels}")
    for name in names:
        with pytest.raises(TypeError, match=f"argument 0 'out': the kernel reads {name}, not torch.complex64"):
            getattr(library, f"take_{name}")(torch.zeros(4, dtype=torch.complex64))


@pytest.mark.parametrize("build", ["library", "checked"])
def test_strided_views(request: pytest.FixtureRequest, build: str) -> None:
    kernels: Library = request.getfixturevalue(build)
    whole, out = torch.arange(100.0), torch.zeros(3, 4)
    for view in (whole[7:].as_strided((3, 4), (20, 3), 7), whole.view(10, 10).t()[2:5, 1:5]):
        kernels.strided(view, out, list(view.stride()), threads=(4, 3), group_size=(2, 2), arg_casts="int32")
        assert out.equal(view)


def test_bounds_are_those_of_the_view(checked: Library) -> None:
    """The storage extends beyond the view on both sides."""
    whole = torch.zeros(100)
    view = whole[10:60].as_strided((5, 3), (7, 2), 10)
    assert extent_bytes(view) == (4 * 7 + 2 * 2 + 1) * 4
    checked.full(view, 1.0, threads=33)
    assert whole.count_nonzero() == 33
    with pytest.raises(KernelFault, match=r"4 bytes beyond the end of argument 0 'out', which has 132 bytes"):
        checked.full(view, 1.0, threads=34)


def test_arguments_may_overlap(checked: Library) -> None:
    memory = torch.arange(40.0)
    checked.increments(memory[:20], memory[:20])
    assert memory.tolist() == [*range(1, 21), *range(20, 40)]
    with pytest.raises(
        KernelFault, match=r"data race on argument 1 'y', element 2 .*write .*thread 2 .*read .*thread 0"
    ):
        checked.increments(memory[2:20], memory[:18])


def test_stats(library: Library, checked: Library) -> None:
    x = torch.zeros(100)
    library.full(x, 1.0, group_size=32)
    assert library.full.stats == Stats(threads=100, groups=4, switches=4, threadgroup_bytes=0, accesses=0)
    checked.full(x, 1.0, group_size=32)
    assert checked.full.stats is not None
    assert checked.full.stats.accesses >= 100


def test_limits_of_threads(library: Library) -> None:
    half, number, out = torch.zeros(128).half(), torch.zeros(128, dtype=torch.int32), torch.zeros(64)
    library.repeated_half_3(half)  # in threadgroups of 64
    library.repeated_int_4(number, threads=128, group_size=64)
    assert half.eq(3).all()
    assert number.eq(4).all()
    assert library.repeated_int_4.max_threads_per_threadgroup == 64
    assert library.full.max_threads_per_threadgroup == 1024
    assert library.full.thread_execution_width == 32
    library.narrow(out)
    assert out.eq(32).all()
    with pytest.raises(ValueError, match="Threadgroup size exceeds 64 limit"):
        library.repeated_int_4(number, threads=128, group_size=128)
    with pytest.raises(ValueError, match="Threadgroup size exceeds 1024 limit"):
        library.full(number.float(), 1.0, threads=(64, 64, 1), group_size=(64, 32, 1))


@pytest.mark.parametrize(
    ("kernel", "args", "keywords", "error", "told"),
    [
        ("full", (torch.zeros(4),), {}, TypeError, r"full takes 2 arguments \(out, val\), not 1"),
        ("full", (torch.zeros(4).half(), 1.0), {}, TypeError, "'out': the kernel reads float, not torch.float16"),
        ("full", (torch.zeros(4).double(), 1.0), {}, TypeError, "'out': the kernel reads float, not torch.float64"),
        ("full", (torch.zeros(4, device="meta"), 1.0), {}, TypeError, "tensors on the CPU or .*, not on meta"),
        ("full", (torch.zeros(4), 1), {}, TypeError, "argument 1 'val': the kernel reads float, not int"),
        ("full", (torch.zeros(4), torch.zeros(0)), {}, ValueError, "'val': has 0 bytes, but the kernel reads 4"),
        ("full", (torch.zeros(4), "1"), {}, RuntimeError, "Unsupported argument type str"),
        ("full", (torch.zeros(4), None), {}, RuntimeError, "Unsupported argument type NoneType"),
        ("full", (torch.zeros(4), []), {}, RuntimeError, "Empty list/tuple"),
        ("full", (torch.zeros(4), 1.0), {"arg_casts": "int7"}, RuntimeError, "Unsupported cast instruction int7"),
        ("full", (1.0, 1.0), {"threads": 1}, TypeError, "argument 0 'out' is written to, so it must be a tensor"),
        ("full", (torch.zeros(0), 1.0), {}, ValueError, "an empty grid"),
        ("full", (torch.zeros(4), 1.0), {"threads": (4, 0), "group_size": (1, 1)}, ValueError, "an empty grid"),
        ("full", (torch.zeros(4), 1.0), {"threads": (4, 1), "group_size": 4}, RuntimeError, "number of dimensions"),
        ("full", (torch.zeros(4), 1.0), {"threads": (1, 1, 1, 1)}, RuntimeError, "has wrong dimension"),
        ("strided", (torch.zeros(4), torch.zeros(4), [1, 2]), {}, TypeError, "use arg_casts or a tensor"),
        ("strided", (torch.zeros(4), torch.zeros(4), [1]), {"arg_casts": "int32"}, TypeError, "4 bytes are passed"),
        ("values", (torch.zeros(8), 1, 1, 1.0, 1, [1.0] * 4, [1] * 513, 1.0, 1), {"arg_casts": {3: "fp16", 4: "int16"}},
         ValueError, "argument 6 'list': 4104 bytes, but Metal passes at most 4096 by value"),
        ("values", (torch.zeros(8), 2**63, 1, 1.0, 1, [1.0] * 4, [1], 1.0, 1), {}, ValueError, "passed as int64"),
        ("values", (torch.zeros(8), 1, 1, 1.0, 2**15, [1.0] * 4, [1], 1.0, 1), {"arg_casts": {3: "fp16", 4: "int16"}},
         ValueError, "cannot be passed as int16"),
        ("dtypes", (torch.zeros(4), *[torch.zeros(4).half()] * 9), {"threads": 1}, TypeError, "kernel reads bfloat"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    library: Library, kernel: str, args: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        getattr(library, kernel)(*args, **keywords)


def test_misaligned_arguments(library: Library) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int32, torch.int64, torch.int8,
              torch.int16, torch.bool)  # fmt: skip
    tensors = [torch.zeros(16, dtype=dtype) for dtype in dtypes]
    with pytest.raises(ValueError, match="argument 9 'any': begins 2 bytes off a multiple of 16"):
        library.dtypes(*tensors, torch.zeros(64).half()[1:], threads=1)


def test_threads_of_python_launch_at_once() -> None:
    """Two libraries of one source share their runtime."""
    failed: list[object] = []

    def launch(kernels: Library, value: float) -> None:
        out = torch.zeros(64)
        for _ in range(200):
            kernels.narrow(out, threads=64, group_size=32)
            if not out.eq(32).all():
                failed.append(out.clone())
            kernels.full(out, value)
            if not out.eq(value).all():
                failed.append(out.clone())

    threads = [threading.Thread(target=launch, args=(compile_shader(KERNELS), float(i))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
