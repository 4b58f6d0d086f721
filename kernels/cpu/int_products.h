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

  static constexpr int64_t chunks(int64_t dim) { return (dim + DEPTH - 1) / DEPTH; }

  // Loads integers 64 c .. 64 c + 63 of a stored vector [dim], in the format KV; those beyond its end are 0.
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
      integers[size / 2 + j] = both >> 4;
    }
    return _mm512_load_si512(integers);
  }

  // Returns what integers() of keys differ from the unsigned ones that are multiplied, by an exclusive or.
  template <typename KV>
  static __m512i key_sign() {
    return _mm512_set1_epi8(std::is_same_v<KV, int8_t> ? -128 : 0);
  }

  // Transposes chunk c of 16 keys [dim] into 16 columns of a right block, as unsigned integers.
  template <typename KV>
  static void transpose_keys(const char* const* keys, int64_t c, int64_t dim, uint8_t* to) {
    Raw block[L];
    unroll<L>([&](auto i) { block[i] = (Raw)_mm512_xor_si512(integers<KV>(keys[i], c, dim), key_sign<KV>()); });
    transpose(block);
    unroll<L>([&](auto i) { _mm512_store_si512(to + i * DEPTH, (__m512i)block[i]); });
  }

  // Interleaves chunk c of four values [dim] into one quad of all columns of a right block. Of each part of 16 columns,
  // four come from each quarter of the chunk; restore_order() undoes that for sums.
  template <typename KV>
  static void interleave_values(const char* const* values, int64_t c, int64_t dim, uint8_t* to) {
    __m512i x[4];
    unroll<4>([&](auto i) { x[i] = integers<KV>(values[i], c, dim); });
    const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
    const __m512i d = _mm512_unpackhi_epi8(x[0], x[1]), e = _mm512_unpackhi_epi8(x[2], x[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + PART, _mm512_unpackhi_epi16(a, b));
    _mm512_store_si512(to + 2 * PART, _mm512_unpacklo_epi16(d, e));
    _mm512_store_si512(to + 3 * PART, _mm512_unpackhi_epi16(d, e));
  }

  // Puts 64 sums, whose columns interleave_values() has separated, in order: transposes a matrix of 4 by 4 quarters.
  static void restore_order(float* sums) {
    constexpr int EVEN = 0x88, ODD = 0xDD;  // quarters
    const __m512 a = _mm512_load_ps(sums), b = _mm512_load_ps(sums + L);
    const __m512 c = _mm512_load_ps(sums + 2 * L), d = _mm512_load_ps(sums + 3 * L);
    const __m512 ab = _mm512_shuffle_f32x4(a, b, EVEN), cd = _mm512_shuffle_f32x4(c, d, EVEN);
    const __m512 ab_odd = _mm512_shuffle_f32x4(a, b, ODD), cd_odd = _mm512_shuffle_f32x4(c, d, ODD);
    _mm512_store_ps(sums, _mm512_shuffle_f32x4(ab, cd, EVEN));
    _mm512_store_ps(sums + L, _mm512_shuffle_f32x4(ab_odd, cd_odd, EVEN));
    _mm512_store_ps(sums + 2 * L, _mm512_shuffle_f32x4(ab, cd, ODD));
    _mm512_store_ps(sums + 3 * L, _mm512_shuffle_f32x4(ab_odd, cd_odd, ODD));
  }
};

#ifdef __AMX_TILE__
class AmxIntProducts : IntBlocks {
 public:
  // Computes the products [16][64] of a left block and a right block, of which one has signed bytes.
  template <bool LEFT_SIGNED>
  void multiply(const uint8_t* left, const uint8_t* right, int64_t /* rows */, int32_t* products) const {
    tile_load<4>(left, TILE_BYTES);
    unroll<4>([&](auto n) {
      tile_zero<n>();
      tile_load<6 + n % 2>(right + n * PART, TILE_BYTES);
      if constexpr (LEFT_SIGNED)
        tile_dot_int8<n, 4, 6 + n % 2, true>();
      else
        tile_dot_uint8<n, 4, 6 + n % 2>();
    });
    unroll<4>([&](auto n) { tile_store<n>(products + n * L, COLUMNS * sizeof(int32_t)); });
  }

 private:
  const Tiles tiles_;
};
#endif

class VnniIntProducts : IntBlocks {
 public:
  // Computes the first `rows` rows of the products [16][64].
  template <bool LEFT_SIGNED>
  void multiply(const uint8_t* left, const uint8_t* right, int64_t rows, int32_t* products) const {
    for (int64_t row = 0; row < rows;)
      with_rows(next_rows(rows - row), [&](auto R) {
        constexpr int C = R <= 4 ? 4 : 2;  // parts whose sums fit into registers
        for (int n = 0; n < 4; n += C)
          multiply_parts<LEFT_SIGNED, R, C>(left + row * DEPTH, right + n * PART, products + row * COLUMNS + n * L);
        row += R;
      });
  }

 private:
  template <bool LEFT_SIGNED, int R, int C>
  __attribute__((flatten)) static void multiply_parts(const uint8_t* left, const uint8_t* right, int32_t* products) {
    using Sums = int32_t __attribute__((vector_size(64)));
    Sums sum[R][C] = {};
    for (int64_t quad = 0; quad < L; ++quad) {
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
    unroll<R>([&](auto r) {
      unroll<C>([&](auto n) { _mm512_store_si512(products + r * COLUMNS + n * L, (__m512i)sum[r][n]); });
    });
  }
};

}  // namespace kvmux

#endif
