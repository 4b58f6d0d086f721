// The two products of attention in integers of 8 bits, summed in 32 bits: queries with keys, and weights with values.
// One class computes them in the tile registers of AMX, the other in vector registers by dot products of four bytes.
// Sums of integers are exact, so both have the same results in any order. Knows no softmax, no scales and no stored
// keys beyond their integers.
#pragma once

#ifdef CPU_CAPABILITY_AVX512

#include "amx.h"
#include "kv_formats.h"
#include "matmul.h"

namespace kvmux {

// The layout of what is multiplied, in blocks of 64 by 64: one of left factors is [16 rows][64 bytes], and one of right
// factors is [4][16 quads of bytes][16 columns][4].
struct IntBlocks {
  static constexpr int64_t L = 16;            // rows of a block, and integers of a vector of sums
  static constexpr int64_t DEPTH = 64;        // bytes of a row
  static constexpr int64_t COLUMNS = 64;      // of a right block
  static constexpr int64_t LEFT = L * DEPTH;  // bytes of a left block
  static constexpr int64_t PART = DEPTH * L;  // bytes of 16 columns of a right block
  static constexpr int64_t RIGHT = 4 * PART;  // bytes of a right block
  static constexpr int64_t UNIT = DEPTH / 2;  // integers of a vector with a scale of their own

  static constexpr int64_t chunks(int64_t dim) { return (dim + DEPTH - 1) / DEPTH; }

  // Returns what is added to the integers of keys, so that they are multiplied as unsigned bytes.
  static constexpr int32_t key_shift(at::ScalarType format) { return format == at::kChar ? 128 : 8; }

  // Loads integers 64 c .. 64 c + 63 of a stored int8 vector [dim]; those beyond its end are 0.
  static __m512i int8_chunk(const char* vector, int64_t c, int64_t dim) {
    const int64_t size = std::min(DEPTH, dim - c * DEPTH);
    return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (DEPTH - size), vector + c * DEPTH);
  }

