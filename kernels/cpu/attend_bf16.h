// The attention of attend.h for queries in bfloat16, and for keys and values in bfloat16 or int8: scores and weighted
// values are products of bfloat16 numbers, summed in float32. Weights are rounded to bfloat16 for the second product,
// and rounded in the sum that normalises them, too. The numbers of int8 vectors are exact in bfloat16; scores are
// multiplied by the scales of keys, and weights, once they are summed, by those of values.
//
// A tile of keys and one of values are rearranged once for all query rows that are computed together. The result of a
// row depends on its position alone: other rows of a product do not affect it, and keys that it does not see add zeros.
// Knows neither tensors nor threads.
#pragma once

#ifdef __AVX512BF16__

#include <vector>

#include "bf16_products.h"
#include "kv_tiles.h"
#include "online_softmax.h"

namespace kvmux {

// Returns 2^x with a relative error of 3e-6; 0 for minus infinity.
inline __m512 exp2(__m512 x) {
  constexpr int FLOOR = 0x09;
  const __m512 part = _mm512_reduce_ps(x, FLOOR);
  __m512 power = _mm512_set1_ps(1.353417e-2f);
  for (const float factor : {5.201146e-2f, 2.4144275e-1f, 6.9300384e-1f, 1.00000259f})
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(power, x);
}

template <typename T, typename Products>
class Bf16AttentionHead : Bf16Blocks {
 public:
  using KV = T;
  static constexpr int64_t ROWS = 128;  // query rows that are computed together
  static constexpr int64_t padded(int64_t dim) { return (dim + DEPTH - 1) / DEPTH * DEPTH; }

  Bf16AttentionHead(const KVView<KV>& kv, Scores scores)
      : kv_(kv), scores_(scores), k_dim_(kv.k.dim), v_dim_(kv.v.dim), width_(padded(v_dim_)),
        chunks_(padded(k_dim_) / DEPTH), tiles_(kv_) {
    for (int64_t r = 0; r < kv.rows.count; ++r) position_[r] = kv.rows.position(r);
  }

  // Stores `query` [k.dim] as query row number r, in the layout of blocks (Bf16Blocks).
  void set_query(int64_t r, const Number* query) {
    for (int64_t c = 0; c < chunks_; ++c)
      _mm512_store_si512(q_ + ((r / L * chunks_ + c) * L + r % L) * DEPTH, numbers(query, c, k_dim_));
  }

  // Sets the keys and values that this thread reads afterwards, from split number `split` on.
  void set_next(const KVView<KV>& kv, int64_t split) { tiles_.set_next(kv, split * SPLIT); }

  // Computes attention over those of the splits begin .. end - 1 that are seen, and writes its sums to `sums`.
  void attend(int64_t begin, int64_t end, OnlineSoftmax<ROWS>& sums) {
    sums.clear(kv_.rows.count, width_);
    for (int64_t split = begin; split < end; split = kv_.next_seen((split + 1) * SPLIT) / SPLIT) {
      tiles_.start(split * SPLIT, end * SPLIT);
      std::fill_n(top_, kv_.rows.count, NO_SCORE);
      std::fill_n(weights_, kv_.rows.count * L, 0.f);
      std::fill_n(values_, kv_.rows.count * width_, 0.f);
      for (int64_t tile = split * SPLIT; tile < (split + 1) * SPLIT && tile <= kv_.newest; tile += TILE) {
        const Tile& found = tiles_.read(tile);
        if (!found.seen.empty()) attend_tile(tile, found);
      }
      for (int64_t r = 0; r < kv_.rows.count; ++r) merge(r, sums);
    }
  }

 private:
  static constexpr bool SCALED = std::is_same_v<KV, int8_t>;
  static constexpr int64_t TILE = Products::TILE;  // positions
  static constexpr int64_t N = TILE / L;
  // The most by which a score may exceed the maximum to which its row's sums are relative: weights are at most 2^8.
  static constexpr float SLACK = 8.f;
  static constexpr int64_t PORTION = 8;  // cache lines prefetched in one go between computations
  static_assert(SPLIT % TILE == 0 && TILE % DEPTH == 0 && ROWS % L == 0);
  using Tiles = KVTileReader<KV, TILE, L>;
  using Tile = Tiles::Tile;

