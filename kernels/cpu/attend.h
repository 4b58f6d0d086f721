// Attention over stored keys and values: exact softmax attention (Vaswani et al. 2017), scores never kept beyond a tile
// (Milakov & Gimelshein 2018; Dao et al. 2022), long texts split over threads (Flash-Decoding, Dao et al. 2023).
//
// Some query rows of one KV head, those of a group (GQA) included, go over the keys together, so that every key is read
// once for all of them. Keys come in tiles of TILE positions, counted from 0, and tiles in splits of SPLIT positions.
// Each split is summed by itself, and the sums are merged in order. So the result depends on positions alone: not on
// where keys lie, on other sequences, on threads, or on how a text was cut into steps. Knows neither tensors nor threads.
#pragma once

#include <cmath>
#include <limits>

#include "matmul.h"
#include "slots.h"

namespace kvmux {

constexpr int64_t TILE = 32;      // positions
constexpr int64_t SPLIT = 1024;   // positions
constexpr int64_t MAX_ROWS = 48;  // query rows that go together
constexpr int64_t MAX_DIM = 256;  // of a head
constexpr int64_t PORTION = 8;    // lines of the cache that are fetched at once
static_assert(SPLIT % TILE == 0 && TILE % W == 0 && Soon::STEPS >= MAX_DIM && Soon::STEPS >= TILE);

constexpr float HIDDEN = -std::numeric_limits<float>::infinity();  // a score's weight is then 0
constexpr float NOTHING = std::numeric_limits<float>::lowest();    // the top of no scores

// Weighted values so far of some query rows: sum of exp(score - top) * value, and of exp(score - top).
struct Sums {
  float top[MAX_ROWS];
  float total[MAX_ROWS];
  alignas(64) float values[MAX_ROWS * MAX_DIM];

  void clear(int64_t rows, int64_t width) {
    std::fill_n(top, rows, NOTHING);
    std::fill_n(total, rows, 0.f);
    std::fill_n(values, rows * width, 0.f);
  }

  // What was summed under an older top, moved to a higher one.
  float raise(int64_t r, float higher, int64_t width) {
    const float factor = std::exp(top[r] - higher);
    top[r] = higher;
    if (factor != 1.f) {
      total[r] *= factor;
      for (int64_t d = 0; d < width; d += W) (load(values + r * width + d) * Vec(factor)).store(values + r * width + d);
    }
    return factor;
  }

  void merge(int64_t r, float other_top, float other_total, const float* other, int64_t width) {
    if (other_top == NOTHING) return;
    if (other_top > top[r]) raise(r, other_top, width);
    const float factor = std::exp(other_top - top[r]);
    total[r] += factor * other_total;
    float* mine = values + r * width;
    for (int64_t d = 0; d < width; d += W) at::vec::fmadd(Vec(factor), load(other + d), load(mine + d)).store(mine + d);
  }
};

struct Scores {
  float scale, softcap;  // softcap 0: none
};

// Query rows of one KV head, counted from `first` over the heads of its group (GQA) and then over queries.
struct QueryRows {
  int64_t start;  // position of the text's query 0
  int64_t first, count, group;

  int64_t query(int64_t r) const { return (first + r) / group; }  // of the step's
  int64_t head(int64_t r) const { return (first + r) % group; }   // of the group's
  int64_t position(int64_t r) const { return start + query(r); }
};

// Scratch memory of one thread, and what is done in it.
template <typename T>
class Head {
 public:
  Head(Plane<T> k, Plane<T> v, Sight sight, Scores scores, QueryRows rows)
      : k_(k), v_(v), sight_(sight), scores_(scores), rows_(rows), width_(padded(v.dim)),
        oldest_(rows.position(0)), newest_(rows.position(rows.count - 1)) {
    if (v.dim != width_) std::fill_n(v_tile_, TILE * width_, 0.f);  // columns behind v.dim are multiplied, too
  }

  float* query(int64_t r) { return q_ + r * PITCH; }

  // Splits [begin, end) into `sums`.
  void attend(int64_t begin, int64_t end, Sums& sums) {
    sums.clear(rows_.count, width_);
    find(begin * SPLIT, next_);
    for (int64_t split = begin; split < end; ++split) {
      split_.clear(rows_.count, width_);
      std::fill_n(weights_, rows_.count * W, 0.f);
      for (int64_t tile = split * SPLIT; tile < (split + 1) * SPLIT && tile <= newest_; tile += TILE) {
        std::swap(tile_, next_);
        soon_.clear();
        if (tile + TILE < end * SPLIT) want(find(tile + TILE, next_));
        if (!tile_.seen.empty()) attend_tile(tile);
      }
      for (int64_t r = 0; r < rows_.count; ++r) {
        split_.total[r] = sum(load(weights_ + r * W));
        sums.merge(r, split_.top[r], split_.total[r], split_.values + r * width_, width_);
      }
    }
  }

 private:
  // Keys and values of TILE positions. `seen` spans all that any row sees; what lies between the sinks and the window
  // is read with it, and hidden.
  struct Tile {
    Range seen;
    const T *k[TILE], *v[TILE];
  };

  Range seen_in(int64_t tile) const {
    const Range parts[] = {
        {std::max(tile, sight_.sinks_of(oldest_).begin), std::min(tile + TILE, sight_.sinks_of(newest_).end)},
        {std::max(tile, sight_.latest(oldest_).begin), std::min(tile + TILE, newest_ + 1)}};
    Range all{tile + TILE, tile};
    for (const Range& part : parts)
      if (!part.empty()) all = {std::min(all.begin, part.begin), std::max(all.end, part.end)};
    return all;
  }

