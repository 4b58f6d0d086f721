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

  // Loads integers 64 c .. 64 c + 63 of a stored vector [dim], in the format KV: signed ones of 8 bits, or unsigned
  // ones of 4, 32 of each half of a group; those beyond its end are 0.
  template <typename KV>
  static __m512i integers(const char* vector, int64_t c, int64_t dim) {
    const int64_t size = std::min(DEPTH, dim - c * DEPTH);
    if constexpr (std::is_same_v<KV, int8_t>)
      return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (DEPTH - size), vector + c * DEPTH);
    const char* const from = vector + c * GROUP / 2;
    if (size < GROUP) return last_integers(from, size);
    // The bytes twice, of which the second ones are shifted, take no shuffle.
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    return _mm512_and_si512(_mm512_srlv_epi16(twice, shifts), _mm512_set1_epi8(15));
  }

  // Loads a group of fewer than 64 integers of 4 bits.
  static __m512i last_integers(const char* from, int64_t size) {
    alignas(64) uint8_t integers[GROUP] = {};
    for (int64_t j = 0; j < size / 2; ++j) {
      const auto both = static_cast<uint8_t>(from[j]);
      integers[j] = both & 15;
      integers[UNIT + j] = both >> 4;
    }
    return _mm512_load_si512(integers);
  }

  // Returns what is added to the integers of keys before they are multiplied, as unsigned bytes.
  static constexpr int32_t key_shift(at::ScalarType format) { return format == at::kChar ? 128 : 8; }

  // Transposes chunk c of 16 keys [dim] into 16 columns of a right block, as unsigned integers.
  template <typename KV>
  static void transpose_keys(const char* const* keys, int64_t c, int64_t dim, uint8_t* to) {
    const __m512i sign = _mm512_set1_epi8(std::is_same_v<KV, int8_t> ? -128 : 0);
    Raw block[L];
    unroll<L>([&](auto i) { block[i] = (Raw)_mm512_xor_si512(integers<KV>(keys[i], c, dim), sign); });
    transpose(block);
    unroll<L>([&](auto i) { _mm512_store_si512(to + i * DEPTH, (__m512i)block[i]); });
  }

  // Transposes chunk c of 32 keys, a whole group of 4 bits, into 32 columns of a right block: eight integers are moved
  // as one of 32 bits and separated afterwards, which takes less than half the shuffles.
  static void transpose_int4_keys(const char* const* keys, int64_t c, uint8_t* to) {
    const auto bytes = [&](int64_t key) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys[key] + c * GROUP / 2));
    };
    Raw block[L];
    unroll<L>([&](auto i) { block[i] = (Raw)_mm512_inserti64x4(_mm512_castsi256_si512(bytes(i)), bytes(L + i), 1); });
    transpose(block);
    const __m512i low = _mm512_set1_epi8(15);
    unroll<L>([&](auto i) {
      constexpr int64_t QUADS = L / 2;  // of the lower halves; those of the higher ones come after them
      uint8_t* const at = to + i / QUADS * PART + i % QUADS * DEPTH;
      _mm512_store_si512(at, _mm512_and_si512((__m512i)block[i], low));
      _mm512_store_si512(at + QUADS * DEPTH, _mm512_and_si512(_mm512_srli_epi16((__m512i)block[i], 4), low));
    });
  }

  // Loads chunk c of a value as signed integers that are multiplied by the magnitudes of scales: with the sign of their
  // scale.
  template <typename KV>
  static __m512i signed_integers(const char* value, int64_t c, int64_t dim) {
    const __m512i found = integers<KV>(value, c, dim);
    if constexpr (std::is_same_v<KV, int8_t>) return found;  // whose scales are positive
    const __m512i scales = _mm512_set1_epi32(static_cast<int>(scales_of(value, dim, c)));
    const __m512i halves = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(1), 1);
    const __m512i sign = _mm512_permutexvar_epi16(halves, _mm512_srai_epi16(scales, 15));  // of each number: 0 or -1
    return _mm512_sub_epi8(_mm512_xor_si512(_mm512_sub_epi8(found, _mm512_set1_epi8(8)), sign), sign);
  }

  // Interleaves chunk c of four values [dim] into one quad of all columns of a right block. Columns stay within their
  // half of the chunk, where restore_order() puts their sums in order.
  template <typename KV>
  static void interleave_values(const char* const* values, int64_t c, int64_t dim, uint8_t* to) {
    constexpr int FIRST = 0x44, SECOND = 0xEE;  // halves of registers
    __m512i x[4];
    unroll<4>([&](auto i) { x[i] = signed_integers<KV>(values[i], c, dim); });
    const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
    const __m512i d = _mm512_unpackhi_epi8(x[0], x[1]), e = _mm512_unpackhi_epi8(x[2], x[3]);
    const __m512i p = _mm512_unpacklo_epi16(a, b), q = _mm512_unpackhi_epi16(a, b);
    const __m512i r = _mm512_unpacklo_epi16(d, e), s = _mm512_unpackhi_epi16(d, e);
    _mm512_store_si512(to, _mm512_shuffle_i64x2(p, q, FIRST));
    _mm512_store_si512(to + PART, _mm512_shuffle_i64x2(r, s, FIRST));
    _mm512_store_si512(to + 2 * PART, _mm512_shuffle_i64x2(p, q, SECOND));
    _mm512_store_si512(to + 3 * PART, _mm512_shuffle_i64x2(r, s, SECOND));
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
  // Computes products [16][16 PARTS] of 32 STEPS bytes of each row of a left block and PARTS parts of a right block;
  // the bytes of one of them are signed.
  template <bool LEFT_SIGNED, int STEPS, int PARTS>
  void multiply(const uint8_t* left, const uint8_t* right, int64_t /* rows */, int32_t* products) const {
    unroll<PARTS>([&](auto n) {
      tile_zero<n>();
      unroll<STEPS>([&](auto step) {
        tile_load<4 + step>(left + step * UNIT, DEPTH);
        tile_load<6 + step>(right + n * PART + step * (UNIT / 4) * DEPTH, DEPTH);
        if constexpr (LEFT_SIGNED)
          tile_dot_int8<n, 4 + step, 6 + step, true>();
        else
          tile_dot_uint8<n, 4 + step, 6 + step>();
      });
    });
    unroll<PARTS>([&](auto n) { tile_store<n>(products + n * L, PARTS * L * sizeof(int32_t)); });
  }

 private:
  const Tiles tiles_{UNIT};
};
#endif