  void attend_tile(int64_t tile, const Tile& found) {
    if constexpr (SCALED) read_scales(found);
    if constexpr (Products::FEW > 0)
      if (kv_.rows.count <= Products::FEW) return attend_few(tile, found);
    transpose_keys(found.k, found.seen.end - tile);
    pair_values(found.v, found.seen.end - tile);
    const bool finite = kv_.all_see(found.seen) || finite_values(found);
    for (int64_t first = 0; first < kv_.rows.count; first += L) {
      const Range seen = seen_in(first, tile);
      if (seen.empty()) continue;
      products_.template multiply_keys<N>(q_ + first * chunks_ * DEPTH, k_, chunks_, count_at(first), s_,
                                          tiles_.queue());
      softmax(first, tile);
      if (finite)
        multiply_values(first, seen.end - tile);
      else
        multiply_seen_values(first, tile, seen.end - tile, found.v);
    }
  }

  // Computes a tile like attend_tile, without rearranging its values and keys beforehand.
  void attend_few(int64_t tile, const Tile& found) {
    products_.multiply_stored_keys(q_, found.k, k_dim_, kv_.rows.count, s_, tiles_.queue());
    softmax(0, tile);
    if (kv_.all_see(found.seen) || finite_values(found))
      products_.multiply_stored_values(p_, found.v, v_dim_, width_, kv_.rows.count, values_, tiles_.queue());
    else
      multiply_seen_values(0, tile, found.seen.end - tile, found.v);
  }

  void read_scales(const Tile& found) {
    for (int64_t j = 0; j < TILE; ++j) {
      k_scales_[j] = scale_of(found.k[j], k_dim_);
      v_scales_[j] = scale_of(found.v[j], v_dim_);
    }
  }

  // Returns whether the numbers that are multiplied by the weights of a tile are finite. int8 numbers are, and the
  // weights of keys that are not seen are not multiplied by scales.
  bool finite_values(const Tile& found) const {
    if constexpr (SCALED) return true;
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    __mmask32 broken = 0;
    for (const KV* value : found.v)
      for (int64_t c = 0; c * DEPTH < v_dim_; ++c)
        broken |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(numbers(value, c, v_dim_), exponent), exponent);
    return broken == 0;
  }

  // Adds the weighted values like multiply_values, but query row by query row, with zeros in place of values that the
  // row does not see: their weight is 0, but 0 times NaN is NaN.
  void multiply_seen_values(int64_t first, int64_t tile, int64_t end, const KV* const* values) {
    alignas(64) static constexpr uint16_t ZEROS[MAX_DIM] = {};
    float* const sums = values_ + first * width_;
    const std::vector<float> before(sums, sums + L * width_);
    std::vector<float> after = before;
    for (int64_t r = 0; r < count_at(first); ++r) {
      const SeenBy seen_by = kv_.mask.seen_by(position_[first + r]);
      const KV* seen[TILE];
      for (int64_t j = 0; j < TILE; ++j)
        seen[j] = seen_by.has(tile + j) ? values[j] : reinterpret_cast<const KV*>(ZEROS);
      pair_values(seen, end);
      std::copy(before.begin(), before.end(), sums);
      multiply_values(first, end);
      std::copy_n(sums + r * width_, width_, after.begin() + r * width_);
    }
    std::copy(after.begin(), after.end(), sums);
  }

  // Adds to the sums of the 16 query rows from `first` on their weights times the values of the tile's first `end`
  // keys.
  void multiply_values(int64_t first, int64_t end) {
    products_.multiply_values(p_, v_, (end + DEPTH - 1) / DEPTH, width_, count_at(first), values_ + first * width_,
                              tiles_.queue());
  }

  int64_t count_at(int64_t first) const { return std::min(L, kv_.rows.count - first); }

  int64_t oldest(int64_t first) const { return position_[first]; }
  int64_t newest(int64_t first) const { return position_[first + count_at(first) - 1]; }

  // Returns the smallest range of positions in a tile of keys that contains all those seen by the 16 query rows from
  // `first` on.
  Range seen_in(int64_t first, int64_t tile) const {
    return kv_.mask.seen(oldest(first), newest(first), {tile, tile + TILE});
  }

