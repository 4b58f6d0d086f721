// The attention of attend.h for bfloat16 on tile registers: scores and weighted values are products of tiles, which sum
// in float32; between them, weights are rounded to bfloat16, and so are counted in the sum that divides them.
//
// All rows go one way, whatever the step: a tile of keys and one of values are brought into the order that products want
// once for all query rows that go together. What a row computes depends on its position alone: other rows of a product
// do not touch it, and keys that it does not see add zeros.
#pragma once

#ifdef __AMX_BF16__

#include "keys.h"
#include "sums.h"
#include "tiles.h"

namespace kvmux {

// 2 to the power of x, to 3e-6 of it; 0 of minus infinity.
inline __m512 exp2(__m512 x) {
  constexpr int FLOOR = 0x09;
  const __m512 part = _mm512_reduce_ps(x, FLOOR);
  __m512 power = _mm512_set1_ps(1.353417e-2f);
  for (const float factor : {5.201146e-2f, 2.4144275e-1f, 6.9300384e-1f, 1.00000259f})
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(power, x);
}

class TiledHead {
 public:
  using Kept = at::BFloat16;
  static constexpr int64_t ROWS = 128;  // query rows that go together
  static constexpr int64_t padded(int64_t dim) { return (dim + PAIRS - 1) / PAIRS * PAIRS; }

  TiledHead(Plane<Kept> k, Plane<Kept> v, Sight sight, Scores scores, QueryRows rows)
      : sight_(sight), scores_(scores), rows_(rows), k_dim_(k.dim), v_dim_(v.dim), width_(padded(v.dim)),
        chunks_(padded(k.dim) / PAIRS), newest_(rows.position(rows.count - 1)),
        keys_(k, v, sight, rows.position(0), newest_) {}

  // Query row r of k's dimension.
  void take(int64_t r, const Kept* query) {
    for (int64_t c = 0; c < chunks_; ++c)
      _mm512_store_si512(q_ + ((r / L * chunks_ + c) * L + r % L) * PAIRS, numbers(query, c, k_dim_));
  }

  // Splits [begin, end) into `sums`.
  void attend(int64_t begin, int64_t end, Sums<ROWS>& sums) {
    const Tiles tiles;
    sums.clear(rows_.count, width_);
    keys_.begin(begin * SPLIT);
    for (int64_t split = begin; split < end; ++split) {
      std::fill_n(top_, rows_.count, NOTHING);
      std::fill_n(weights_, rows_.count * L, 0.f);
      std::fill_n(values_, rows_.count * width_, 0.f);
      for (int64_t tile = split * SPLIT; tile < (split + 1) * SPLIT && tile <= newest_; tile += TILE) {
        const auto& found = keys_.step(tile + TILE, end * SPLIT, soon_);
        if (!found.seen.empty()) attend_tile(tile, found);
      }
      for (int64_t r = 0; r < rows_.count; ++r) merge(r, sums);
    }
  }

 private:
  static constexpr int64_t L = TILE_ROWS;    // rows of a tile register, and numbers of float32 in one
  static constexpr int64_t PAIRS = 2 * L;    // numbers of bfloat16 in a row
  static constexpr int64_t SIZE = L * PAIRS; // and in all of it
  static constexpr int64_t TILE = 64;        // positions
  static constexpr int64_t PORTION = 8;      // lines of the cache that are fetched at once
  static_assert(SPLIT % TILE == 0 && TILE % (4 * L) == 0 && ROWS % L == 0);

  // Numbers of a vector of `dim`, 32 of them from 32 c on; behind the last, zeros.
  static __m512i numbers(const Kept* vector, int64_t c, int64_t dim) {
    const int64_t n = std::min(PAIRS, dim - c * PAIRS);
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((int64_t{1} << n) - 1), vector + c * PAIRS);
  }

  void attend_tile(int64_t tile, const Keys<Kept, TILE>::Tile& found) {
    const int64_t end = found.seen.end - tile;
    turn_keys(found.k, end);
    pair_values(found.v, end);
    for (int64_t first = 0; first < rows_.count; first += L) {
      const int64_t count = std::min(L, rows_.count - first);
      const int64_t oldest = rows_.position(first), newest = rows_.position(first + count - 1);
      const Range seen = sight_.seen(oldest, newest, {tile, tile + TILE});
      if (seen.empty()) continue;
      multiply_keys(first);
      const bool whole = sight_.latest(newest).begin <= tile && tile + TILE <= oldest + 1;
      for (int64_t r = 0; r < count; ++r) softmax(first + r, tile, whole);
      for (int64_t column = 0; column < width_; column += 2 * PAIRS)
        if (column + PAIRS < width_) multiply_values<4>(first, column, seen.end - tile);
        else multiply_values<2>(first, column, seen.end - tile);
    }
  }

