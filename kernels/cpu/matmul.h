// Matrix multiplication c += a b: a [M, K] and c [M, N] are float32 in scratch memory; b [K, N] is of any type, and its
// rows may lie anywhere. N is a multiple of W.
//
// A block of c stays in registers while k runs. Each number of c is a chain of fused multiply-adds in the order of k,
// so it does not depend on how many rows or columns are computed beside it.
#pragma once

#include "prefetch.h"
#include "vector.h"

namespace kvmux {

constexpr int ROWS = 8;  // of a block

// Returns how many vectors wide a block of R rows of c is: as many as fit into registers beside a row of b and a
// factor.
template <int R>
constexpr int columns() {
  constexpr int vectors = (REGISTERS - 2) / (R + 1);
  return vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1;
}

// Computes a block of R rows of c, C vectors wide. `row(k)` points to row k of b. One line of `queue` is prefetched at
// each step of k.
template <int LDA, int R, int C, typename Row>
inline void multiply_block(const float* a, const Row& row, int64_t n, float* c, int64_t ldc, int64_t K,
                           PrefetchQueue& queue) {
  const char* const* lines = queue.next(K);
  Raw sum[R][C];
  unroll<R>([&](auto r) { unroll<C>([&](auto v) { sum[r][v] = load(c + r * ldc + n + v * W); }); });
  for (int64_t k = 0; k < K; ++k) {
    const auto* from = row(k) + n;
    __builtin_prefetch(lines[k]);
    Raw b[C];
    load_row(from, b);
    unroll<R>([&](auto r) {
      const Vec factor(a[r * LDA + k]);
      unroll<C>([&](auto v) { sum[r][v] = at::vec::fmadd(factor, Vec(b[v]), Vec(sum[r][v])); });
    });
  }
  unroll<R>([&](auto r) { unroll<C>([&](auto v) { Vec(sum[r][v]).store(c + r * ldc + n + v * W); }); });
}

template <int LDA, int R, int C, typename Row>
inline void multiply_rows(const float* a, const Row& row, float* c, int64_t ldc, int64_t from, int64_t N, int64_t K,
                          PrefetchQueue& queue) {
  int64_t n = from;
  for (; n + C * W <= N; n += C * W) multiply_block<LDA, R, C>(a, row, n, c, ldc, K, queue);
  if constexpr (C > 1) multiply_rows<LDA, R, C / 2>(a, row, c, ldc, n, N, K, queue);
}

// Computes c += a b. The rows of a lie LDA numbers apart: a constant, so that one register addresses all of them.
template <int LDA, typename Row>
inline void multiply_add(int64_t M, const float* a, const Row& row, float* c, int64_t ldc, int64_t N, int64_t K,
                         PrefetchQueue& queue) {
  const auto rows = [&](auto r) {
    multiply_rows<LDA, r, columns<r>()>(a, row, c, ldc, 0, N, K, queue);
    a += r * LDA;
    c += r * ldc;
  };
  for (; M >= ROWS; M -= ROWS) rows(std::integral_constant<int, ROWS>{});
  switch (M) {
    case 7: return rows(std::integral_constant<int, 7>{});
    case 6: return rows(std::integral_constant<int, 6>{});
    case 5: return rows(std::integral_constant<int, 5>{});
    case 4: return rows(std::integral_constant<int, 4>{});
    case 3: return rows(std::integral_constant<int, 3>{});
    case 2: return rows(std::integral_constant<int, 2>{});
    case 1: return rows(std::integral_constant<int, 1>{});
  }
}

}  // namespace kvmux