  // Loads group c of two stored int4 vectors [dim], a byte for two integers; those beyond its end are 0.
  static __m512i int4_groups(const char* first, const char* second, int64_t c, int64_t dim) {
    const auto mask = ~uint32_t{0} >> (UNIT - std::min(GROUP, dim - c * GROUP) / 2);
    const __m256i low = _mm256_maskz_loadu_epi8(mask, first + c * GROUP / 2);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_maskz_loadu_epi8(mask, second + c * GROUP / 2), 1);
  }

  // Transposes chunk c of 16 int8 keys [dim] into 16 columns of a right block, as unsigned integers.
  static void transpose_int8_keys(const char* const* keys, int64_t c, int64_t dim, uint8_t* to) {
    const __m512i sign = _mm512_set1_epi8(-128);
    Raw block[L];
    unroll<L>([&](auto i) { block[i] = (Raw)_mm512_xor_si512(int8_chunk(keys[i], c, dim), sign); });
    transpose(block);
    unroll<L>([&](auto i) { _mm512_store_si512(to + i * DEPTH, (__m512i)block[i]); });
  }

  // Transposes chunk c of 32 int4 keys [dim] into 32 columns of a right block: eight integers are moved as one of 32
  // bits and separated afterwards, which takes less than half the shuffles.
  static void transpose_int4_keys(const char* const* keys, int64_t c, int64_t dim, uint8_t* to) {
    Raw block[L];
    unroll<L>([&](auto i) { block[i] = (Raw)int4_groups(keys[i], keys[L + i], c, dim); });
    transpose(block);
    const __m512i low = _mm512_set1_epi8(15);
    unroll<L>([&](auto i) {
      constexpr int64_t QUADS = L / 2;  // of the lower halves; those of the higher ones come after them
      uint8_t* const at = to + i / QUADS * PART + i % QUADS * DEPTH;
      _mm512_store_si512(at, _mm512_and_si512((__m512i)block[i], low));
      _mm512_store_si512(at + QUADS * DEPTH, _mm512_and_si512(_mm512_srli_epi16((__m512i)block[i], 4), low));
    });
  }

  // Four vectors whose bytes are interleaved: the k-th of each, for 4 k in each of the vectors of a quad.
  struct Interleaved {
    explicit Interleaved(const __m512i (&x)[4]) {
      const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
      const __m512i d = _mm512_unpackhi_epi8(x[0], x[1]), e = _mm512_unpackhi_epi8(x[2], x[3]);
      const __m512i p = _mm512_unpacklo_epi16(a, b), q = _mm512_unpackhi_epi16(a, b);
      const __m512i r = _mm512_unpacklo_epi16(d, e), s = _mm512_unpackhi_epi16(d, e);
      constexpr int FIRST = 0x44, SECOND = 0xEE;  // halves of registers
      lower[0] = _mm512_shuffle_i64x2(p, q, FIRST);
      lower[1] = _mm512_shuffle_i64x2(r, s, FIRST);
      higher[0] = _mm512_shuffle_i64x2(p, q, SECOND);
      higher[1] = _mm512_shuffle_i64x2(r, s, SECOND);
    }

    __m512i lower[2], higher[2];  // of the lower 32 bytes of the vectors, and of the higher ones
  };

  // Interleaves chunk c of four int8 values [dim] into one quad of all columns of a right block. Columns stay within
  // their half of the chunk, where restore_order() puts their sums in order.
  static void interleave_int8_values(const char* const* values, int64_t c, int64_t dim, uint8_t* to) {
    __m512i x[4];
    unroll<4>([&](auto i) { x[i] = int8_chunk(values[i], c, dim); });
    const Interleaved found(x);
    unroll<2>([&](auto i) {
      _mm512_store_si512(to + i * PART, found.lower[i]);
      _mm512_store_si512(to + (2 + i) * PART, found.higher[i]);
    });
  }

  // Interleaves chunk c of eight int4 values [dim] into two quads, like interleave_int8_values: as signed integers that
  // are multiplied by the magnitudes of scales. `signs` has a byte for each value whose bits are the sign of its
  // scale, of the first half of the group and of the second one.
  static void interleave_int4_values(const char* const* values, int64_t c, int64_t dim,
                                     const uint8_t* const (&signs)[2], uint8_t* to) {
    __m512i x[4];
    unroll<4>([&](auto i) { x[i] = int4_groups(values[i], values[4 + i], c, dim); });
    const Interleaved found(x);
    unroll<2>([&](auto quad) {
      unroll<2>([&](auto half) {
        int32_t four;
        std::memcpy(&four, signs[half] + 4 * quad, sizeof(four));
        const __m512i sign = _mm512_set1_epi32(four);  // the integer n is worth n - 8, or 8 - n = ~n + 9
        const __m512i shift = _mm512_sub_epi8(_mm512_and_si512(sign, _mm512_set1_epi8(17)), _mm512_set1_epi8(8));
        unroll<2>([&](auto i) {
          constexpr int XOR_AND = 0xF0 ^ (0xCC & 0xAA);  // the table of a ^ (b & c)
          const __m512i both = quad ? found.higher[i] : found.lower[i];
          const __m512i integers = half ? _mm512_srli_epi16(both, 4) : both;
          const __m512i flipped = _mm512_ternarylogic_epi32(sign, integers, _mm512_set1_epi8(15), XOR_AND);
          _mm512_store_si512(to + quad * DEPTH + (2 * half + i) * PART, _mm512_add_epi8(flipped, shift));
        });
      });
    });
  }

  // Puts 32 sums, whose columns interleave_values() has separated by fours, in order.
  static void restore_order(float* sums) {
    constexpr int EVEN = 0x88, ODD = 0xDD;  // quarters of registers
    const __m512 a = _mm512_load_ps(sums), b = _mm512_load_ps(sums + L);
    const __m512 even = _mm512_shuffle_f32x4(a, b, EVEN), odd = _mm512_shuffle_f32x4(a, b, ODD);
    _mm512_store_ps(sums, even);
    _mm512_store_ps(sums + L, odd);
  }
};

