// The two products of attention in bfloat16, summed in float32: queries with keys, and weights with values. One class
// computes them in the tile registers of AMX, the other in vector registers by dot products of pairs. Both read the
// same layout, in blocks of 16 query rows, and each number of a result is one chain of sums in a fixed order, so it
// does not depend on other rows. Knows no softmax and no stored keys.
#pragma once

#ifdef __AVX512BF16__

#include "amx.h"
#include "matmul.h"

namespace kvmux {

// The layout of what is multiplied: a block of left factors is [16 rows][32 numbers], and one of right factors is
// [16 pairs of numbers][16 columns][2].
struct Bf16Blocks {
  using Number = at::BFloat16;
  static constexpr int64_t L = 16;            // rows of a block, and float32 numbers of a vector
  static constexpr int64_t DEPTH = 2 * L;     // bfloat16 numbers of a row
  static constexpr int64_t SIZE = L * DEPTH;  // bfloat16 numbers of a block

  // Loads numbers 32 c .. 32 c + 31 of a vector [dim]; numbers beyond its end are 0.
  static __m512i numbers(const char* vector, int64_t c, int64_t dim) {
    const char* const from = vector + c * DEPTH * sizeof(Number);
    if ((c + 1) * DEPTH <= dim) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((int64_t{1} << (dim - c * DEPTH)) - 1), from);
  }

  // Transposes chunk c of 16 keys [dim] into a block.
  static void transpose_chunk(const char* const* keys, int64_t c, int64_t dim, Number* to) {
    Raw block[L];
    unroll<L>([&](auto i) { block[i] = reinterpret_cast<Raw>(numbers(keys[i], c, dim)); });
    transpose(block);
    unroll<L>([&](auto i) { Vec(block[i]).store(to + i * DEPTH); });
  }

  struct Pairs {
    __m512i even, odd;
  };

  // Arranges chunk c of two values [dim] by pairs of numbers that have the same place: returns those of even places,
  // and of odd ones.
  static Pairs pair_chunk(const char* first, const char* second, int64_t c, int64_t dim) {
    constexpr __mmask32 ODD = 0xAAAAAAAA;
    const __m512i a = numbers(first, c, dim), b = numbers(second, c, dim);
    return {_mm512_mask_blend_epi16(ODD, a, _mm512_slli_epi32(b, 16)),
            _mm512_mask_blend_epi16(ODD, _mm512_srli_epi32(a, 16), b)};
  }
};

#ifdef __AMX_BF16__
class AmxProducts : Bf16Blocks {
 public:
  static constexpr int64_t TILE = 64;  // keys that are multiplied at a time
  static constexpr int64_t FEW = 0;    // query rows for which keys and values are multiplied where they are stored

  // Computes scores [16][16 N] of queries [chunks of the depth][block] and keys [N][chunks][block]. Each tile register
  // of scores is stored while others are summed, as a store waits for its sum.
  template <int N>
  void multiply_keys(const Number* q, const Number* keys, int64_t chunks, int64_t /* rows */, float* scores,
                     PrefetchQueue& /* queue */) const {
    unroll<N>([&](auto n) {
      const Number* k = keys + n * chunks * SIZE;
      tile_zero<n>();
      for (int64_t c = 0; c < chunks; ++c) {
        tile_load<4 + n % 2>(q + c * SIZE, TILE_BYTES);
        tile_load<6 + n % 2>(k + c * SIZE, TILE_BYTES);
        tile_dot<n, 4 + n % 2, 6 + n % 2>();
      }
      tile_store<n>(scores + n * L, N * L * sizeof(float));
    });
  }

  // Adds to sums [16][width] the products of weights [chunks of keys][block] and values [chunks][width / 16][block].
  void multiply_values(const Number* weights, const Number* values, int64_t chunks, int64_t width, int64_t /* rows */,
                       float* sums, PrefetchQueue& /* queue */) const {
    const int64_t stride = width * sizeof(float);
    for (int64_t column = 0; column < width; column += DEPTH)
      unroll<2>([&](auto n) {
        float* to = sums + column + n * L;
        const Number* v = values + (column + n * L) * DEPTH;
        tile_load<n>(to, stride);
        for (int64_t c = 0; c < chunks; ++c) {
          tile_load<4 + n>(weights + c * SIZE, TILE_BYTES);
          tile_load<6 + n>(v + c * DEPTH * width, TILE_BYTES);
          tile_dot<n, 4 + n, 6 + n>();
        }
        tile_store<n>(to, stride);
      });
  }

 private:
  const Tiles tiles_;
};
#endif

// Multiplies only the first `rows` rows of a block.
class DotProducts : Bf16Blocks {
 public:
  static constexpr int64_t TILE = 32;  // keys that are multiplied at a time
  static constexpr int64_t FEW = 8;    // query rows for which keys and values are multiplied where they are stored

  // Computes scores [rows][TILE] of queries [chunks of the depth][block] and TILE keys [dim]. Multiplies each chunk
  // right after it is transposed, so that the processor does both at once.
  void multiply_stored_keys(const Number* q, const char* const* keys, int64_t dim, int64_t rows, float* scores,
                            PrefetchQueue& queue) const {
    alignas(64) Number blocks[COLUMNS * SIZE];
    std::fill_n(scores, rows * TILE, 0.f);
    for (int64_t c = 0; c * DEPTH < dim; ++c) {
      for (int64_t n = 0; n < COLUMNS; ++n) transpose_chunk(keys + n * L, c, dim, blocks + n * SIZE);
      with_rows(rows, [&](auto R) {
        Raw sum[R][COLUMNS];
        unroll<R>([&](auto r) { load_row(scores + r * TILE, sum[r]); });
        add<R>(q + c * SIZE, blocks, SIZE, sum, queue);
        store(sum, scores, TILE);
      });
    }
  }