class VnniIntProducts : IntBlocks {
 public:
  // Computes the first `rows` rows of products like those of AmxIntProducts.
  template <bool LEFT_SIGNED, int STEPS, int PARTS>
  void multiply(const uint8_t* left, const uint8_t* right, int64_t rows, int32_t* products) const {
    for (int64_t row = 0; row < rows;)
      with_rows(next_rows(rows - row), [&](auto R) {
        constexpr int C = std::min(PARTS, R <= 4 ? 4 : 2);  // parts whose sums fit into registers
        for (int n = 0; n < PARTS; n += C)
          multiply_parts<LEFT_SIGNED, STEPS, R, C>(left + row * DEPTH, right + n * PART,
                                                   products + (row * PARTS + n) * L, PARTS * L);
        row += R;
      });
  }

 private:
  template <bool LEFT_SIGNED, int STEPS, int R, int C>
  __attribute__((flatten)) static void multiply_parts(const uint8_t* left, const uint8_t* right, int32_t* products,
                                                      int64_t ld) {
    using Sums = int32_t __attribute__((vector_size(64)));
    Sums sum[R][C] = {};
    for (int64_t quad = 0; quad < STEPS * UNIT / 4; ++quad) {
      __m512i b[C];
      unroll<C>([&](auto n) { b[n] = _mm512_load_si512(right + n * PART + quad * DEPTH); });
      unroll<R>([&](auto r) {
        int32_t four;
        std::memcpy(&four, left + r * DEPTH + 4 * quad, sizeof(four));
        const __m512i a = _mm512_set1_epi32(four);
        unroll<C>([&](auto n) {
          sum[r][n] = (Sums)(LEFT_SIGNED ? _mm512_dpbusd_epi32((__m512i)sum[r][n], b[n], a)
                                         : _mm512_dpbusd_epi32((__m512i)sum[r][n], a, b[n]));
        });
      });
    }
    unroll<R>(
        [&](auto r) { unroll<C>([&](auto n) { _mm512_store_si512(products + r * ld + n * L, (__m512i)sum[r][n]); }); });
  }
};

}  // namespace kvmux

#endif
