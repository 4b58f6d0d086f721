// The attention of attend.h for queries in bfloat16, and for keys and values that are integers of 4 or 8 bits: scores
// and weighted values are products of integers. Queries are rounded to integers of 8 bits, or of 16 for keys of 8; the
// weights of a tile, times the scales of values, to integers of 8 bits, relative to the largest of their row.
//
// A number is worth integer * scale + zero, where scale and zero belong to a group of 64 numbers, so a product of 64 of
// them is worth scale * (product of integers) + zero * (sum of the other factors). An int8 vector counts as groups that
// have the same scale, and unsigned integers whose zero is -128 * scale. A vector that is not finite has integers that
// are, and a scale and a zero of NaN: a query that does not see it multiplies them by nothing.
//
// The result of a row depends on its position alone. Knows neither tensors nor threads.
#pragma once

#ifdef CPU_CAPABILITY_AVX512

#include "int_products.h"
#include "kv_tiles.h"
#include "online_softmax.h"
#include "score_vectors.h"

namespace kvmux {

// Returns whether keys and values in these formats are multiplied as integers; if both are int8, weights are left in
// bfloat16 or float32, which are nearer than integers of 8 bits.
inline bool are_int_formats(at::ScalarType k, at::ScalarType v) {
  const auto is_int = [](at::ScalarType format) { return format == at::kChar || format == at::kByte; };
  return is_int(k) && is_int(v) && (k == at::kByte || v == at::kByte);
}

template <typename Products>
class IntAttentionHead : IntBlocks {
 public:
  using Number = at::BFloat16;
  static constexpr int64_t ROWS = 128;  // query rows that are computed together
  static constexpr int64_t padded(int64_t dim) { return chunks(dim) * COLUMNS; }

  IntAttentionHead(const KVView& kv, Scores scores)
      : kv_(kv), scores_(scores), k_dim_(kv.k.dim), v_dim_(kv.v.dim), width_(padded(v_dim_)), k_chunks_(chunks(k_dim_)),
        v_chunks_(chunks(v_dim_)), parts_(kv.k.format == at::kChar ? 2 : 1), tiles_(kv_) {
    for (int64_t r = 0; r < kv.rows.count; ++r) position_[r] = kv.rows.position(r);
  }

  // Stores `query` [k.dim], rotated if keys are, as query row number r. If it is not finite, its scale is NaN.
  void set_query(int64_t r, const Number* query) {
    constexpr float TINY = 1e-30f;
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
    const float largest = _mm512_reduce_max_ps(most), levels = parts_ == 2 ? 127.f * 256.f : 127.f;
    q_scales_[r] = broken ? std::numeric_limits<float>::quiet_NaN() : largest / levels;
    const float factor = broken || largest < TINY ? 0.f : levels / largest;
    for (int64_t c = 0; c < k_chunks_; ++c) q_sums_[r][c] = store_query(r, c, wide + c * DEPTH, factor, broken != 0);
  }

  // Sets the keys and values that this thread reads afterwards, from split number `split` on.
  void set_next(const KVView& kv, int64_t split) { tiles_.set_next(kv, split * SPLIT); }

  // Computes attention over those of the splits begin .. end - 1 that are seen, and writes its sums to `sums`.
  void attend(int64_t begin, int64_t end, OnlineSoftmax<ROWS>& sums) {
    sums.clear(kv_.rows.count, width_);
    for (int64_t split = begin; split < end; split = kv_.next_seen((split + 1) * SPLIT) / SPLIT) {
      tiles_.start(split * SPLIT, end * SPLIT);
      std::fill_n(top_, kv_.rows.count, NO_SCORE);
      std::fill_n(weights_, kv_.rows.count * L, 0.f);
      std::fill_n(zeros_, kv_.rows.count * v_chunks_ * L, 0.f);
      std::fill_n(values_, kv_.rows.count * width_, 0.f);
      for (int64_t tile = split * SPLIT; tile < (split + 1) * SPLIT && tile <= kv_.newest; tile += TILE) {
        const Tile& found = tiles_.read(tile);
        tiles_.queue().spread(TILE / L * k_chunks_ + TILE / 4 * v_chunks_ + kv_.rows.count);
        if (!found.seen.empty()) attend_tile(tile, found);
      }
      for (int64_t r = 0; r < kv_.rows.count; ++r) merge(r, sums);
    }
  }

