// The attention of attend.h for queries in bfloat16, and for keys and values that are integers of 4 or 8 bits: scores
// and weighted values are products of integers. Queries are rounded to integers of 16 bits, relative to their largest
// number, which are multiplied byte by byte; the weights of a tile, times the scales of values, relative to the largest
// of their row: to 16 bits for int8 values, and to 8 for int4 values, which are much coarser.
//
// Products are computed for as many numbers of a vector as have one scale: units of 32 for int4. A vector that is not
// finite has integers that are, and a scale of NaN: a query that does not see it multiplies the scale by nothing.
//
// The result of a row depends on its position alone. Knows neither tensors nor threads.
#pragma once

#ifdef CPU_CAPABILITY_AVX512

#include "int_products.h"
#include "kv_tiles.h"
#include "online_softmax.h"
#include "score_vectors.h"

namespace kvmux {

// Returns whether keys or values in this format are multiplied as integers.
inline bool is_int_format(at::ScalarType format) { return format == at::kChar || format == at::kByte; }

template <typename Products>
class IntAttentionHead : IntBlocks {
 public:
  using Number = at::BFloat16;
  static constexpr int64_t ROWS = 128;  // query rows that are computed together
  static constexpr int64_t padded(int64_t dim) { return chunks(dim) * COLUMNS; }

  IntAttentionHead(const KVView& kv, Scores scores)
      : kv_(kv), scores_(scores), k_dim_(kv.k.dim), v_dim_(kv.v.dim), width_(padded(v_dim_)), k_chunks_(chunks(k_dim_)),
        v_chunks_(chunks(v_dim_)), tiles_(kv_) {
    for (int64_t r = 0; r < kv.rows.count; ++r) position_[r] = kv.rows.position(r);
  }

  // Stores `query` [k.dim], rotated if keys are, as query row number r. If it is not finite, its scale is NaN.
  void set_query(int64_t r, const Number* query) {
    alignas(64) float wide[MAX_DIM] = {};
    to_float(query, wide, k_dim_);
    if (kv_.k.rotated) rotate(wide, k_dim_);
    __m512 most = _mm512_setzero_ps();
    __mmask16 broken = 0;
    for (int64_t d = 0; d < k_dim_; d += L) {
      const __m512 size = _mm512_abs_ps(_mm512_load_ps(wide + d));
      broken |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(std::numeric_limits<float>::max()), _CMP_NLE_UQ);
      most = _mm512_max_ps(most, size);
    }
    const float largest = _mm512_reduce_max_ps(most), levels = 127.f * 256.f;
    q_scales_[r] = broken ? std::numeric_limits<float>::quiet_NaN() : largest / levels;
    const float factor = broken || largest < TINY ? 0.f : levels / largest;
    if (kv_.k.format == at::kByte) part_last_group(wide, k_dim_);
    for (int64_t c = 0; c < k_chunks_; ++c) store_query(r, c, wide + c * DEPTH, factor, broken != 0);
  }

  // Sets the keys and values that this thread reads afterwards, from split number `split` on.
  void set_next(const KVView& kv, int64_t split) { tiles_.set_next(kv, split * SPLIT); }

  // Computes attention over those of the splits begin .. end - 1 that are seen, and writes its sums to `sums`.
  void attend(int64_t begin, int64_t end, OnlineSoftmax<ROWS>& sums) {
    sums.clear(kv_.rows.count, width_);
    for (int64_t split = begin; split < end; split = kv_.next_seen((split + 1) * SPLIT) / SPLIT) {
      tiles_.start(split * SPLIT, end * SPLIT);
      split_.clear(kv_.rows.count, width_);
      for (int64_t tile = split * SPLIT; tile < (split + 1) * SPLIT && tile <= kv_.newest; tile += TILE) {
        const Tile& found = tiles_.read(tile);
        tiles_.queue().spread(2 * k_chunks_ + TILE / 8 * v_chunks_ + kv_.rows.count);
        if (!found.seen.empty()) attend_tile(tile, found);
      }
      for (int64_t r = 0; r < kv_.rows.count; ++r)
        split_.merge_into(sums, r, width_, [this](float* values) { restore_order(values); });
    }
  }

 private:
  static constexpr int64_t TILE = COLUMNS;  // positions
  static constexpr int64_t N = TILE / L;
  static constexpr int64_t MAX_CHUNKS = MAX_DIM / DEPTH, MAX_UNITS = MAX_DIM / UNIT;
  static_assert(TILE == DEPTH && SPLIT % TILE == 0 && ROWS % L == 0);
  using Tiles = KVTileReader<TILE, L>;
  using Tile = Tiles::Tile;