  // Where the keys and values of a tile lie. Outside `seen` nothing is read: a key that is seen stands for it.
  const Tile& find(int64_t tile, Tile& found) const {
    const Range seen = found.seen = seen_in(tile);
    for (int64_t p = seen.begin, n; p < seen.end; p += n) {
      n = k_.layout.run(p, seen.end);
      const T *k = k_.at(p), *v = v_.at(p);
      for (int64_t i = 0; i < n; ++i) {
        found.k[p - tile + i] = k + i * k_.vector_stride;
        found.v[p - tile + i] = v + i * v_.vector_stride;
      }
    }
    if (seen.empty()) return found;
    std::fill_n(found.k, seen.begin - tile, found.k[seen.begin - tile]);
    std::fill(found.k + (seen.end - tile), found.k + TILE, found.k[seen.begin - tile]);
    return found;
  }

  // To be fetched while the tile before it is computed.
  void want(const Tile& tile) {
    for (int64_t p = tile.seen.begin, n; p < tile.seen.end; p += n) {
      n = k_.layout.run(p, tile.seen.end);
      soon_.add(tile.k[p % TILE], n * k_.vector_stride * sizeof(T));
      soon_.add(tile.v[p % TILE], n * v_.vector_stride * sizeof(T));
    }
  }

  void attend_tile(int64_t tile) {
    turn_keys();
    const auto key = [this](int64_t d) { return k_tile_ + d * TILE; };
    std::fill_n(p_, rows_.count * TILE, 0.f);
    multiply_add<PITCH>(rows_.count, q_, key, p_, TILE, TILE, k_.dim, soon_);
    if (scores_.softcap != 0.f) cap(p_, rows_.count * TILE);
    if (!seen_whole(tile))
      for (int64_t r = 0; r < rows_.count; ++r) hide(r, tile);
    for (int64_t r = 0; r < rows_.count; ++r) softmax(r);
    const int64_t skip = tile_.seen.begin - tile;
    // Values are multiplied where they lie, unless they are int8, are read often, or end within a vector.
    if constexpr (!std::is_same_v<T, int8_t>)
      if (rows_.count <= ROWS && v_.dim == width_)
        return add_values(skip, [v = tile_.v + skip](int64_t j) { return v[j]; });
    const int64_t end = tile_.seen.end - tile;
    for (int64_t j = skip; j < end; ++j) read_vector(tile_.v[j], v_tile_ + j * width_, v_.dim);
    add_values(skip, [this, skip](int64_t j) { return v_tile_ + (skip + j) * width_; });
  }

  template <typename Value>
  void add_values(int64_t skip, const Value& value) {
    const int64_t n = tile_.seen.end - tile_.seen.begin;
    multiply_add<TILE>(rows_.count, p_ + skip, value, split_.values, width_, width_, n, soon_);
  }

  // Keys become columns.
  void turn_keys() {
    for (int64_t j = 0; j < TILE; j += W) {
      if constexpr (std::is_same_v<T, int8_t>) {
        const float* rows[W];
        for (int64_t i = 0; i < W; ++i) {
          read_vector(tile_.k[j + i], k_rows_ + i * k_.dim, k_.dim);
          rows[i] = k_rows_ + i * k_.dim;
        }
        transpose_rows(rows, k_.dim, k_tile_ + j, TILE, [this] { soon_.fetch(PORTION); });
      } else {
        transpose_rows(tile_.k + j, k_.dim, k_tile_ + j, TILE, [this] { soon_.fetch(PORTION); });
      }
    }
  }

  // Whether every row sees all of the tile.
  bool seen_whole(int64_t tile) const { return sight_.latest(newest_).begin <= tile && tile + TILE <= oldest_ + 1; }

  // Scores of row r become weights under the row's top so far.
  void softmax(int64_t r) {
    soon_.fetch(PORTION);
    float* p = p_ + r * TILE;
    Vec highest = load(p);
    for (int64_t j = W; j < TILE; j += W) highest = at::vec::clamp_min(load(p + j), highest);
    if ((highest > Vec(split_.top[r])).zero_mask() != (1 << W) - 1) raise(r, highest);  // some lane is higher
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

  // Nothing but what the row sees keeps its score.
  void hide(int64_t r, int64_t tile) {
    const int64_t query = rows_.position(r);
    const Range latest = sight_.latest(query), kept = sight_.sinks_of(query);
    for (int64_t j = 0; j < TILE; ++j)
      if (!latest.has(tile + j) && !kept.has(tile + j)) p_[r * TILE + j] = HIDDEN;
  }

  Plane<T> k_, v_;
  Sight sight_;
  Scores scores_;
  QueryRows rows_;
  int64_t width_;  // of a row of values: their dimension, padded to whole vectors
  int64_t oldest_, newest_;  // positions of the first query and the last
  static constexpr int PITCH = MAX_DIM + W;  // of queries: not a power of two, which would have them share cache lines
  Soon soon_;
  Tile tile_, next_;
  alignas(64) float q_[MAX_ROWS * PITCH];
  alignas(64) float k_tile_[MAX_DIM * TILE];
  alignas(64) float v_tile_[TILE * MAX_DIM];
  alignas(64) float k_rows_[W * MAX_DIM];
  alignas(64) float p_[MAX_ROWS * TILE];  // scores, then weights
  alignas(64) float weights_[MAX_ROWS * W];  // their sums so far, lane by lane
  Sums split_;
};

}  // namespace kvmux