 private:
  static constexpr int64_t TILE = COLUMNS;  // positions
  static constexpr int64_t N = TILE / L;
  static constexpr int64_t MAX_CHUNKS = MAX_DIM / DEPTH;
  // The most by which a score may exceed the maximum to which its row's sums are relative: weights are at most 2^8.
  static constexpr float SLACK = 8.f;
  static_assert(TILE == DEPTH && SPLIT % TILE == 0 && ROWS % L == 0);
  using Tiles = KVTileReader<TILE, L>;
  using Tile = Tiles::Tile;

  // What the integers of a tile's vectors are worth, by group.
  struct Scales {
    alignas(64) float scale[MAX_CHUNKS][TILE], zero[MAX_CHUNKS][TILE];
  };

  // Calls work(number) with a value of the C++ type that stands for a format; see are_int_formats.
  template <typename Work>
  static void with_format(at::ScalarType format, const Work& work) {
    format == at::kChar ? work(int8_t{}) : work(Int4{});
  }

  uint8_t* query_block(int64_t part, int64_t first, int64_t c) {
    return q_ + ((part * ROWS + first) / L * k_chunks_ + c) * LEFT;
  }

  // Stores chunk c of query row r as integers: `factor` times its numbers. Returns the sum of the integers.
  float store_query(int64_t r, int64_t c, const float* from, float factor, bool broken) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t d = 0; d < DEPTH; d += L) {
      const __m512 x = broken ? _mm512_setzero_ps() : _mm512_load_ps(from + d);
      __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(factor)));
      sum = _mm512_add_epi32(sum, rest);
      for (int64_t part = parts_ - 1; part >= 0; --part) {  // the last part is the lowest
        auto* const to = query_block(part, r / L * L, c) + r % L * DEPTH + d;
        _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(rest));
        rest = _mm512_srai_epi32(_mm512_add_epi32(rest, _mm512_set1_epi32(128)), 8);
      }
    }
    return static_cast<float>(_mm512_reduce_add_epi32(sum));
  }

  void attend_tile(int64_t tile, const Tile& found) {
    const int64_t end = found.seen.end - tile;
    read_scales(kv_.k, found.k, -128.f, k_scales_);  // the integers of keys are multiplied as unsigned ones
    read_scales(kv_.v, found.v, 0.f, v_scales_);
    with_format(kv_.k.format, [&](auto of_k) { pack_keys<decltype(of_k)>(found.k, end); });
    with_format(kv_.v.format, [&](auto of_v) { pack_values<decltype(of_v)>(found.v, end); });
    for (int64_t first = 0; first < kv_.rows.count; first += L) {
      const int64_t count = std::min(L, kv_.rows.count - first);
      const int64_t oldest = position_[first], newest = position_[first + count - 1];
      if (kv_.mask.seen(oldest, newest, {tile, tile + TILE}).empty()) continue;
      for (int64_t c = 0; c < k_chunks_; ++c) add_scores(first, count, c);
      const bool whole = kv_.mask.all_see(oldest, newest, {tile, tile + TILE});
      for (int64_t i = 0; i < count; ++i) softmax(first + i, tile, whole);
      for (int64_t c = 0; c < v_chunks_; ++c) add_values(first, count, c);
    }
  }

  // Reads what the integers of a tile's vectors are worth; the zero of int8 is `zero` times the scale.
  static void read_scales(const StoredVectors& stored, const char* const* vectors, float zero, Scales& to) {
    for (int64_t c = 0; c < chunks(stored.dim); ++c) {
      float *const scales = to.scale[c], *const zeros = to.zero[c];
      if (stored.format == at::kChar) {
        for (int64_t j = 0; j < TILE; ++j) scales[j] = scale_of(vectors[j], stored.dim);
        for (int64_t j = 0; j < TILE; ++j) zeros[j] = zero * scales[j];
        continue;
      }
      uint32_t both[TILE];
      for (int64_t j = 0; j < TILE; ++j) both[j] = scale_and_zero_of(vectors[j], stored.dim, c);
      for (int64_t j = 0; j < TILE; ++j) scales[j] = scale_in(both[j]);
      for (int64_t j = 0; j < TILE; ++j) zeros[j] = zero_in(both[j]) + 0.f * scales[j];  // NaN, if the scale is
    }
  }

  // Arranges the first `end` keys of a tile as right blocks, one for each chunk of their numbers.
  template <typename KV>
  void pack_keys(const char* const* keys, int64_t end) {
    for (int64_t c = 0; c < k_chunks_; ++c)
      for (int64_t j = 0; j < end; j += L) {
        transpose_keys<KV>(keys + j, c, k_dim_, k_ + c * RIGHT + j / L * PART);
        tiles_.queue().fetch();
      }
  }

  // Arranges the first `end` values of a tile as right blocks. What is left in a block by others is multiplied by 0.
  template <typename KV>
  void pack_values(const char* const* values, int64_t end) {
    for (int64_t j = 0; j < end; j += 4)
      for (int64_t c = 0; c < v_chunks_; ++c) {
        interleave_values<KV>(values + j, c, v_dim_, v_ + c * RIGHT + j / 4 * DEPTH);
        tiles_.queue().fetch();
      }
  }

  // Adds the products of chunk c of the query rows from `first` on with that of the tile's keys to the scores.
  void add_scores(int64_t first, int64_t count, int64_t c) {
    products_.template multiply<true>(query_block(0, first, c), k_ + c * RIGHT, count, products_of_[0]);
    if (parts_ == 2)
      products_.template multiply<true>(query_block(1, first, c), k_ + c * RIGHT, count, products_of_[1]);
    for (int64_t i = 0; i < count; ++i) {
      const __m512 sum = _mm512_set1_ps(q_sums_[first + i][c]);
      unroll<N>([&](auto j) {
        const int64_t at = i * TILE + j * L;
        __m512i integers = _mm512_load_si512(products_of_[0] + at);
        if (parts_ == 2)
          integers = _mm512_add_epi32(_mm512_slli_epi32(integers, 8), _mm512_load_si512(products_of_[1] + at));
        const __m512 scale = _mm512_load_ps(k_scales_.scale[c] + j * L),
                     zero = _mm512_load_ps(k_scales_.zero[c] + j * L);
        const __m512 before = c == 0 ? _mm512_setzero_ps() : _mm512_load_ps(s_ + at);
        const __m512 with_zero = _mm512_fmadd_ps(zero, sum, before);
        _mm512_store_ps(s_ + at, _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(integers), with_zero));
      });
    }
  }

  // Turns the scores of query row r into softmax weights, relative to the highest score of the row so far.
  void softmax(int64_t r, int64_t tile, bool whole) {
    tiles_.queue().fetch();
    const int64_t i = r % L;
    Raw x[N];
    unroll<N>([&](auto j) { x[j] = _mm512_load_ps(s_ + i * TILE + j * L); });
    scale_scores(x, scores_, q_scales_[r]);
    __mmask16 seen[N];
    unroll<N>([&](auto j) { seen[j] = 0xFFFF; });
    if (!whole) mask_scores(kv_.mask.seen_by(position_[r]), tile, x, seen);
    const __m512 highest = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
    if (_mm512_cmp_ps_mask(highest, _mm512_set1_ps(top_[r] + SLACK), _CMP_GT_OQ))
      raise(r, _mm512_reduce_max_ps(highest));
    const __m512 top = _mm512_set1_ps(top_[r]);
    unroll<N>([&](auto j) { x[j] = exp2(_mm512_sub_ps(x[j], top)); });
    __m512 sum = _mm512_load_ps(weights_ + r * L);
    unroll<N>([&](auto j) { sum = _mm512_add_ps(sum, x[j]); });
    _mm512_store_ps(weights_ + r * L, sum);
    for (int64_t c = 0; c < v_chunks_; ++c) store_weights(x, seen, r, c);
  }

  // Stores the weights of query row r, times the scales of chunk c of those values that it sees, as integers relative
  // to the largest; adds the weighted zeros to those of the row.
  void store_weights(const Raw (&x)[N], const __mmask16 (&seen)[N], int64_t r, int64_t c) {
    constexpr float LEVELS = 255.f, TINY = 1e-30f;
    Raw scaled[N];
    float* const zeros = zeros_ + (r * v_chunks_ + c) * L;
    __m512 zero = _mm512_load_ps(zeros);
    unroll<N>([&](auto j) {
      scaled[j] = _mm512_maskz_mul_ps(seen[j], x[j], _mm512_load_ps(v_scales_.scale[c] + j * L));
      zero = _mm512_mask3_fmadd_ps(x[j], _mm512_load_ps(v_scales_.zero[c] + j * L), zero, seen[j]);
    });
    _mm512_store_ps(zeros, zero);
    const __m512 most = _mm512_max_ps(_mm512_max_ps(scaled[0], scaled[1]), _mm512_max_ps(scaled[2], scaled[3]));
    const float largest = std::max(_mm512_reduce_max_ps(most), TINY);
    w_scales_[c][r % L] = largest / LEVELS;
    const __m512 factor = _mm512_set1_ps(LEVELS / largest);
    uint8_t* const to = w_ + c * LEFT + r % L * DEPTH;
    unroll<N>([&](auto j) {
      const __m512i integers = _mm512_cvtps_epu32(_mm512_mul_ps(scaled[j], factor));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + j * L), _mm512_cvtusepi32_epi8(integers));
    });
  }

  // Adds the weighted values of chunk c to the sums of the query rows from `first` on.
  void add_values(int64_t first, int64_t count, int64_t c) {
    products_.template multiply<false>(w_ + c * LEFT, v_ + c * RIGHT, count, products_of_[0]);
    for (int64_t i = 0; i < count; ++i) {
      float* const to = values_ + (first + i) * width_ + c * COLUMNS;
      const __m512 scale = _mm512_set1_ps(w_scales_[c][i]);
      unroll<4>([&](auto n) {
        const __m512 added = _mm512_cvtepi32_ps(_mm512_load_si512(products_of_[0] + i * COLUMNS + n * L));
        _mm512_store_ps(to + n * L, _mm512_fmadd_ps(scale, added, _mm512_load_ps(to + n * L)));
      });
    }
  }

  // Makes the sums of query row r relative to `higher`, a new highest score.
  void raise(int64_t r, float higher) {
    const __m512 factor = exp2(_mm512_set1_ps(top_[r] - higher));
    top_[r] = higher;
    const auto multiply = [factor](float* sums, int64_t n) {
      for (int64_t i = 0; i < n; i += L) _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), factor));
    };
    multiply(weights_ + r * L, L);
    multiply(zeros_ + r * v_chunks_ * L, v_chunks_ * L);
    multiply(values_ + r * width_, width_);
  }

  // Adds the sums of query row r over one split to `sums`.
  void merge(int64_t r, OnlineSoftmax<ROWS>& sums) {
    constexpr float LN2 = 0.693147181f;
    const float total = _mm512_reduce_add_ps(_mm512_load_ps(weights_ + r * L));
    if (top_[r] == NO_SCORE && total == 0.f) return;  // skips a row that saw no key, unless its total is NaN
    float* const values = values_ + r * width_;
    for (int64_t c = 0; c < v_chunks_; ++c) {
      float* const chunk = values + c * COLUMNS;
      restore_order(chunk);
      const float zero = _mm512_reduce_add_ps(_mm512_load_ps(zeros_ + (r * v_chunks_ + c) * L));
      for (int64_t d = 0; d < COLUMNS; ++d) chunk[d] += zero;
    }
    sums.merge(r, top_[r] * LN2, total, values, width_);
  }

  const Products products_{};
  const KVView kv_;
  const Scores scores_;
  const int64_t k_dim_, v_dim_, width_;  // width_: numbers in a row of value sums, with padding
  const int64_t k_chunks_, v_chunks_;    // of 64 numbers
  const int64_t parts_;                  // bytes of an integer of a query
  Tiles tiles_;
  alignas(64) uint8_t q_[2 * ROWS * MAX_DIM];  // [parts][rows / 16][chunks][left block]
  alignas(64) uint8_t k_[MAX_CHUNKS * RIGHT], v_[MAX_CHUNKS * RIGHT];
  alignas(64) uint8_t w_[MAX_CHUNKS * LEFT];  // weights of 16 rows
  alignas(64) int32_t products_of_[2][L * COLUMNS];
  alignas(64) float s_[L * TILE];  // scores of 16 rows
  Scales k_scales_, v_scales_;
  float w_scales_[MAX_CHUNKS][L];
  float q_scales_[ROWS], q_sums_[ROWS][MAX_CHUNKS];  // the sums of a query's integers
  alignas(64) float values_[ROWS * MAX_DIM];
  alignas(64) float weights_[ROWS * L];             // sums of the weights so far, one per vector lane, for each row
  alignas(64) float zeros_[ROWS * MAX_CHUNKS * L];  // and of the weighted zeros
  float top_[ROWS];                                 // of scores times log2(e)
  int64_t position_[ROWS];
};

}  // namespace kvmux

#endif
