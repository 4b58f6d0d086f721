// c += a b for matrices in scratch memory: a [M, K], b [K, N], c [M, N], float32, N a multiple of W.
//
// A block of c stays in registers while k runs. Each number of c is a chain of fused multiply-adds in the order of k, so
// it does not depend on how many rows or columns are computed beside it.
#pragma once

#include "vector.h"

namespace kvmux {

constexpr int ROWS = 6, COLUMNS = W == 8 ? 2 : 4;  // of a block; columns in vectors. 6 x 4 + 4 of 32 registers, or 6 x 2 + 2 of 16

template <int R, int C>
inline void multiply_block(
    const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t K) {
  Vec sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) sum[r][v] = Vec::loadu(c + r * ldc + v * W);
  for (int64_t k = 0; k < K; ++k) {
    Vec row[C];
    for (int v = 0; v < C; ++v) row[v] = Vec::loadu(b + k * ldb + v * W);
    for (int r = 0; r < R; ++r) {
      const Vec factor(a[r * lda + k]);
      for (int v = 0; v < C; ++v) sum[r][v] = at::vec::fmadd(factor, row[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) sum[r][v].store(c + r * ldc + v * W);
}

template <int R>
inline void multiply_rows(
    int64_t N, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  int64_t n = 0;
  for (; n + COLUMNS * W <= N; n += COLUMNS * W) multiply_block<R, COLUMNS>(a, lda, b + n, ldb, c + n, ldc, K);
  for (; n + 2 * W <= N; n += 2 * W) multiply_block<R, 2>(a, lda, b + n, ldb, c + n, ldc, K);
  for (; n < N; n += W) multiply_block<R, 1>(a, lda, b + n, ldb, c + n, ldc, K);
}

inline void multiply_add(
    int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  for (; M >= ROWS; M -= ROWS, a += ROWS * lda, c += ROWS * ldc) multiply_rows<ROWS>(N, K, a, lda, b, ldb, c, ldc);
  switch (M) {
    case 5: return multiply_rows<5>(N, K, a, lda, b, ldb, c, ldc);
    case 4: return multiply_rows<4>(N, K, a, lda, b, ldb, c, ldc);
    case 3: return multiply_rows<3>(N, K, a, lda, b, ldb, c, ldc);
    case 2: return multiply_rows<2>(N, K, a, lda, b, ldb, c, ldc);
    case 1: return multiply_rows<1>(N, K, a, lda, b, ldb, c, ldc);
  }
}

}  // namespace kvmux