  static constexpr int QUERY_BYTES = 2;  // of an integer

  // How vectors in the format KV are multiplied.
  template <typename KV>
  struct Multiplied {
    static constexpr bool IS_INT8 = std::is_same_v<KV, int8_t>;
    static constexpr int WEIGHT_BYTES = IS_INT8 ? 2 : 1;  // of an integer
    static constexpr int STEPS = IS_INT8 ? 2 : 1;         // units of a key with one scale
    // Returns the number of scales of a vector of some chunks that are read.
    static int64_t scales(int64_t chunks) { return IS_INT8 ? 1 : 2 * chunks; }
  };

  // The scales of a tile's vectors, by unit; those of int8 vectors are the same for all units.
  struct Scales {
    alignas(64) float of[MAX_UNITS][TILE];
  };

  // Calls work(number) with a value of the C++ type that stands for a format; see is_int_format.
  template <typename Work>
  static void with_format(at::ScalarType format, const Work& work) {
    with_one_of<int8_t, Int4>(format, work);
  }

  // Returns the bytes between the left blocks of two bytes of the same integers.
  int64_t query_stride() const { return ROWS / L * k_chunks_ * LEFT; }

  uint8_t* query_block(int64_t byte, int64_t first, int64_t c) {
    return q_ + byte * query_stride() + (first / L * k_chunks_ + c) * LEFT;
  }

  // Moves the second half of the last group of x [dim], if that has fewer than 64 numbers, to a unit of its own.
  static void part_last_group(float* x, int64_t dim) {
    const int64_t half = dim % GROUP / 2;
    float* const group = x + dim / GROUP * GROUP;
    if (half == 0) return;
    std::memmove(group + UNIT, group + half, half * sizeof(float));
    std::fill(group + half, group + UNIT, 0.f);
  }

