// The attention of attend.h for queries, keys and values in bfloat16: scores and weighted values are products of
// bfloat16 numbers, summed in float32. Weights are rounded to bfloat16 for the second product, and rounded in the sum
// that normalises them, too.
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
#include "score_vectors.h"

namespace kvmux {

template <typename Products>
class Bf16AttentionHead : Bf16Blocks {
 public:
  static constexpr int64_t ROWS = 128;  // query rows that are computed together
  static constexpr int64_t padded(int64_t dim) { return (dim + DEPTH - 1) / DEPTH * DEPTH; }

  Bf16AttentionHead(const KVView& kv, Scores scores)
      : kv_(kv), scores_(scores), k_dim_(kv.k.dim), v_dim_(kv.v.dim), width_(padded(v_dim_)),
        chunks_(padded(k_dim_) / DEPTH), tiles_(kv_) {
    for (int64_t r = 0; r < kv.rows.count; ++r) position_[r] = kv.rows.position(r);
  }

  // Stores `query` [k.dim] as query row number r, in the layout of blocks (Bf16Blocks).
  void set_query(int64_t r, const Number* query) {
    for (int64_t c = 0; c < chunks_; ++c)
      _mm512_store_si512(q_ + ((r / L * chunks_ + c) * L + r % L) * DEPTH,
                         numbers(reinterpret_cast<const char*>(query), c, k_dim_));
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
        if (!found.seen.empty()) attend_tile(tile, found);
      }
      for (int64_t r = 0; r < kv_.rows.count; ++r)
        split_.merge_into(sums, r, width_, [this](float* values) { restore_order(values); });
    }
  }

 private:
  static constexpr int64_t TILE = Products::TILE;  // positions
  static constexpr int64_t N = TILE / L;
  static constexpr int64_t PORTION = 8;  // cache lines prefetched in one go between computations
  static_assert(SPLIT % TILE == 0 && TILE % DEPTH == 0 && ROWS % L == 0);
  using Tiles = KVTileReader<TILE, L>;
  using Tile = Tiles::Tile;

  void attend_tile(int64_t tile, const Tile& found) {
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
    if (!kv_.all_see(found.seen) && !finite_values(found))
      return multiply_seen_values(0, tile, found.seen.end - tile, found.v);
    products_.multiply_stored_values(p_, found.v, v_dim_, width_, kv_.rows.count, split_.values, tiles_.queue());
  }

  // Returns whether the values of a tile are finite.
  bool finite_values(const Tile& found) const {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    __mmask32 broken = 0;
    for (const char* value : found.v)
      for (int64_t c = 0; c * DEPTH < v_dim_; ++c) {
        const __m512i bits = numbers(value, c, v_dim_);
        broken |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent);
      }
    return broken == 0;
  }

  // Adds the weighted values like multiply_values, but query row by query row, with zeros in place of values that the
  // row does not see: their weight is 0, but 0 times NaN is NaN.
  void multiply_seen_values(int64_t first, int64_t tile, int64_t end, const char* const* values) {
    alignas(64) static constexpr uint16_t ZEROS[MAX_DIM] = {};
    float* const sums = split_.values + first * width_;
    const std::vector<float> before(sums, sums + L * width_);
    std::vector<float> after = before;
    for (int64_t r = 0; r < count_at(first); ++r) {
      const SeenBy seen_by = kv_.mask.seen_by(position_[first + r]);
      const char* seen[TILE];
      for (int64_t j = 0; j < TILE; ++j)
        seen[j] = seen_by.has(tile + j) ? values[j] : reinterpret_cast<const char*>(ZEROS);
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
    products_.multiply_values(p_, v_, (end + DEPTH - 1) / DEPTH, width_, count_at(first),
                              split_.values + first * width_, tiles_.queue());
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
  void transpose_keys(const char* const* keys, int64_t end) {
    for (int64_t j = 0; j < end; j += L)
      for (int64_t c = 0; c < chunks_; ++c) {
        transpose_chunk(keys + j, c, k_dim_, k_ + (j / L * chunks_ + c) * SIZE);
        tiles_.queue().fetch(2 * PORTION);
      }
  }

  // Arranges values by pairs of keys, [TILE / 32][width / 16][16 pairs of keys][16 numbers][2]; of 32 numbers, the even
  // ones come first. Fills whole blocks, as values beyond the last key are multiplied, too: by weights of 0.
  void pair_values(const char* const* values, int64_t end) {
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
      scale_scores(x, scores_);
      if (!whole) mask_scores(kv_.mask.seen_by(position_[r]), tile, x);
      split_.weigh(r, x, width_);
      float* const totals = split_.totals + r * L;
      _mm512_store_ps(totals, store_weights(x, p_ + i * DEPTH, _mm512_load_ps(totals)));
    }
  }

  // Stores the weights of a row, 32 keys in each of N / 2 blocks, rounded to bfloat16. Returns `sum` plus the weights.
  inline __attribute__((always_inline)) __m512 store_weights(const Raw (&x)[N], Number* to, __m512 sum) const {
    const __m512bh one = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3F803F80));
    unroll<N / 2>([&](auto j) {
      const __m512bh weights = _mm512_cvtne2ps_pbh(x[2 * j + 1], x[2 * j]);
      sum = _mm512_dpbf16_ps(sum, weights, one);
      _mm512_store_si512(to + j * SIZE, reinterpret_cast<__m512i>(weights));
    });
    return sum;
  }

  // Puts the numbers of a row's sums, of which pair_values separated the even ones from the odd ones, back in order.
  void restore_order(float* values) const {
    for (int64_t d = 0; d < width_; d += DEPTH) {
      const auto [low, high] = interleave(load(values + d), load(values + d + L));
      low.store(values + d);
      high.store(values + d + L);
    }
  }

  const Products products_{};
  const KVView kv_;
  const Scores scores_;
  const int64_t k_dim_, v_dim_, width_;  // width_: numbers in a row of value sums, with padding
  const int64_t chunks_;                 // number of chunks of 32 numbers in a key
  Tiles tiles_;
  // [rows / 16][chunks][16 rows][32]; rows after the last one are not initialised
  alignas(64) Number q_[ROWS * MAX_DIM];
  alignas(64) Number k_[TILE * MAX_DIM];
  alignas(64) Number v_[TILE * MAX_DIM];
  alignas(64) Number p_[L * TILE];  // weights of 16 rows
  alignas(64) float s_[L * TILE];   // and scores
  SplitSums<ROWS> split_;
  int64_t position_[ROWS];
};

}  // namespace kvmux

#endif