  // Keys become columns of tiles, [TILE / 16][chunks][16 pairs of numbers][16 keys][2].
  void turn_keys(const Kept* const* keys, int64_t end) {
    for (int64_t j = 0; j < end; j += L)
      for (int64_t c = 0; c < chunks_; ++c) {
        Raw block[L];
        unroll<L>([&](auto i) { block[i] = reinterpret_cast<Raw>(numbers(keys[j + i], c, k_dim_)); });
        transpose(block);
        Kept* to = k_ + (j / L * chunks_ + c) * SIZE;
        unroll<L>([&](auto i) { Vec(block[i]).store(to + i * PAIRS); });
        soon_.fetch(PORTION);
      }
  }

  // Values go in pairs of keys, [TILE / 32][width / 16][16 pairs of keys][16 numbers][2]; of 32 numbers, the even ones
  // come first. Whole tiles: weights of 0 are multiplied, too.
  void pair_values(const Kept* const* values, int64_t end) {
    constexpr __mmask32 ODD = 0xAAAAAAAA;
    for (int64_t j = 0; j < (end + PAIRS - 1) / PAIRS * PAIRS; j += 2) {
      for (int64_t c = 0; c < width_ / PAIRS; ++c) {
        const __m512i first = numbers(values[j], c, v_dim_), second = numbers(values[j + 1], c, v_dim_);
        Kept* to = v_ + (j / PAIRS * width_ / L + 2 * c) * SIZE + j % PAIRS * L;
        _mm512_store_si512(to, _mm512_mask_blend_epi16(ODD, first, _mm512_slli_epi32(second, 16)));
        _mm512_store_si512(to + SIZE, _mm512_mask_blend_epi16(ODD, _mm512_srli_epi32(first, 16), second));
      }
      soon_.fetch(PORTION);
    }
  }

  // Scores of 16 query rows, [TILE / 16][16 rows][16 keys].
  void multiply_keys(int64_t first) {
    for (int64_t j = 0; j < TILE / L; j += 4) {
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
      const Kept *q = q_ + first * chunks_ * PAIRS, *k = k_ + j * chunks_ * SIZE;
      for (int64_t c = 0; c < chunks_; ++c, q += SIZE, k += SIZE) {
        tile_load<4>(q, TILE_BYTES);
        tile_load<5>(k, TILE_BYTES);
        tile_dot<0, 4, 5>();
        tile_load<6>(k + chunks_ * SIZE, TILE_BYTES);
        tile_dot<1, 4, 6>();
        tile_load<5>(k + 2 * chunks_ * SIZE, TILE_BYTES);
        tile_dot<2, 4, 5>();
        tile_load<6>(k + 3 * chunks_ * SIZE, TILE_BYTES);
        tile_dot<3, 4, 6>();
      }
      tile_store<0>(s_ + j * L * L, TILE_BYTES);
      tile_store<1>(s_ + (j + 1) * L * L, TILE_BYTES);
      tile_store<2>(s_ + (j + 2) * L * L, TILE_BYTES);
      tile_store<3>(s_ + (j + 3) * L * L, TILE_BYTES);
    }
  }

  // Weights of 16 query rows times the values of positions before `end`: N tiles of 16 columns.
  template <int N>
  void multiply_values(int64_t first, int64_t column, int64_t end) {
    float* to = values_ + first * width_ + column;
    const int64_t stride = width_ * sizeof(float);
    tile_load<0>(to, stride);
    tile_load<1>(to + L, stride);
    if constexpr (N == 4) tile_load<2>(to + 2 * L, stride);
    if constexpr (N == 4) tile_load<3>(to + 3 * L, stride);
    for (int64_t j = 0; j < end; j += PAIRS) {
      const Kept* v = v_ + (j / PAIRS * width_ + column) / L * SIZE;
      tile_load<4>(p_ + j * L, TILE_BYTES);
      tile_load<5>(v, TILE_BYTES);
      tile_dot<0, 4, 5>();
      tile_load<6>(v + SIZE, TILE_BYTES);
      tile_dot<1, 4, 6>();
      if constexpr (N == 4) {
        tile_load<5>(v + 2 * SIZE, TILE_BYTES);
        tile_dot<2, 4, 5>();
        tile_load<6>(v + 3 * SIZE, TILE_BYTES);
        tile_dot<3, 4, 6>();
      }
    }
    tile_store<0>(to, stride);
    tile_store<1>(to + L, stride);
    if constexpr (N == 4) tile_store<2>(to + 2 * L, stride);
    if constexpr (N == 4) tile_store<3>(to + 3 * L, stride);
  }

