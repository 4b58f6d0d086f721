// y = x w^T for few rows of x and weights of 8 or 4 bits a number: `kernels.quantised.Quantised`.
//
// Of a group of columns, the sum of x times number is scaled as a whole, and the offset multiplies the sum of x, which all
// weights share; so a number costs its widening and one multiplication. Weights come from memory once, in the order in
// which they lie. The order of sums depends on k alone, as in linear.h. Knows neither tensors nor threads.
#pragma once

#include "vector.h"

namespace kvmux {

constexpr int QUANTISED_WEIGHTS = REGISTERS == 32 ? 2 : 1;  // rows of w that are read together, for up to 4 rows of x
constexpr int64_t QUANTISED_AHEAD = 1024;  // bytes: how far ahead they are fetched, behind the last ones, too

template <int BITS>
constexpr int64_t PER_BYTE = 8 / BITS;

using Whole = int32_t __attribute__((vector_size(4 * W)));

// W bytes, each a number of its own. GCC 12 takes __builtin_convertvector byte by byte.
inline Whole widened_bytes(const uint8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return reinterpret_cast<Whole>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(CPU_CAPABILITY_AVX2)
  return reinterpret_cast<Whole>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  using Bytes = uint8_t __attribute__((vector_size(W)));
  Bytes bytes;
  std::memcpy(&bytes, from, W);
  return __builtin_convertvector(bytes, Whole);
#endif
}

// A row of x as float32 [k / P W][rows][P][W], P numbers a byte: beside each other the numbers that meet one vector of
// bytes, those of lower halves first. And their sums by group.
template <int BITS, typename X>
inline void quantised_row(const X* x, int64_t k, int64_t group, int64_t row, int64_t rows, float* to, float* sums) {
  constexpr int64_t P = PER_BYTE<BITS>;
  for (int64_t i = 0; i < k; i += P * W)
    for (int64_t p = 0; p < P; ++p)
      for (int64_t j = 0; j < W; ++j) to[i * rows + (row * P + p) * W + j] = static_cast<float>(x[i + j * P + p]);
  for (int64_t g = 0; g < k / group; ++g) {
    float sum = 0.f;
    for (int64_t i = g * group; i < (g + 1) * group; ++i) sum += static_cast<float>(x[i]);
    sums[g] = sum;
  }
}

// N rows of a weight.
template <typename S>
struct QuantisedRows {
  const uint8_t* numbers;
  int64_t pitch;  // bytes
  const S *scale, *offset;
  int64_t groups, group;  // of a row; columns of each
};

// y [R, N]: x points to the first of R rows in their first vectors, sums to those of its groups.
template <int BITS, int R, int N, typename S>
inline void quantised_block(const float* x, int64_t rows, const float* sums, const QuantisedRows<S>& w, float (&y)[R][N]) {
  constexpr int64_t P = PER_BYTE<BITS>;
  Raw total[R][N];
  float shifted[R][N];
  unroll<R>([&](auto r) { unroll<N>([&](auto n) { total[r][n] = Vec(0.f), shifted[r][n] = 0.f; }); });
  for (int64_t g = 0; g < w.groups; ++g) {
    Raw dot[R][N];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { dot[r][n] = Vec(0.f); }); });
    for (int64_t i = g * w.group; i < (g + 1) * w.group; i += P * W) {
      for (int n = 0; n < N; ++n) __builtin_prefetch(w.numbers + n * w.pitch + i / P + QUANTISED_AHEAD);
      unroll<N>([&](auto n) {
        const Whole whole = widened_bytes(w.numbers + n * w.pitch + i / P);
        unroll<P>([&](auto p) {
          const Whole part = P == 1 ? whole : p == 0 ? whole & 15 : whole >> 4;
          const Raw numbers = __builtin_convertvector(part, Raw);
          unroll<R>([&](auto r) {
            dot[r][n] = at::vec::fmadd(load(x + i * rows + (r * P + p) * W), Vec(numbers), Vec(dot[r][n]));
          });
        });
      });
    }
    unroll<N>([&](auto n) {
      const float scale = static_cast<float>(w.scale[n * w.groups + g]);
      const float offset = static_cast<float>(w.offset[n * w.groups + g]);
      unroll<R>([&](auto r) {
        total[r][n] = at::vec::fmadd(Vec(scale), Vec(dot[r][n]), Vec(total[r][n]));
        shifted[r][n] = std::fma(offset, sums[r * w.groups + g], shifted[r][n]);
      });
    });
  }
  unroll<R>([&](auto r) {
    unroll<N>([&](auto n) { y[r][n] = sum(Vec(total[r][n])) + shifted[r][n]; });
  });
}

// Calls put(row, weight, number) for all rows and N weights.
template <int BITS, int N, typename S, typename Put>
inline void quantised_weights(const float* x, int64_t rows, const float* sums, const QuantisedRows<S>& w, const Put& put) {
  const auto some = [&](auto r, int64_t first) {
    float y[r][N];
    quantised_block<BITS, r, N>(x + first * PER_BYTE<BITS> * W, rows, sums + first * w.groups, w, y);
    for (int i = 0; i < r; ++i)
      for (int n = 0; n < N; ++n) put(first + i, n, y[i][n]);
  };
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) some(std::integral_constant<int, 4>{}, row);
  for (; row + 2 <= rows; row += 2) some(std::integral_constant<int, 2>{}, row);
  if (row < rows) some(std::integral_constant<int, 1>{}, row);
}

}  // namespace kvmux
