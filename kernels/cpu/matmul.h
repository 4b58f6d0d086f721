// Matrix multiplication c += a b: a [M, K] and c [M, N] are float32 in scratch memory; b [K, N] is of any type, and its
// rows may lie anywhere. N is a multiple of W.
//
// A block of c stays in registers while k runs. Each number of c is a chain of fused multiply-adds in the order of k,
// so it does not depend on how many rows or columns are computed beside it. Knows neither attention nor weights.
#pragma once

#include "prefetch.h"
#include "vector.h"

namespace kvmux {

constexpr int BLOCK_ROWS = REGISTERS == 16 ? 6 : 8;  // the most of a block
constexpr int64_t FETCH_STEPS = 8;                   // steps of k between two calls of PrefetchQueue::fetch

// Returns how many vectors wide a block of R rows of c is: 4, 2 or 1. Its sums fill the registers beside the vectors of
// b or the factors of a, whichever are fewer, and one more: with few sums, each addition would wait for the one before,
// and a narrow block loads more numbers than it multiplies.
template <int R>
constexpr int block_columns() {
  constexpr auto fits = [](int c) { return R * c + std::min(R, c) + 1 <= REGISTERS; };
  return fits(4) ? 4 : fits(2) ? 2 : 1;
}

// Computes a block of R rows of c, C vectors wide. `row(k)` points to row k of b. Everything is inlined (`flatten`), as
// a compiler stops inlining in large functions, and the sums would not stay in registers.
template <int LDA, int R, int C, typename Row>
__attribute__((flatten)) void multiply_block(const float* a, const Row& row, int64_t n, float* c, int64_t ldc,
                                             int64_t K, PrefetchQueue& queue) {
  Raw sum[R][C];
  unroll<R>([&](auto r) { unroll<C>([&](auto v) { sum[r][v] = load(c + r * ldc + n + v * W); }); });
  const auto add = [&](int64_t k) {
    const auto* from = row(k) + n;
    if constexpr (R < C) {
      Raw factor[R];
      unroll<R>([&](auto r) { factor[r] = Vec(a[r * LDA + k]); });
      unroll<C>([&](auto v) {
        const Vec b = load(from + v * W);
        unroll<R>([&](auto r) { sum[r][v] = at::vec::fmadd(Vec(factor[r]), b, Vec(sum[r][v])); });
      });
    } else {
      Raw b[C];
      load_row(from, b);
      unroll<R>([&](auto r) {
        const Vec factor(a[r * LDA + k]);
        unroll<C>([&](auto v) { sum[r][v] = at::vec::fmadd(factor, Vec(b[v]), Vec(sum[r][v])); });
      });
    }
  };
  for (int64_t k = 0; k < K;) {
    queue.fetch();
    for (const int64_t end = std::min(K, k + FETCH_STEPS); k < end; ++k) add(k);
  }
  unroll<R>([&](auto r) { unroll<C>([&](auto v) { Vec(sum[r][v]).store(c + r * ldc + n + v * W); }); });
}

// Computes columns `from` .. N - 1 of R rows of c, in blocks of C vectors and narrower ones for those that are left.
template <int LDA, int R, int C, typename Row>
inline void multiply_rows(const float* a, const Row& row, float* c, int64_t ldc, int64_t from, int64_t N, int64_t K,
                          PrefetchQueue& queue) {
  int64_t n = from;
  for (; n + C * W <= N; n += C * W) multiply_block<LDA, R, C>(a, row, n, c, ldc, K, queue);
  if constexpr (C > 1) multiply_rows<LDA, R, C / 2>(a, row, c, ldc, n, N, K, queue);
}

// Returns the number of rows of the next block, of M rows that are left. If one row more than a block has is left, two
// blocks take about half each, as a block of a single row waits for its own sums.
constexpr int64_t next_rows(int64_t M) {
  return M == BLOCK_ROWS + 1 ? BLOCK_ROWS / 2 + 1 : std::min<int64_t>(M, BLOCK_ROWS);
}

// Calls work(r) with the number of rows r, from 1 to BLOCK_ROWS, as a constant.
template <int R = 1, typename Work>
inline void with_rows(int64_t r, const Work& work) {
  if constexpr (R < BLOCK_ROWS)
    if (r != R) return with_rows<R + 1>(r, work);
  work(std::integral_constant<int, R>{});
}

// Returns about how many times multiply_add calls PrefetchQueue::fetch.
inline int64_t count_fetches(int64_t M, int64_t N, int64_t K) {
  int64_t fetches = 0;
  while (M > 0)
    with_rows(next_rows(M), [&](auto r) {
      fetches += N / (block_columns<r>() * W) * ((K + FETCH_STEPS - 1) / FETCH_STEPS);
      M -= r;
    });
  return fetches;
}

// Computes c += a b. The rows of a lie LDA numbers apart: a constant, so that one register addresses all of them.
template <int LDA, typename Row>
inline void multiply_add(int64_t M, const float* a, const Row& row, float* c, int64_t ldc, int64_t N, int64_t K,
                         PrefetchQueue& queue) {
  while (M > 0)
    with_rows(next_rows(M), [&](auto r) {
      multiply_rows<LDA, r, block_columns<r>()>(a, row, c, ldc, 0, N, K, queue);
      a += r * LDA;
      c += r * ldc;
      M -= r;
    });
}

}  // namespace kvmux