  // Returns whether each of the 16 query rows from `first` on sees every key of the tile.
  bool all_see(int64_t first, int64_t tile) const {
    return kv_.mask.all_see(oldest(first), newest(first), {tile, tile + TILE});
  }

  // Transposes the keys of a tile into blocks, [TILE / 16][chunks][16 pairs of numbers][16 keys][2].
  void transpose_keys(const KV* const* keys, int64_t end) {
    for (int64_t j = 0; j < end; j += L)
      for (int64_t c = 0; c < chunks_; ++c) {
        transpose_chunk(keys + j, c, k_dim_, k_ + (j / L * chunks_ + c) * SIZE);
        tiles_.queue().fetch(2 * PORTION);
      }
  }

  // Arranges values by pairs of keys, [TILE / 32][width / 16][16 pairs of keys][16 numbers][2]; of 32 numbers, the even
  // ones come first. Fills whole blocks, as values beyond the last key are multiplied, too: by weights of 0.
  void pair_values(const KV* const* values, int64_t end) {
    const int64_t columns = width_ / L;
    for (int64_t j = 0; j < end; j += DEPTH)
      for (int64_t c = 0; c < columns / 2; ++c) {
        Number* const to = v_ + (j / DEPTH * columns + 2 * c) * SIZE;
        for (int64_t i = 0; i < L; ++i) {
          const auto [even, odd] = pair_chunk(values[j + 2 * i], values[j + 2 * i + 1], c, v_dim_);
          _mm512_store_si512(to + i * DEPTH, even);
          _mm512_store_si512(to + SIZE + i * DEPTH, odd);
          tiles_.queue().fetch(1);
        }
      }
  }

  // Turns the scores of 16 query rows into softmax weights [TILE / 32][16 rows][32 keys], relative to the highest score
  // of each row so far.
  void softmax(int64_t first, int64_t tile) {
    const bool whole = all_see(first, tile);
    for (int64_t i = 0; i < count_at(first); ++i) {
      const int64_t r = first + i;
      tiles_.queue().fetch(PORTION);
      Raw x[N];
      unroll<N>([&](auto j) { x[j] = _mm512_load_ps(s_ + i * TILE + j * L); });
      if constexpr (SCALED) unroll<N>([&](auto j) { x[j] = _mm512_mul_ps(x[j], _mm512_load_ps(k_scales_ + j * L)); });
      scale(x);
      __mmask16 seen[N];
      unroll<N>([&](auto j) { seen[j] = 0xFFFF; });
      if (!whole) mask(r, tile, x, seen);
      __m512 highest = x[0];
      unroll<N>([&](auto j) { highest = _mm512_max_ps(highest, x[j]); });
      if (_mm512_cmp_ps_mask(highest, _mm512_set1_ps(top_[r] + SLACK), _CMP_GT_OQ))
        raise(r, _mm512_reduce_max_ps(highest));
      const __m512 top = _mm512_set1_ps(top_[r]);
      unroll<N>([&](auto j) { x[j] = exp2(_mm512_sub_ps(x[j], top)); });
      const __m512 sum = store_weights(x, seen, p_ + i * DEPTH, _mm512_load_ps(weights_ + r * L));
      _mm512_store_ps(weights_ + r * L, sum);
    }
  }

