// Attention over stored keys and values: exact softmax attention (Vaswani et al. 2017), scores never kept beyond a tile
// (Milakov & Gimelshein 2018; Dao et al. 2022), long sequences split over threads (Flash-Decoding, Dao et al. 2023).
//
// Query rows of one KV head, the heads of its group (GQA) included, go over the keys together, so that every key is
// read once for all of them. Keys are taken in tiles of TILE positions, counted from 0, and tiles in splits of SPLIT
// positions. Each split is summed independently, and the sums are merged in order. So the result depends on positions
// alone: not on where keys lie, on other sequences, on threads, or on how a prompt was cut into steps. Knows neither
// tensors nor threads.
#pragma once

#include "kv_formats.h"
#include "kv_tiles.h"
#include "matmul.h"
#include "online_softmax.h"

namespace kvmux {

// Computes attention for the query rows of one head, in scratch memory of one thread. Keys and values may be in any
// formats: what depends on one is chosen once for a tile.
class AttentionHead {
 public:
  static constexpr int64_t ROWS = 48;  // query rows that are computed together

  // Returns the float32 numbers in a row of value sums: the values' dimension, padded to whole vectors.
  static constexpr int64_t padded(int64_t dim) { return padded_to_vectors(dim); }

  AttentionHead(const KVView& kv, Scores scores)
      : kv_(kv), scores_(scores), width_(padded(kv.v.dim)), tiles_(kv_), fetches_(count_fetches_of_tile()) {
    // The padding columns of the tile of values are multiplied, too, so they must not be NaN.
    if (kv.v.dim != width_) std::fill_n(v_tile_, TILE * width_, 0.f);
  }

  // Stores `query` [k.dim], times the scale of scores, as query row number r; rotated if keys are.
  template <typename Q>
  void set_query(int64_t r, const Q* query) {
    float* to = q_ + r * PITCH;
    to_float(query, to, kv_.k.dim);
    if (kv_.k.rotated) rotate(to, kv_.k.dim);
    for (int64_t d = 0; d < kv_.k.dim; ++d) to[d] *= scores_.scale;
  }

  // Sets the keys and values that this thread reads afterwards, from split number `split` on.
  void set_next(const KVView& kv, int64_t split) { tiles_.set_next(kv, split * SPLIT); }

  // Computes attention over those of the splits begin .. end - 1 that are seen, and writes its sums to `sums`.
  void attend(int64_t begin, int64_t end, OnlineSoftmax<ROWS>& sums) {
    sums.clear(kv_.rows.count, width_);
    for (int64_t split = begin; split < end; split = kv_.next_seen((split + 1) * SPLIT) / SPLIT) {
      tiles_.start(split * SPLIT, end * SPLIT);
      split_.clear(kv_.rows.count, width_);
      std::fill_n(weights_, kv_.rows.count * W, 0.f);
      for (int64_t tile = split * SPLIT; tile < (split + 1) * SPLIT && tile <= kv_.newest; tile += TILE) {
        const Tile& found = tiles_.read(tile);
        tiles_.queue().spread(fetches_);
        if (!found.seen.empty()) attend_tile(tile, found);
      }
      for (int64_t r = 0; r < kv_.rows.count; ++r) {
        split_.total[r] = sum(load(weights_ + r * W));
        sums.merge(r, split_.top[r], split_.total[r], split_.values + r * width_, width_);
      }
    }
  }

 private:
  static constexpr int64_t TILE = 32;  // positions
  static constexpr int64_t FEW = 8;    // query rows for which it is not worth converting values beforehand
  static_assert(SPLIT % TILE == 0 && TILE % W == 0);
  using Tiles = KVTileReader<TILE, ROWS>;
  using Tile = Tiles::Tile;

  // Returns how many adjacent numbers of a key are moved as one when keys are transposed; see vector.h.
  int64_t numbers_moved() const {
    switch (kv_.k.format) {
      case at::kBFloat16: return 2;
      case at::kChar: return 4;
      case at::kByte: return 8;
      default: return 1;
    }
  }

  // Returns about how many times queue().fetch() is called while a tile is computed.
  int64_t count_fetches_of_tile() const {
    const int64_t rows = kv_.rows.count, transposing = TILE / W * kv_.k.dim / (W * numbers_moved());
    return transposing + count_fetches(rows, TILE, kv_.k.dim) + rows + count_fetches(rows, width_, TILE);
  }

  void attend_tile(int64_t tile, const Tile& found) {
    transpose_keys(found.k);
    const auto key = [this](int64_t d) { return k_tile_ + d * TILE; };
    std::fill_n(p_, kv_.rows.count * TILE, 0.f);
    multiply_add<PITCH>(kv_.rows.count, q_, key, p_, TILE, TILE, kv_.k.dim, tiles_.queue());
    if (scores_.softcap != 0.f) cap(p_, kv_.rows.count * TILE);
    if (!kv_.all_see({tile, tile + TILE}))
      for (int64_t r = 0; r < kv_.rows.count; ++r) mask(r, tile);
    for (int64_t r = 0; r < kv_.rows.count; ++r) softmax(r);
    with_kv_type(kv_.v.format, [&](auto of_v) { attend_values<decltype(of_v)>(tile, found); });
  }

