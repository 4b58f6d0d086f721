// y = x w^T for few rows of x: every weight comes from memory once, in the order in which it lies, for all of them.
//
// Each number of y is a chain of fused multiply-adds in the order of k and a sum over lanes, so it does not depend on how
// many rows or weights are computed beside it. Knows neither tensors nor threads.
#pragma once

#include <algorithm>

#include "vector.h"

namespace kvmux {

constexpr int WEIGHTS = REGISTERS == 32 ? 4 : 2;  // rows of w that are read together, for up to 4 rows of x
constexpr int64_t AHEAD = 2048;  // bytes: how far ahead weights are fetched, behind the last ones, too: that cannot fault

// Rows of x, each rounded to T, as float32 [groups][rows][GROUP<T>]: what is used together lies together, numbers of a
// group as `load_group` finds those of the weights. Behind the last k are zeros.
template <typename T, typename X>
inline void group_row(const X* x, int64_t k, int64_t row, int64_t rows, float* to) {
  constexpr int64_t G = GROUP<T>;
  for (int64_t i = 0; i < k; i += G) {
    T numbers[G] = {};
    for (int64_t j = 0; j < std::min(G, k - i); ++j) numbers[j] = static_cast<T>(static_cast<float>(x[i + j]));
    Raw group[G / W];
    load_group(numbers, group);
    unroll<G / W>([&](auto v) { Vec(group[v]).store(to + i * rows + row * G + v * W); });
  }
}

// y [R, N] of the weights w [N, k], `pitch` apart; x points to the first of R rows in their first group.
template <typename T, int R, int N>
inline void linear_block(const float* x, int64_t rows, const T* w, int64_t pitch, int64_t k, float (&y)[R][N]) {
  constexpr int64_t G = GROUP<T>;
  Raw sums[R][N];
  unroll<R>([&](auto r) { unroll<N>([&](auto n) { sums[r][n] = Vec(0.f); }); });
  const auto add = [&](auto n, const T* weights, const float* numbers) __attribute__((always_inline)) {
    Raw group[G / W];
    load_group(weights, group);
    unroll<R>([&](auto r) {
      unroll<G / W>([&](auto v) {
        sums[r][n] = at::vec::fmadd(load(numbers + r * G + v * W), Vec(group[v]), Vec(sums[r][n]));
      });
    });
  };
  int64_t i = 0;
  for (; i + G <= k; i += G) {
    for (int n = 0; n < N; ++n) __builtin_prefetch(reinterpret_cast<const char*>(w + n * pitch + i) + AHEAD);
    unroll<N>([&](auto n) { add(n, w + n * pitch + i, x + i * rows); });
  }
  if (i < k)
    unroll<N>([&](auto n) {
      T rest[G] = {};
      std::copy_n(w + n * pitch + i, k - i, rest);
      add(n, rest, x + i * rows);
    });
  unroll<R>([&](auto r) {
    unroll<N>([&](auto n) { y[r][n] = sum(Vec(sums[r][n])); });
  });
}

// Calls put(row, weight, number) for all rows and N weights.
template <typename T, int N, typename Put>
inline void linear_weights(const float* x, int64_t rows, const T* w, int64_t pitch, int64_t k, const Put& put) {
  const auto some = [&](auto r, int64_t first) {
    float y[r][N];
    linear_block<T, r, N>(x + first * GROUP<T>, rows, w, pitch, k, y);
    for (int i = 0; i < r; ++i)
      for (int n = 0; n < N; ++n) put(first + i, n, y[i][n]);
  };
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) some(std::integral_constant<int, 4>{}, row);
  for (; row + 2 <= rows; row += 2) some(std::integral_constant<int, 2>{}, row);
  if (row < rows) some(std::integral_constant<int, 1>{}, row);
}

}  // namespace kvmux