  // Stores chunk c of query row r as integers: `factor` times its numbers; and the sums of those that are multiplied by
  // one scale, times what is added to the integers of keys.
  void store_query(int64_t r, int64_t c, const float* from, float factor, bool broken) {
    __m512i rest[N];
    unroll<N>([&](auto i) {
      const __m512 x = broken ? _mm512_setzero_ps() : _mm512_load_ps(from + i * L);
      rest[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(factor)));
    });
    unroll<2>([&](auto u) {
      const int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(rest[2 * u], rest[2 * u + 1]));
      q_sums_[r][2 * c + u] = key_shift(kv_.k.format) * sum;
    });
    if (kv_.k.format == at::kChar) q_sums_[r][c] = q_sums_[r][2 * c] + q_sums_[r][2 * c + 1];
    for (int64_t byte = QUERY_BYTES - 1; byte >= 0; --byte)  // the lowest first
      unroll<N>([&](auto i) {
        auto* const to = query_block(byte, r / L * L, c) + r % L * DEPTH + i * L;
        _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(rest[i]));
        rest[i] = _mm512_srai_epi32(_mm512_add_epi32(rest[i], _mm512_set1_epi32(128)), 8);
      });
  }

  void attend_tile(int64_t tile, const Tile& found) {
    const int64_t end = found.seen.end - tile;
    with_format(kv_.k.format, [&](auto of_k) {
      read_scales<decltype(of_k)>(found.k, k_dim_, k_scales_);
      pack_keys<decltype(of_k)>(found.k, end);
    });
    with_format(kv_.v.format, [&](auto of_v) {
      read_scales<decltype(of_v)>(found.v, v_dim_, v_scales_);
      part_signs<decltype(of_v)>();
      pack_values<decltype(of_v)>(found.v, end);
    });
    for (int64_t first = 0; first < kv_.rows.count; first += L) {
      const int64_t count = std::min(L, kv_.rows.count - first);
      const int64_t oldest = position_[first], newest = position_[first + count - 1];
      if (kv_.mask.seen(oldest, newest, {tile, tile + TILE}).empty()) continue;
      with_format(kv_.k.format, [&](auto of_k) { multiply_keys<decltype(of_k)>(first, count); });
      const bool whole = kv_.mask.all_see(oldest, newest, {tile, tile + TILE});
      with_format(kv_.v.format, [&](auto of_v) {
        for (int64_t i = 0; i < count; ++i) softmax<decltype(of_v)>(first + i, tile, whole);
        multiply_values<decltype(of_v)>(first, count);
      });
    }
  }

  template <typename KV>
  static void read_scales(const char* const* vectors, int64_t dim, Scales& to) {
    if constexpr (Multiplied<KV>::IS_INT8) {
      for (int64_t j = 0; j < TILE; ++j) to.of[0][j] = scale_of(vectors[j], dim);
      return;
    }
    for (int64_t c = 0; c < chunks(dim); ++c) {
      uint32_t both[TILE];
      for (int64_t j = 0; j < TILE; ++j) both[j] = scales_of(vectors[j], dim, c);
      for (int64_t j = 0; j < TILE; ++j) to.of[2 * c][j] = first_in(both[j]);
      for (int64_t j = 0; j < TILE; ++j) to.of[2 * c + 1][j] = second_in(both[j]);
    }
  }

  // Moves the signs of the values' scales, which go with the integers of values, to bytes of their own.
  template <typename KV>
  void part_signs() {
    if constexpr (Multiplied<KV>::IS_INT8) return;  // whose scales are positive
    for (int64_t u = 0; u < 2 * v_chunks_; ++u)
      for (int64_t j = 0; j < TILE; j += L) {
        float* const scales = v_scales_.of[u] + j;
        const __m512i bits = _mm512_load_si512(scales);
        _mm_store_si128(reinterpret_cast<__m128i*>(v_signs_[u] + j), _mm512_cvtepi32_epi8(_mm512_srai_epi32(bits, 31)));
        _mm512_store_ps(scales, _mm512_abs_ps((__m512)bits));
      }
  }

  // Arranges the first `end` keys of a tile as right blocks, one for each chunk of their numbers.
  template <typename KV>
  void pack_keys(const char* const* keys, int64_t end) {
    for (int64_t c = 0; c < k_chunks_; ++c)
      for (int64_t j = 0; j < end; j += 2 * L) {
        uint8_t* const to = k_ + c * RIGHT + j / L * PART;
        if constexpr (Multiplied<KV>::IS_INT8)
          unroll<2>([&](auto i) { transpose_int8_keys(keys + j + i * L, c, k_dim_, to + i * PART); });
        else
          transpose_int4_keys(keys + j, c, k_dim_, to);
        tiles_.queue().fetch();
      }
  }

  // Arranges the first `end` values of a tile as right blocks. What is left in a block by others is multiplied by 0.
  template <typename KV>
  void pack_values(const char* const* values, int64_t end) {
    for (int64_t j = 0; j < end; j += 8)
      for (int64_t c = 0; c < v_chunks_; ++c) {
        uint8_t* const to = v_ + c * RIGHT + j / 4 * DEPTH;
        if constexpr (Multiplied<KV>::IS_INT8)
          unroll<2>([&](auto i) { interleave_int8_values(values + j + 4 * i, c, v_dim_, to + i * DEPTH); });
        else
          interleave_int4_values(values + j, c, v_dim_, {v_signs_[2 * c] + j, v_signs_[2 * c + 1] + j}, to);
        tiles_.queue().fetch();
      }
  }

  // Computes the scores of the query rows from `first` on, without their scales.
  template <typename KV>
  void multiply_keys(int64_t first, int64_t count) {
    using How = Multiplied<KV>;
    for (int64_t u = 0; u < 2 * k_chunks_ / How::STEPS; ++u) {
      const int64_t c = u * How::STEPS / 2, unit = u * How::STEPS % 2;
      const float* const scales = k_scales_.of[How::IS_INT8 ? 0 : u];
      products_.template multiply<true, QUERY_BYTES, How::STEPS, 4>(
          query_block(0, first, c) + unit * UNIT, query_stride(), k_ + c * RIGHT + unit * (UNIT / 4) * DEPTH, count,
          [&](int64_t i, int64_t j, __m512i sums) {
            float* const to = s_ + i * TILE + j * L;
            const __m512 added = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(q_sums_[first + i][u])));
            const __m512 before = u == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to);
            _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(scales + j * L), added, before));
          });
    }
  }

  // Turns the scores of query row r into softmax weights, relative to the highest score of the row so far.
  template <typename V>
  void softmax(int64_t r, int64_t tile, bool whole) {
    tiles_.queue().fetch();
    const int64_t i = r % L;
    Raw x[N];
    unroll<N>([&](auto j) { x[j] = _mm512_load_ps(s_ + i * TILE + j * L); });
    scale_scores(x, scores_, q_scales_[r]);
    __mmask16 seen[N];
    unroll<N>([&](auto j) { seen[j] = 0xFFFF; });
    if (!whole) {
      mask_scores(kv_.mask.seen_by(position_[r]), tile, x);
      unroll<N>([&](auto j) { seen[j] = _mm512_cmp_ps_mask(x[j], _mm512_set1_ps(MASKED_SCORE), _CMP_NEQ_UQ); });
    }
    split_.weigh(r, x, width_);
    __m512 sum = _mm512_load_ps(split_.totals + r * L);
    unroll<N>([&](auto j) { sum = _mm512_add_ps(sum, x[j]); });
    _mm512_store_ps(split_.totals + r * L, sum);
    for (int64_t u = 0; u < Multiplied<V>::scales(v_chunks_); ++u)
      store_weights<Multiplied<V>::WEIGHT_BYTES>(x, seen, r % L, u);
  }

  // Stores the weights of a row, times the scales of unit u of those values that it sees, as integers relative to the
  // largest. If a scale is NaN, so is the largest: as integers, the bits of NaN are above those of other numbers. None
  // is negative; if a weight is NaN, so is the sum of weights.
  template <int BYTES>
  void store_weights(const Raw (&x)[N], const __mmask16 (&seen)[N], int64_t i, int64_t u) {
    constexpr float LEVELS = BYTES == 2 ? 65535.f : 255.f;
    Raw scaled[N];
    __m512i most = _mm512_setzero_si512();
    unroll<N>([&](auto j) {
      scaled[j] = _mm512_maskz_mul_ps(seen[j], x[j], _mm512_load_ps(v_scales_.of[u] + j * L));
      most = _mm512_max_epi32(most, (__m512i)scaled[j]);
    });
    const float largest = std::max(std::bit_cast<float>(_mm512_reduce_max_epi32(most)), TINY);
    w_scales_[u][i] = largest / LEVELS;
    const __m512 factor = _mm512_set1_ps(LEVELS / largest);
    uint8_t* const to = w_ + u * LEFT + i * DEPTH;
    unroll<N>([&](auto j) {
      const __m512i integers = _mm512_cvtps_epu32(_mm512_mul_ps(scaled[j], factor));
      unroll<BYTES>([&](auto byte) {
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_srli_epi32(integers, 8 * (BYTES - 1 - byte)));
        _mm_store_si128(reinterpret_cast<__m128i*>(to + byte * LEFT + j * L), bytes);
      });
    });
  }

  // Adds the weighted values to the sums of the query rows from `first` on.
  template <typename KV>
  void multiply_values(int64_t first, int64_t count) {
    constexpr int PARTS = Multiplied<KV>::IS_INT8 ? 4 : 2;  // of a right block, with the same weights
    for (int64_t part = 0; part < 4 * v_chunks_; part += PARTS) {
      const int64_t u = Multiplied<KV>::IS_INT8 ? 0 : part / PARTS;
      products_.template multiply<false, Multiplied<KV>::WEIGHT_BYTES, 2, PARTS>(
          w_ + u * LEFT, LEFT, v_ + part * PART, count, [&](int64_t i, int64_t n, __m512i sums) {
            float* const to = split_.values + (first + i) * width_ + (part + n) * L;
            const __m512 scale = _mm512_set1_ps(w_scales_[u][i]);
            _mm512_store_ps(to, _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums), _mm512_load_ps(to)));
          });
    }
  }

  // Puts the numbers of a row's sums back in the order of values; see interleave_values and part_last_group.
  void restore_order(float* values) const {
    for (int64_t d = 0; d < width_; d += UNIT) IntBlocks::restore_order(values + d);
    const int64_t half = kv_.v.format == at::kByte ? v_dim_ % GROUP / 2 : 0;
    float* const last = values + v_dim_ / GROUP * GROUP;
    std::copy_n(last + UNIT, half, last + half);
  }

  const Products products_{};
  const KVView kv_;
  const Scores scores_;
  const int64_t k_dim_, v_dim_, width_;  // width_: numbers in a row of value sums, with padding
  const int64_t k_chunks_, v_chunks_;    // of 64 numbers
  Tiles tiles_;
  // The highest bytes of queries first: [bytes][rows / 16][chunks][left block].
  alignas(64) uint8_t q_[QUERY_BYTES * ROWS * MAX_DIM];
  alignas(64) uint8_t k_[MAX_CHUNKS * RIGHT], v_[MAX_CHUNKS * RIGHT];
  alignas(64) uint8_t w_[MAX_UNITS * LEFT];  // weights of 16 rows: their bytes if there are two, else by unit
  alignas(64) float s_[L * TILE];            // scores of 16 rows
  Scales k_scales_, v_scales_;
  alignas(64) uint8_t v_signs_[MAX_UNITS][TILE];  // of the scales of values; see interleave_int4_values
  float w_scales_[MAX_UNITS][L];
  float q_scales_[ROWS];
  int32_t q_sums_[ROWS][MAX_UNITS];  // of the integers of a query, times what is added to those of keys, by scale
  SplitSums<ROWS> split_;
  int64_t position_[ROWS];
};

}  // namespace kvmux

#endif