  // Stores the weights of a row, 32 keys in each of N / 2 blocks, rounded to bfloat16; first multiplied by the scales
  // of values if these are int8: of those that are `seen`, as others may be NaN. Returns `sum` plus the weights without
  // scales.
  inline __attribute__((always_inline)) __m512 store_weights(Raw (&x)[N], const __mmask16 (&seen)[N], Number* to,
                                                             __m512 sum) const {
    if constexpr (SCALED)
      unroll<N>([&](auto j) {
        sum = _mm512_add_ps(sum, x[j]);
        x[j] = _mm512_maskz_mul_ps(seen[j], x[j], _mm512_load_ps(v_scales_ + j * L));
      });
    const __m512bh one = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3F803F80));
    unroll<N / 2>([&](auto j) {
      const __m512bh weights = _mm512_cvtne2ps_pbh(x[2 * j + 1], x[2 * j]);
      if constexpr (!SCALED) sum = _mm512_dpbf16_ps(sum, weights, one);
      _mm512_store_si512(to + j * SIZE, reinterpret_cast<__m512i>(weights));
    });
    return sum;
  }

  // Multiplies scores by the layer's scale (with softcap, if it has one) and by log2(e), as weights are powers of 2.
  void scale(Raw (&x)[N]) const {
    constexpr float LOG2E = 1.44269504f;
    if (scores_.softcap == 0.f) {
      const __m512 scale = _mm512_set1_ps(scores_.scale * LOG2E);
      unroll<N>([&](auto j) { x[j] = _mm512_mul_ps(x[j], scale); });
    } else {
      const Vec inner(scores_.scale / scores_.softcap), outer(scores_.softcap * LOG2E);
      unroll<N>([&](auto j) { x[j] = (Vec(x[j]) * inner).tanh() * outer; });
    }
  }

  // Masks (sets to -infinity) the scores of keys that query row r does not see, and sets which ones it sees.
  void mask(int64_t r, int64_t tile, Raw (&x)[N], __mmask16 (&seen)[N]) const {
    const SeenBy seen_by = kv_.mask.seen_by(position_[r]);
    unroll<N>([&](auto j) {
      seen[j] = part_of(seen_by.latest, tile + j * L) | part_of(seen_by.sinks, tile + j * L);
      x[j] = _mm512_mask_blend_ps(seen[j], _mm512_set1_ps(MASKED_SCORE), x[j]);
    });
  }

  // Returns a mask of the 16 positions from `at` on: which of them are within `range`.
  static __mmask16 part_of(Range range, int64_t at) {
    const auto before = [at](int64_t position) { return (1 << std::clamp<int64_t>(position - at, 0, L)) - 1; };
    return range.empty() ? 0 : static_cast<__mmask16>(before(range.end) & ~before(range.begin));
  }

  // Makes the sums of query row r relative to `higher`, a new highest score.
  void raise(int64_t r, float higher) {
    const __m512 factor = exp2(_mm512_set1_ps(top_[r] - higher));
    top_[r] = higher;
    _mm512_store_ps(weights_ + r * L, _mm512_mul_ps(_mm512_load_ps(weights_ + r * L), factor));
    for (float* v = values_ + r * width_; v < values_ + (r + 1) * width_; v += L)
      _mm512_store_ps(v, _mm512_mul_ps(_mm512_load_ps(v), factor));
  }

  // Adds the sums of query row r over one split to `sums`. Puts the numbers of values, of which pair_values separated
  // the even ones from the odd ones, back in order.
  void merge(int64_t r, OnlineSoftmax<ROWS>& sums) {
    constexpr float LN2 = 0.693147181f;
    const float total = _mm512_reduce_add_ps(_mm512_load_ps(weights_ + r * L));
    if (top_[r] == NO_SCORE && total == 0.f) return;  // skips a row that saw no key, unless its total is NaN
    float* values = values_ + r * width_;
    for (int64_t d = 0; d < width_; d += DEPTH) {
      const auto [low, high] = interleave(load(values + d), load(values + d + L));
      low.store(values + d);
      high.store(values + d + L);
    }
    sums.merge(r, top_[r] * LN2, total, values, width_);
  }

  const Products products_{};
  const KVView<KV> kv_;
  const Scores scores_;
  const int64_t k_dim_, v_dim_, width_;  // width_: numbers in a row of value sums, with padding
  const int64_t chunks_;                 // number of chunks of 32 numbers in a key
  Tiles tiles_;
  // [rows / 16][chunks][16 rows][32]; rows after the last one are not initialised
  alignas(64) Number q_[ROWS * MAX_DIM];
  alignas(64) Number k_[TILE * MAX_DIM];
  alignas(64) Number v_[TILE * MAX_DIM];
  alignas(64) Number p_[L * TILE];                     // weights of 16 rows
  alignas(64) float s_[L * TILE];                      // and scores
  alignas(64) float k_scales_[TILE], v_scales_[TILE];  // of int8 vectors
  alignas(64) float values_[ROWS * MAX_DIM];
  alignas(64) float weights_[ROWS * L];  // sums of the weights so far, one per vector lane, for each row
  float top_[ROWS];                      // of scores times log2(e)
  int64_t position_[ROWS];
};

}  // namespace kvmux

#endif
