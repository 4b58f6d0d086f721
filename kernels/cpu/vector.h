// Vectors of float32 on any instruction set, and how they are loaded and stored.
//
// The width of ATen's Vectorized depends on the compiler's flags, which setup.py sets. Knows no operation.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/Unroll.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace kvmux {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t W = Vec::size();

// A vector as the compiler's built-in type instead of ATen's class, so that arrays of vectors stay in registers.
using Raw = float __attribute__((vector_size(sizeof(Vec))));

template <int N, typename Each>
inline __attribute__((always_inline)) void unroll(const Each& each) {
  c10::ForcedUnroll<N>{}(each);
}

constexpr int REGISTERS = W == 8 ? 16 : 32;  // vector registers: AVX2 has 16, AVX-512 and NEON have 32

// Returns n, rounded up to whole vectors.
constexpr int64_t padded_to_vectors(int64_t n) { return (n + W - 1) / W * W; }

inline Vec load(const float* p) { return Vec::loadu(p); }

inline Vec load(const at::BFloat16* p) {
  Vec out;
  at::vec::load_fp32_from_bf16(p, out);
  return out;
}

inline Vec load(const at::Half* p) {
#ifdef __aarch64__  // here ATen would convert number by number
  return vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(p)));
#else
  Vec out;
  at::vec::load_fp32_from_fp16(p, out);
  return out;
#endif
}

inline Vec load(const int8_t* p) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  float numbers[W];
  for (int64_t i = 0; i < W; ++i) numbers[i] = p[i];
  return load(numbers);
#endif
}

// Stores two vectors, one after the other, rounded to T.
template <typename T>
inline void store(Vec first, Vec second, T* to) {
  if constexpr (std::is_same_v<T, float>) {
    first.store(to);
    second.store(to + W);
  } else {
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      const auto both = _mm512_cvtne2ps_pbh(second, first);  // one instruction; ATen takes a dozen
      std::memcpy(static_cast<void*>(to), &both, sizeof(both));
      return;
    }
#endif
    at::vec::convert_from_float<T>(first, second).store(to);
  }
}

// Widens pairs of bfloat16, adjacent in memory, to float32: returns the first numbers of the pairs and the second ones.
inline std::pair<Vec, Vec> widen(Vec pairs) {
  using Bits = at::vec::Vectorized<int32_t>;
  const Bits bits = at::vec::cast<int32_t>(pairs);
  return {at::vec::cast<float>(bits << Bits(16)), at::vec::cast<float>(bits & Bits(static_cast<int32_t>(0xFFFF0000)))};
}

// Loads C consecutive vectors.
template <typename T, int64_t C>
inline void load_row(const T* from, Raw (&to)[C]) {
  unroll<C>([&](auto v) { to[v] = load(from + v * W); });
}

// Converts n numbers to float32.
template <typename T>
inline void to_float(const T* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) load(from + i).store(to + i);
  for (; i < n; ++i) to[i] = static_cast<float>(from[i]);
}

inline void to_float(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }

// Converts n numbers to another type; the bits of each result do not depend on n.
template <typename From, typename To>
inline void convert(const From* from, To* to, int64_t n) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(static_cast<void*>(to), from, n * sizeof(To));
  } else {
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) store(load(from + i), load(from + i + W), to + i);
    for (; i < n; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
  }
}

// Multiplies n numbers by `factor` and stores them, rounded to T.
template <typename T>
inline void from_float(const float* from, float factor, T* to, int64_t n) {
  const Vec factors(factor);
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) store(load(from + i) * factors, load(from + i + W) * factors, to + i);
  for (; i < n; ++i) to[i] = static_cast<T>(from[i] * factor);
}

// Reduces all lanes of a vector to one number, by a binary operation on vectors.
template <typename Operation>
inline float reduce(Vec v, const Operation& operation) {
  return at::vec::vec_reduce_all<float>(operation, v);
}

inline float sum(Vec v) {
  return reduce(v, [](const Vec& a, const Vec& b) { return a + b; });
}

// Interleaves two vectors to a0 b0 a1 b1 ...; returns the first half of that and the second.
inline std::pair<Vec, Vec> interleave(Vec a, Vec b) {
#ifdef __aarch64__  // ATen goes through memory
  return {vzip1q_f32(a, b), vzip2q_f32(a, b)};
#else
  return at::vec::interleave2(a, b);
#endif
}