#ifdef __AMX_TILE__
class AmxIntProducts : IntBlocks {
 public:
  // Multiplies the first `rows` rows of a left block by PARTS parts of a right block, 32 STEPS bytes of each row: calls
  // work(row, part, sums) with the 16 products of a row and a part. Integers on the left have BYTES bytes: each is in a
  // block of its own, the highest first, `stride` bytes apart. The integers of one side are signed.
  template <bool LEFT_SIGNED, int BYTES, int STEPS, int PARTS, typename Work>
  void multiply(const uint8_t* left, int64_t stride, const uint8_t* right, int64_t rows, const Work& work) const {
    constexpr int64_t ROW = PARTS * L;  // of products
    alignas(64) int32_t products[BYTES][L * ROW];
    unroll<BYTES>([&](auto byte) {
      unroll<PARTS>([&](auto n) {
        tile_zero<n>();
        unroll<STEPS>([&](auto step) {
          tile_load<4 + step>(left + byte * stride + step * UNIT, DEPTH);
          tile_load<6 + step>(right + n * PART + step * (UNIT / 4) * DEPTH, DEPTH);
          if constexpr (LEFT_SIGNED)
            tile_dot_int8<n, 4 + step, 6 + step, true>();
          else
            tile_dot_uint8<n, 4 + step, 6 + step>();
        });
      });
      unroll<PARTS>([&](auto n) { tile_store<n>(products[byte] + n * L, ROW * sizeof(int32_t)); });
    });
    for (int64_t row = 0; row < rows; ++row)
      unroll<PARTS>([&](auto n) {
        __m512i sums = _mm512_setzero_si512();
        for (const auto& of_byte : products)
          sums = _mm512_add_epi32(_mm512_slli_epi32(sums, 8), _mm512_load_si512(of_byte + row * ROW + n * L));
        work(row, n, sums);
      });
  }

 private:
  const Tiles tiles_{UNIT};
};
#endif

class VnniIntProducts : IntBlocks {
 public:
  // Multiplies like AmxIntProducts.
  template <bool LEFT_SIGNED, int BYTES, int STEPS, int PARTS, typename Work>
  void multiply(const uint8_t* left, int64_t stride, const uint8_t* right, int64_t rows, const Work& work) const {
    for (int64_t row = 0; row < rows;)
      with_rows(next_rows(rows - row), [&](auto R) {
        constexpr int C = std::min(PARTS, R <= 4 ? 4 : 2);  // parts whose sums fit into registers
        for (int n = 0; n < PARTS; n += C)
          multiply_parts<LEFT_SIGNED, BYTES, STEPS, R, C>(
              left + row * DEPTH, stride, right + n * PART,
              [&](int r, int c, __m512i sums) { work(row + r, n + c, sums); });
        row += R;
      });
  }

 private:
  template <bool LEFT_SIGNED, int BYTES, int STEPS, int R, int C, typename Work>
  __attribute__((flatten)) static void multiply_parts(const uint8_t* left, int64_t stride, const uint8_t* right,
                                                      const Work& work) {
    using Sums = int32_t __attribute__((vector_size(64)));
    Sums sum[R][C] = {};
    unroll<BYTES>([&](auto byte) {
      if constexpr (byte > 0) unroll<R>([&](auto r) { unroll<C>([&](auto n) { sum[r][n] <<= 8; }); });
      for (int64_t quad = 0; quad < STEPS * UNIT / 4; ++quad) {
        __m512i b[C];
        unroll<C>([&](auto n) { b[n] = _mm512_load_si512(right + n * PART + quad * DEPTH); });
        unroll<R>([&](auto r) {
          int32_t four;
          std::memcpy(&four, left + byte * stride + r * DEPTH + 4 * quad, sizeof(four));
          const __m512i a = _mm512_set1_epi32(four);
          unroll<C>([&](auto n) {
            sum[r][n] = (Sums)(LEFT_SIGNED ? _mm512_dpbusd_epi32((__m512i)sum[r][n], b[n], a)
                                           : _mm512_dpbusd_epi32((__m512i)sum[r][n], a, b[n]));
          });
        });
      }
    });
    unroll<R>([&](auto r) { unroll<C>([&](auto n) { work(r, n, (__m512i)sum[r][n]); }); });
  }
};

}  // namespace kvmux

#endif