  // Adds to sums [rows][width] the products of weights [block] and TILE values [dim].
  void multiply_stored_values(const Number* weights, const char* const* values, int64_t dim, int64_t width,
                              int64_t rows, float* sums, PrefetchQueue& queue) const {
    with_rows(rows, [&](auto R) {
      constexpr int C = R < 8 ? 2 : 1;  // chunks whose sums fit into registers
      int64_t c = 0;
      for (; (c + C) * DEPTH <= width; c += C) add_values<R, C>(weights, values, c, dim, width, sums, queue);
      for (; c * DEPTH < width; ++c) add_values<R, 1>(weights, values, c, dim, width, sums, queue);
    });
  }

  template <int N>
  void multiply_keys(const Number* q, const Number* keys, int64_t chunks, int64_t rows, float* scores,
                     PrefetchQueue& queue) const {
    static_assert(N % COLUMNS == 0);
    over_row_blocks(rows, [&](auto R, int64_t row) {
      for (int64_t n = 0; n < N; n += COLUMNS) {
        Raw sum[R][COLUMNS] = {};
        for (int64_t c = 0; c < chunks; ++c)
          add<R>(q + c * SIZE + row * DEPTH, keys + (n * chunks + c) * SIZE, chunks * SIZE, sum, queue);
        store(sum, scores + row * N * L + n * L, N * L);
      }
    });
  }

  void multiply_values(const Number* weights, const Number* values, int64_t chunks, int64_t width, int64_t rows,
                       float* sums, PrefetchQueue& queue) const {
    over_row_blocks(rows, [&](auto R, int64_t row) {
      for (int64_t column = 0; column < width; column += COLUMNS * L) {
        float* const to = sums + row * width + column;
        Raw sum[R][COLUMNS];
        unroll<R>([&](auto r) { load_row(to + r * width, sum[r]); });
        for (int64_t c = 0; c < chunks; ++c)
          add<R>(weights + c * SIZE + row * DEPTH, values + (c * width + column) * DEPTH, SIZE, sum, queue);
        store(sum, to, width);
      }
    });
  }

 private:
  static constexpr int64_t FETCHED = 2;  // cache lines prefetched in one go
  static constexpr int COLUMNS = 2;      // vectors of sums of a row that are computed together

  // Calls work(R, row) for each R rows that are computed together, with R as a constant.
  template <typename Work>
  static void over_row_blocks(int64_t rows, const Work& work) {
    for (int64_t row = 0; row < rows;)
      with_rows(next_rows(rows - row), [&](auto R) {
        work(R, row);
        row += R;
      });
  }

  // Adds the products of R rows of a left block and of COLUMNS right blocks, which begin `stride` numbers apart.
  template <int R>
  __attribute__((flatten)) static void add(const Number* left, const Number* right, int64_t stride,
                                           Raw (&sum)[R][COLUMNS], PrefetchQueue& queue) {
    for (int64_t pair = 0; pair < L; ++pair) {
      queue.fetch(FETCHED);
      __m512bh b[COLUMNS];
      unroll<COLUMNS>(
          [&](auto v) { b[v] = reinterpret_cast<__m512bh>(_mm512_load_si512(right + v * stride + pair * DEPTH)); });
      unroll<R>([&](auto r) {
        const __m512bh a = pair_of(left + r * DEPTH, pair);
        unroll<COLUMNS>([&](auto v) { sum[r][v] = _mm512_dpbf16_ps(sum[r][v], a, b[v]); });
      });
    }
  }

  // Adds the products of R rows of weights and of C chunks of values from chunk c on.
  template <int R, int C>
  __attribute__((flatten)) static void add_values(const Number* weights, const char* const* values, int64_t c,
                                                  int64_t dim, int64_t width, float* sums, PrefetchQueue& queue) {
    float* const to = sums + c * DEPTH;
    Raw sum[R][2 * C];
    unroll<R>([&](auto r) { load_row(to + r * width, sum[r]); });
    for (int64_t pair = 0; pair < L; ++pair) {
      queue.fetch(C * FETCHED);
      __m512bh v[2 * C];
      unroll<C>([&](auto i) {
        const auto [even, odd] = pair_chunk(values[2 * pair], values[2 * pair + 1], c + i, dim);
        v[2 * i] = reinterpret_cast<__m512bh>(even);
        v[2 * i + 1] = reinterpret_cast<__m512bh>(odd);
      });
      unroll<R>([&](auto r) {
        const __m512bh w = pair_of(weights + r * DEPTH, pair);
        unroll<2 * C>([&](auto i) { sum[r][i] = _mm512_dpbf16_ps(sum[r][i], w, v[i]); });
      });
    }
    store(sum, to, width);
  }

  // Returns a pair of a row, in all places.
  static __m512bh pair_of(const Number* row, int64_t pair) {
    int32_t both;
    std::memcpy(&both, row + 2 * pair, sizeof(both));
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
  }

  template <int R, int C>
  static void store(const Raw (&sum)[R][C], float* to, int64_t ld) {
    unroll<R>([&](auto r) { unroll<C>([&](auto v) { Vec(sum[r][v]).store(to + r * ld + v * L); }); });
  }
};

}  // namespace kvmux

#endif
