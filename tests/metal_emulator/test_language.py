"""The features of Metal's language beyond C++: vectors, halves, functions, atomics; compared with torch and Python."""

from __future__ import annotations

import math

import pytest
import torch

from metal_emulator import Library, compile_shader

KERNELS = """
#include <metal_stdlib>
#include <metal_atomic>
using namespace metal;

kernel void swizzles(const device float4* x, device float4* out, uint i [[thread_position_in_grid]]) {
  float4 a = x[0];
  out[0] = a.wzyx;
  a.xy = a.zw;
  out[1] = a;
  a.zx += float2(10.0f, 20.0f);
  out[2] = a;
  out[3] = float4(a.xyz.zy, a.rg);
  device float4* p = out + 4;
  p->yw = float2(5.0f);
  p->xz = 0;
  out[5] = float4(1, float2(2, 3), 4) + float4(float3(1), 1) * 2;
  float3 c = a.xyz;
  c[1] = -c[1];
  out[6] = float4(c, dot(c, c));
  out[7] = select(float4(0.0f), float4(1.0f), a > 5.0f) + float4(any(a > 20.0f), all(a > 0.0f), !any(a < 0.0f), 0);
}

kernel void integers(device int* out) {
  const int4 a = int4(7, -7, 3, 250);
  const uint4 b = uint4(a) >> 1;
  out[0] = (a % 4).y;
  out[1] = int(b.y);
  out[2] = (a & 6).x | (a << 2).z;
  out[3] = int(popcount(0xF0F0u)) + int(clz(1u)) * 100 + int(ctz(8)) * 10000;
  out[4] = as_type<int>(1.0f);
  out[5] = int(char(a.w)) + int(uchar(-1));
  out[6] = clamp(-5, -3, 9) + min(4, 2) + max(uchar(3), uchar(9)) + abs(-11);
  out[7] = mulhi(0x40000000, 8) + int(extract_bits(0xABCDu, 4, 8)) + int(insert_bits(0u, 0xFu, 8, 4));
  out[8] = int(rotate(0x80000001u, 4u)) + addsat(INT_MAX, 5) + int(subsat(2u, 3u)) + int(reverse_bits(1u) >> 31);
  out[9] = sizeof(float3) + 100 * sizeof(packed_float3) + 10000 * sizeof(half2) + 1000000 * sizeof(long);
}

kernel void bfloats(const device bfloat* x, const device bfloat* y, device bfloat* out,
                    uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  out[i] = x[i] * y[i];
  out[n + i] = bfloat(float(x[i]) + 1e-3f);
  bfloat sum = x[i];
  sum += y[i];
  out[2 * n + i] = sum;
  out[3 * n + i] = x[i] * 3 < y[i] ? max(x[i], y[i]) : -x[i];
  out[4 * n + i] = static_cast<bfloat>(x[i] * 0.3f);
}

kernel void halves(const device half* x, const device half* y, device half* out, uint i [[thread_position_in_grid]],
                   uint n [[threads_per_grid]]) {
  out[i] = x[i] * y[i] + x[i];
  out[n + i] = half(float(x[i]) * 0.3f);
  out[2 * n + i] = (half4(x[i]) * half4(y[i])).z;
}

kernel void functions(const device float* x, device float* out, uint i [[thread_position_in_grid]],
                      uint n [[threads_per_grid]]) {
  const float v = x[i];
  out[0 * n + i] = fast::exp(v);
  out[1 * n + i] = precise::sin(v);
  out[2 * n + i] = rsqrt(v);
  out[3 * n + i] = tanh(v);
  out[4 * n + i] = pow(v, 1.5f);
  out[5 * n + i] = fma(v, v, 1.0f);
  out[6 * n + i] = log2(v) + floor(v) + rint(v) + fract(v);
  out[7 * n + i] = metal::fast::max(v, 2.0f) + clamp(v, 1.0f, 2.0f) + mix(1.0f, v, 0.25f) + sign(-v) + saturate(v);
  out[8 * n + i] = length(float2(v, 2)) + distance(float3(v), float3(0)) + float(isnan(NAN)) + float(isinf(-INFINITY));
  out[9 * n + i] = exp(float4(v)).w + float(half(v)) + 1.0;
}

template <typename T> struct Twice {
  T of(T v) const thread { return v + v; }
};
inline float swapped(threadgroup const float* s, uint t) { return s[t ^ 1]; }
kernel void declarations(device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float s[32], one;
  threadgroup float4 square[2][4 + 4];
  threadgroup float* p = s;
  p[t] = t;
  if (t == 0) one = 100;
  if (t < 16) square[t / 8][t % 8] = float4(bfloat4(1.0f) + 0.5bf) + float4(half4(2.0h).x);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  typedef vec<float, 4> four;
  const four v = square[1][t % 8];
#pragma unroll
  for (ushort i = 0; i < 2; ++i) out[t] = swapped(p, t) + one + Twice<float>().of(v.z);
}

struct Params { uint n; float scale; int2 pair; };
constant int TABLE[2][2] = {{1, 2}, {3, 4}};
constant constexpr float HALF = 0.5;

template <typename T> T scaled(T v, constant Params& p) { return v * T(p.scale) + T(p.pair.y); }
namespace inner { inline float halved(float v, thread float& whole) { whole = v; return v * HALF; } }

kernel void structs(const constant Params& p [[buffer(1)]], device float* out [[buffer(0)]],
                    uint i [[thread_position_in_grid]]) {
  if (i >= p.n) return;
  float whole;
  const float half_of_it = inner::halved(scaled(float(i), p), whole);
  out[i] = half_of_it + whole * float(TABLE[1][i % 2]);
}

kernel void atomics(device atomic_uint* counts, device atomic_int* most, device atomic_float* sum,
                    uint i [[thread_position_in_grid]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup atomic_uint local;
  if (t == 0) atomic_store_explicit(&local, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&local, 1, memory_order_relaxed);
  atomic_fetch_max_explicit(most, int(i * 7 % 64), memory_order_relaxed);
  atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
  uint old = atomic_load_explicit(counts + 1, memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(counts + 1, &old, old + 2, memory_order_relaxed,
                                                memory_order_relaxed)) {}
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0)
    atomic_fetch_add_explicit(counts, atomic_load_explicit(&local, memory_order_relaxed), memory_order_relaxed);
}
"""


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "checked"])
def library(request: pytest.FixtureRequest) -> Library:
    return compile_shader(KERNELS, checked=request.param)