// Transposes a square matrix of W vectors.
#ifdef CPU_CAPABILITY_AVX2
// Rows i and i + 4 are first put into the halves of one register, as an instruction within halves takes less time than
// one that crosses them.
inline void transpose(Raw (&rows)[W]) {
  Raw joined[W];
  unroll<W / 2>([&](auto i) {
    joined[i] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20);
    joined[i + 4] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31);
  });
  unroll<2>([&](auto half) {
    Raw* const x = joined + half * 4;
    const Raw a = _mm256_unpacklo_ps(x[0], x[2]), b = _mm256_unpackhi_ps(x[0], x[2]);
    const Raw c = _mm256_unpacklo_ps(x[1], x[3]), d = _mm256_unpackhi_ps(x[1], x[3]);
    Raw* const to = rows + half * 4;
    to[0] = _mm256_unpacklo_ps(a, c);
    to[1] = _mm256_unpackhi_ps(a, c);
    to[2] = _mm256_unpacklo_ps(b, d);
    to[3] = _mm256_unpackhi_ps(b, d);
  });
}
#elif defined(CPU_CAPABILITY_AVX512)
// Two rounds within lanes of four numbers, and two that exchange lanes. Zen 4 takes two thirds of the time for an
// instruction within lanes.
inline void transpose(Raw (&rows)[W]) {
  Raw quads[W];  // 4 i + j: in lane l, numbers 4 l + j of rows 4 i .. 4 i + 3
  unroll<4>([&](auto i) {
    const Raw* const x = rows + 4 * i;
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
    const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
    Raw* const to = quads + 4 * i;
    to[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    to[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    to[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
    to[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
  });
  constexpr int EVEN = 0x88, ODD = 0xDD;  // lanes
  unroll<4>([&](auto j) {
    const Raw a = quads[j], b = quads[4 + j], c = quads[8 + j], d = quads[12 + j];
    const Raw ab = _mm512_shuffle_f32x4(a, b, EVEN), cd = _mm512_shuffle_f32x4(c, d, EVEN);
    rows[j] = _mm512_shuffle_f32x4(ab, cd, EVEN);
    rows[8 + j] = _mm512_shuffle_f32x4(ab, cd, ODD);
    const Raw ab_odd = _mm512_shuffle_f32x4(a, b, ODD), cd_odd = _mm512_shuffle_f32x4(c, d, ODD);
    rows[4 + j] = _mm512_shuffle_f32x4(ab_odd, cd_odd, EVEN);
    rows[12 + j] = _mm512_shuffle_f32x4(ab_odd, cd_odd, ODD);
  });
}
#else
// Takes log2(W) rounds of perfect shuffles.
inline void transpose(Raw (&rows)[W]) {
  for (int64_t round = 1; round < W; round *= 2) {
    Raw next[W];
    unroll<W / 2>([&](auto i) {
      const auto [low, high] = interleave(rows[i], rows[i + W / 2]);
      next[2 * i] = low;
      next[2 * i + 1] = high;
    });
    unroll<W>([&](auto i) { rows[i] = next[i]; });
  }
}
#endif

// Transposes numbers at .. at + W - 1 of W rows into W rows of W float32, which begin `ld` numbers apart. Each row is
// multiplied by its number of `scales`.
template <typename T>
inline void transpose_block(const T* const* rows, int64_t at, float* to, int64_t ld, Vec scales = Vec(1.f)) {
  Raw block[W];
  unroll<W>([&](auto i) { block[i] = load(rows[i] + at); });
  transpose(block);
  unroll<W>([&](auto i) { (Vec(block[i]) * scales).store(to + i * ld); });
}

// Transposes numbers at .. at + 2 W - 1 of W rows of bfloat16: two adjacent numbers are moved as one of 32 bits and
// widened afterwards, which takes half the shuffles.
inline void transpose_pairs(const at::BFloat16* const* rows, int64_t at, float* to, int64_t ld) {
  Raw block[W];
  unroll<W>([&](auto i) { block[i] = load(reinterpret_cast<const float*>(rows[i] + at)); });
  transpose(block);
  unroll<W>([&](auto i) {
    const auto [first, second] = widen(Vec(block[i]));
    first.store(to + 2 * i * ld);
    second.store(to + (2 * i + 1) * ld);
  });
}

// Transposes numbers at .. at + 4 W - 1 of W rows of int8: four adjacent numbers are moved as one of 32 bits and
// widened afterwards. Each row is multiplied by its number of `scales`.
inline void transpose_quads(const int8_t* const* rows, int64_t at, Vec scales, float* to, int64_t ld) {
  using Bits = int32_t __attribute__((vector_size(sizeof(Vec))));
  Raw block[W];
  unroll<W>([&](auto i) { block[i] = load(reinterpret_cast<const float*>(rows[i] + at)); });
  transpose(block);
  unroll<W>([&](auto i) {
    const auto four = reinterpret_cast<Bits>(block[i]);
    unroll<4>([&](auto n) {
      const Raw number = __builtin_convertvector((four << (24 - 8 * n)) >> 24, Raw);
      (Vec(number) * scales).store(to + (4 * i + n) * ld);
    });
  });
}

// Transposes W rows of `columns` numbers to [columns, W] of float32, whose rows begin `ld` numbers apart; calls
// between() after each block.
template <typename T, typename Between>
inline void transpose_rows(const T* const* rows, int64_t columns, float* to, int64_t ld, const Between& between) {
  int64_t at = 0;
  if constexpr (std::is_same_v<T, at::BFloat16>)
    for (; at + 2 * W <= columns; at += 2 * W, between()) transpose_pairs(rows, at, to + at * ld, ld);
  for (; at + W <= columns; at += W, between()) transpose_block(rows, at, to + at * ld, ld);
  for (; at < columns; ++at)
    for (int64_t i = 0; i < W; ++i) to[at * ld + i] = static_cast<float>(rows[i][at]);
}

}  // namespace kvmux