  // Scores of row r become weights, [TILE / 32][16 rows][32 keys], under the row's top so far.
  void softmax(int64_t r, int64_t tile, bool whole) {
    soon_.fetch(PORTION);
    constexpr int N = TILE / L;
    constexpr float LOG2E = 1.44269504f;
    const float* s = s_ + r % L * L;
    __m512 x[N];
    unroll<N>([&](auto j) { x[j] = _mm512_load_ps(s + j * L * L); });
    if (scores_.softcap == 0.f) {
      const __m512 scale = _mm512_set1_ps(scores_.scale * LOG2E);
      unroll<N>([&](auto j) { x[j] = _mm512_mul_ps(x[j], scale); });
    } else {
      const Vec most(scores_.softcap), inner(scores_.scale / scores_.softcap), outer(scores_.softcap * LOG2E);
      unroll<N>([&](auto j) { x[j] = (Vec(x[j]) * inner).tanh() * outer; });
    }
    if (!whole) {
      const int64_t query = rows_.position(r);
      const Range latest = sight_.latest(query), kept = sight_.sinks_of(query);
      unroll<N>([&](auto j) {
        const __mmask16 seen = part_of(latest, tile + j * L) | part_of(kept, tile + j * L);
        x[j] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(HIDDEN), x[j]);
      });
    }
    __m512 highest = x[0];
    unroll<N>([&](auto j) { highest = _mm512_max_ps(highest, x[j]); });
    if (_mm512_cmp_ps_mask(highest, _mm512_set1_ps(top_[r]), _CMP_GT_OQ)) raise(r, _mm512_reduce_max_ps(highest));
    const __m512 top = _mm512_set1_ps(top_[r]);
    unroll<N>([&](auto j) { x[j] = exp2(_mm512_sub_ps(x[j], top)); });
    __m512 sum = _mm512_load_ps(weights_ + r * L);
    const __m512bh one = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3F803F80));
    unroll<N / 2>([&](auto j) {
      const __m512bh weights = _mm512_cvtne2ps_pbh(x[2 * j + 1], x[2 * j]);
      sum = _mm512_dpbf16_ps(sum, weights, one);
      _mm512_store_si512(p_ + j * SIZE + r % L * PAIRS, reinterpret_cast<__m512i>(weights));
    });
    _mm512_store_ps(weights_ + r * L, sum);
  }

  // Which of the 16 positions from `at` on are within a range.
  static __mmask16 part_of(Range range, int64_t at) {
    const auto before = [at](int64_t position) { return (1 << std::clamp<int64_t>(position - at, 0, L)) - 1; };
    return range.empty() ? 0 : static_cast<__mmask16>(before(range.end) & ~before(range.begin));
  }

  // What row r summed under an older top, moved to a higher one.
  void raise(int64_t r, float higher) {
    const __m512 factor = exp2(_mm512_set1_ps(top_[r] - higher));
    top_[r] = higher;
    _mm512_store_ps(weights_ + r * L, _mm512_mul_ps(_mm512_load_ps(weights_ + r * L), factor));
    for (float* v = values_ + r * width_; v < values_ + (r + 1) * width_; v += L)
      _mm512_store_ps(v, _mm512_mul_ps(_mm512_load_ps(v), factor));
  }

  // A split's sums of row r, its values in order again.
  void merge(int64_t r, Sums<ROWS>& sums) {
    constexpr float LN2 = 0.693147181f;
    if (top_[r] == NOTHING) return;
    float* values = values_ + r * width_;
    for (int64_t d = 0; d < width_; d += PAIRS) {
      const auto [low, high] = interleave(load(values + d), load(values + d + L));
      low.store(values + d);
      high.store(values + d + L);
    }
    sums.merge(r, top_[r] * LN2, _mm512_reduce_add_ps(_mm512_load_ps(weights_ + r * L)), values, width_);
  }

  Sight sight_;
  Scores scores_;
  QueryRows rows_;
  int64_t k_dim_, v_dim_, width_;  // width_: of a row of values, padded
  int64_t chunks_;                 // of 32 numbers of a key
  int64_t newest_;                 // position of the last query
  Keys<Kept, TILE> keys_;
  Soon soon_;
  alignas(64) Kept q_[ROWS * MAX_DIM];  // [rows / 16][chunks][16 rows][32]; rows behind the last are anything
  alignas(64) Kept k_[TILE * MAX_DIM];
  alignas(64) Kept v_[TILE * MAX_DIM];
  alignas(64) Kept p_[L * TILE];   // weights of 16 rows
  alignas(64) float s_[L * TILE];  // and scores
  alignas(64) float values_[ROWS * MAX_DIM];
  alignas(64) float weights_[ROWS * L];  // their sums so far, lane by lane
  float top_[ROWS];                // of scores times log2(e)
};

}  // namespace kvmux

#endif