def test_swizzles(library: Library) -> None:
    x, out = torch.tensor([1.0, 2, 3, 4]), torch.zeros(8, 4)
    library.swizzles(x, out, threads=1)
    assert out.tolist() == [
        [4, 3, 2, 1],
        [3, 4, 3, 4],
        [23, 4, 13, 4],
        [13, 4, 23, 4],
        [0, 5, 0, 5],
        [3, 4, 5, 6],
        [23, -4, 13, 23 * 23 + 16 + 169],
        [2, 1, 2, 0],
    ]


def test_integers(library: Library) -> None:
    out = torch.zeros(10, dtype=torch.int32)
    library.integers(out, threads=1)
    saturated = 0x18 + 2**31 - 1 + 0 + 1
    assert out.tolist() == [
        -3,
        (2**32 - 7) >> 1,
        6 | 12,
        8 + 31 * 100 + 3 * 10000,
        0x3F800000,
        -6 + 255,
        -3 + 2 + 9 + 11,
        2 + 0xBC + 0xF00,
        saturated - 2**32,  # wraps
        16 + 100 * 12 + 10000 * 4 + 1000000 * 8,
    ]


def test_bfloat_rounds_as_torch(library: Library) -> None:
    x, y = torch.randn(200).bfloat16(), torch.randn(200).bfloat16()
    out = torch.empty(5, 200, dtype=torch.bfloat16)
    library.bfloats(x, y, out, threads=200)
    assert out[0].equal(x * y)
    assert out[1].equal((x.float() + 1e-3).bfloat16())
    assert out[2].equal(x + y)
    assert out[3].equal(torch.where(x * 3 < y, torch.maximum(x, y), -x))
    assert out[4].equal((x.float() * 0.3).bfloat16())


def test_special_bfloats(library: Library) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 3.3895e38, 0.0]).bfloat16()
    out = torch.empty(5, 5, dtype=torch.bfloat16)
    library.bfloats(x, torch.ones(5).bfloat16(), out, threads=5)
    assert out[0].isnan().tolist() == [False, False, True, False, False]
    assert out[0].nan_to_num(7).equal(x.nan_to_num(7))


def test_half_rounds_as_torch(library: Library) -> None:
    x, y = torch.randn(200).half(), torch.randn(200).half()
    out = torch.empty(3, 200, dtype=torch.float16)
    library.halves(x, y, out, threads=200)
    assert out[0].equal(x * y + x), "rounded after each operation"
    assert out[1].equal((x.float() * 0.3).half())
    assert out[2].equal(x * y)


def test_functions(library: Library) -> None:
    x = torch.linspace(0.1, 3.7, 37)
    out = torch.empty(10, 37)
    library.functions(x, out, threads=37)
    v = x.double()
    wanted = torch.stack(
        [
            v.exp(),
            v.sin(),
            v.rsqrt(),
            v.tanh(),
            v**1.5,
            v * v + 1,
            v.log2() + v.floor() + v.round() + v.frac(),
            v.clamp_min(2) + v.clamp(1, 2) + (1 + (v - 1) * 0.25) - 1 + v.clamp(0, 1),
            (v * v + 4).sqrt() + v * 3**0.5 + 2,
            v.exp() + x.half().double() + 1,
        ]
    )
    assert out.double().allclose(wanted, rtol=1e-6, atol=1e-6)


def test_declarations(library: Library) -> None:
    out = torch.zeros(32)
    library.declarations(out, threads=32)
    assert out.tolist() == [(t ^ 1) + 100 + 2 * 3.5 for t in range(32)]


def test_structs_and_constants(library: Library) -> None:
    params = torch.cat([torch.tensor([5]).int(), torch.tensor([1.5]).view(torch.int32), torch.tensor([0, 2]).int()])
    out = torch.zeros(8)
    library.structs(out, params, threads=8)
    values = [1.5 * i + 2 for i in range(5)]
    assert out.tolist() == [v / 2 + v * (3 + i % 2) for i, v in enumerate(values)] + [0, 0, 0]


def test_atomics(library: Library) -> None:
    counts, most, total = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    library.atomics(counts, most, total, threads=96, group_size=32)
    assert (counts.tolist(), most.item(), total.item()) == ([96, 192], 63, 48.0)