  // Adds the weighted values of a tile.
  template <typename V>
  void attend_values(int64_t tile, const Tile& found) {
    const int64_t skip = found.seen.begin - tile, n = found.seen.end - found.seen.begin;
    const bool alike = kv_.all_see(found.seen);
    // Values are multiplied where they are stored, unless they are quantized, are read for many rows, or end within a
    // vector; those are converted to float32 in scratch memory first.
    if constexpr (!std::is_same_v<V, int8_t> && !std::is_same_v<V, Int4>)
      if (alike && kv_.rows.count <= FEW && kv_.v.dim == width_)
        return add_values(skip, n, [v = found.v + skip](int64_t j) { return reinterpret_cast<const V*>(v[j]); });
    for (int64_t j = 0; j < n; ++j) read_vector<V>(found.v[skip + j], v_tile_ + j * width_, kv_.v.dim);
    if (!alike && !finite(n)) return add_seen_values(found.seen, skip);
    add_values(skip, n, [this](int64_t j) { return v_tile_ + j * width_; });
  }

  // Returns whether the first n values, converted to float32, are finite.
  bool finite(int64_t n) const {
    Vec nothing(0.f);  // stays 0 if all numbers are finite: a NaN or infinity times 0 is NaN
    for (int64_t i = 0; i < n * width_; i += W) nothing = at::vec::fmadd(load(v_tile_ + i), Vec(0.f), nothing);
    return sum(nothing) == 0.f;
  }

  // Adds the weighted values query row by query row, with zeros in place of values that the row does not see: their
  // weight is 0, but 0 times NaN is NaN.
  void add_seen_values(Range seen, int64_t skip) {
    alignas(64) static constexpr float ZEROS[MAX_DIM] = {};
    for (int64_t r = 0; r < kv_.rows.count; ++r) {
      const SeenBy seen_by = kv_.mask.seen_by(kv_.rows.position(r));
      const auto value = [&](int64_t j) { return seen_by.has(seen.begin + j) ? v_tile_ + j * width_ : ZEROS; };
      multiply_add<TILE>(1, p_ + r * TILE + skip, value, split_.values + r * width_, width_, width_,
                         seen.end - seen.begin, tiles_.queue());
    }
  }

  template <typename Value>
  void add_values(int64_t skip, int64_t n, const Value& value) {
    multiply_add<TILE>(kv_.rows.count, p_ + skip, value, split_.values, width_, width_, n, tiles_.queue());
  }

  // Transposes the keys of a tile to float32, so that each key becomes a column.
  void transpose_keys(const char* const* keys) {
    with_kv_type(kv_.k.format, [&](auto of_k) {
      for (int64_t j = 0; j < TILE; j += W)
        read_transposed<decltype(of_k)>(keys + j, kv_.k.dim, k_tile_ + j, TILE, [this] { tiles_.queue().fetch(); });
    });
  }

  // Turns the scores of query row r into softmax weights relative to the highest score of the row so far.
  void softmax(int64_t r) {
    tiles_.queue().fetch();
    float* p = p_ + r * TILE;
    Vec highest = load(p);
    for (int64_t j = W; j < TILE; j += W) highest = at::vec::clamp_min(load(p + j), highest);
    // Rescales the sums only if a new score exceeds the row's highest so far.
    if ((highest > Vec(split_.top[r])).zero_mask() != (1 << W) - 1) raise(r, highest);
    const Vec top(split_.top[r]);
    Vec weights = load(weights_ + r * W);
    for (int64_t j = 0; j < TILE; j += W) {
      const Vec weight = (load(p + j) - top).exp_u20();
      weight.store(p + j);
      weights = weights + weight;
    }
    weights.store(weights_ + r * W);
  }

  void raise(int64_t r, Vec highest) {
    const float top = reduce(highest, [](const Vec& a, const Vec& b) { return at::vec::clamp_min(a, b); });
    const float factor = split_.raise(r, top, width_);
    (load(weights_ + r * W) * Vec(factor)).store(weights_ + r * W);
  }

  void cap(float* p, int64_t n) const {
    const Vec most(scores_.softcap);
    for (int64_t j = 0; j < n; j += W) ((load(p + j) / most).tanh() * most).store(p + j);
  }

  // Masks (sets to -infinity) the scores of keys that query row r does not see.
  void mask(int64_t r, int64_t tile) {
    const SeenBy seen = kv_.mask.seen_by(kv_.rows.position(r));
    for (int64_t j = 0; j < TILE; ++j)
      if (!seen.has(tile + j)) p_[r * TILE + j] = MASKED_SCORE;
  }

  const KVView kv_;
  const Scores scores_;
  const int64_t width_;  // numbers of a row of values: their dimension, padded to whole vectors
  Tiles tiles_;
  // Numbers from one query to the next: not a power of two, as queries would then compete for the same cache sets.
  static constexpr int PITCH = MAX_DIM + W;
  const int64_t fetches_;  // calls of queue().fetch() while a tile is computed
  alignas(64) float q_[ROWS * PITCH];
  alignas(64) float k_tile_[MAX_DIM * TILE];
  alignas(64) float v_tile_[TILE * MAX_DIM];
  alignas(64) float p_[ROWS * TILE];     // scores, then weights
  alignas(64) float weights_[ROWS * W];  // sums of the weights so far, one per vector lane, for each row
  OnlineSoftmax<ROWS> split_;
};

}  // namespace kvmux
