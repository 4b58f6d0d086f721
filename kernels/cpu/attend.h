// Attention over stored keys and values: exact softmax attention (Vaswani et al. 2017), scores never kept beyond a tile
// (Milakov & Gimelshein 2018; Dao et al. 2022), long texts split over threads (Flash-Decoding, Dao et al. 2023).
//
// Some query rows of one KV head, those of a group (GQA) included, go over the keys together, so that every key is read
// once for all of them. Keys come in tiles of TILE positions, counted from 0, and tiles in splits of SPLIT positions.
// Each split is summed by itself, and the sums are merged in order. So the result depends on positions alone: not on
// where keys lie, on other sequences, on threads, or on how a text was cut into steps.
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
constexpr int64_t LINE = 64;      // bytes of the cache
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

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
    const float factor = top[r] == NOTHING ? 0.f : std::exp(top[r] - higher);
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

// Query rows of one KV head: row r is query r / group of the text, head r % group of the KV head's group.
struct QueryRows {
  int64_t start;  // position of the text's query 0
  int64_t first, count, group;

  int64_t position(int64_t r) const { return start + (first + r) / group; }
};

// Scratch memory of one thread, and what is done in it.
template <typename T>
class Head {
 public:
  Head(Plane<T> k, Plane<T> v, Sight sight, Scores scores, QueryRows rows)
      : k_(k), v_(v), sight_(sight), scores_(scores), rows_(rows), width_(padded(v.dim)) {
    std::fill_n(k_tile_, k.dim * TILE, 0.f);
    std::fill_n(v_tile_, TILE * width_, 0.f);
  }

  float* query(int64_t r) { return q_ + r * k_.dim; }
  int64_t width() const { return width_; }

  // Splits [begin, end) into `sums`.
  void attend(int64_t begin, int64_t end, Sums& sums) {
    sums.clear(rows_.count, width_);
    for (int64_t split = begin; split < end; ++split) {
      split_.clear(rows_.count, width_);
      for (int64_t tile = split * SPLIT; tile < (split + 1) * SPLIT; tile += TILE) {
        const Range seen = seen_in(tile), next = seen_in(tile + TILE);
        if (seen.empty()) continue;
        load_tile(tile, seen);
        if (!next.empty() && tile + TILE < end * SPLIT) prefetch(next);
        attend_tile(tile, seen);
      }
      for (int64_t r = 0; r < rows_.count; ++r)
        sums.merge(r, split_.top[r], split_.total[r], split_.values + r * width_, width_);
    }
  }

 private:
  // Positions of a tile between the first and the last that any row sees.
  Range seen_in(int64_t tile) const {
    const int64_t oldest = rows_.position(0), newest = rows_.position(rows_.count - 1);
    const Range parts[] = {
        {std::max(tile, sight_.first(oldest).begin), std::min(tile + TILE, sight_.first(newest).end)},
        {std::max(tile, sight_.latest(oldest).begin), std::min(tile + TILE, newest + 1)}};
    Range all{tile + TILE, tile};
    for (const Range& part : parts)
      if (!part.empty()) all = {std::min(all.begin, part.begin), std::max(all.end, part.end)};
    return all;
  }

  void attend_tile(int64_t tile, Range seen) {
    std::fill_n(p_, rows_.count * TILE, 0.f);
    multiply_add(rows_.count, TILE, k_.dim, q_, k_.dim, k_tile_, TILE, p_, TILE);
    for (int64_t r = 0; r < rows_.count; ++r) softmax(r, tile, seen);
    const int64_t skip = seen.begin - tile, n = seen.end - seen.begin;
    multiply_add(rows_.count, width_, n, p_ + skip, TILE, v_tile_ + skip * width_, width_, split_.values, width_);
  }

  // Keys as columns, values as rows, float32.
  void load_tile(int64_t tile, Range seen) {
    for (int64_t p = seen.begin, n; p < seen.end; p += n) {
      n = k_.layout.run(p, seen.end);
      const T* k = k_.at(p);
      const T* v = v_.at(p);
      load_columns(k, n, k_tile_ + p - tile);
      for (int64_t i = 0; i < n; ++i) read_vector(v + i * v_.vector_stride, v_tile_ + (p - tile + i) * width_, v_.dim);
    }
  }

  // The next tile comes from memory while this one is computed.
  void prefetch(Range seen) const {
    for (int64_t p = seen.begin, n; p < seen.end; p += n) {
      n = k_.layout.run(p, seen.end);
      for (const Plane<T>* plane : {&k_, &v_}) {
        const char* lines = reinterpret_cast<const char*>(plane->at(p));
        const int64_t bytes = n * plane->vector_stride * static_cast<int64_t>(sizeof(T));
        for (int64_t b = 0; b < bytes; b += LINE) __builtin_prefetch(lines + b, 0, 3);
      }
    }
  }

  void load_columns(const T* k, int64_t n, float* to) {
    if constexpr (std::is_same_v<T, int8_t>) {
      for (int64_t i = 0; i < n; i += W) {
        const int64_t few = std::min(W, n - i);
        for (int64_t j = 0; j < few; ++j) read_vector(k + (i + j) * k_.vector_stride, k_rows_ + j * k_.dim, k_.dim);
        transpose(k_rows_, k_.dim, to + i, TILE, few, k_.dim);
      }
    } else {
      transpose(k, k_.vector_stride, to, TILE, n, k_.dim);
    }
  }

  // Scores of row r become weights under the row's top so far.
  void softmax(int64_t r, int64_t tile, Range seen) {
    float* p = p_ + r * TILE;
    if (scores_.softcap != 0.f) {
      const Vec cap(scores_.softcap);
      for (int64_t j = 0; j < TILE; j += W) ((load(p + j) / cap).tanh() * cap).store(p + j);
    }
    hide(r, tile, p);
    Vec highest(NOTHING);
    for (int64_t j = 0; j < TILE; j += W) highest = at::vec::maximum(highest, load(p + j));
    const float top = std::max(split_.top[r], reduce(highest, [](const Vec& a, const Vec& b) { return maximum(a, b); }));
    if (top == NOTHING) {
      std::fill_n(p, TILE, 0.f);
      return;
    }
    if (top > split_.top[r]) split_.raise(r, top, width_);
    Vec sum(0.f);
    for (int64_t j = 0; j < TILE; j += W) {
      const Vec weight = (load(p + j) - Vec(top)).exp();
      weight.store(p + j);
      sum = sum + weight;
    }
    split_.total[r] += reduce(sum, [](const Vec& a, const Vec& b) { return a + b; });
  }

  // Nothing but what the row sees keeps its score.
  void hide(int64_t r, int64_t tile, float* p) const {
    const int64_t query = rows_.position(r);
    const Range latest = sight_.latest(query), first = sight_.first(query);
    if (latest.begin <= tile && tile + TILE <= latest.end) return;
    for (int64_t j = 0; j < TILE; ++j) {
      const int64_t position = tile + j;
      const bool seen = (position >= latest.begin && position < latest.end) ||
                        (position >= first.begin && position < first.end);
      if (!seen) p[j] = NOTHING;
    }
  }

  Plane<T> k_, v_;
  Sight sight_;
  Scores scores_;
  QueryRows rows_;
  int64_t width_;  // of a row of values: their dimension, padded to whole vectors
  alignas(64) float q_[MAX_ROWS * MAX_DIM];
  alignas(64) float k_tile_[MAX_DIM * TILE];
  alignas(64) float v_tile_[TILE * MAX_DIM];
  alignas(64) float k_rows_[W * MAX_DIM];
  alignas(64) float p_[MAX_ROWS * TILE];  // scores, then weights
  Sums split_;
};

}  // namespace kvmux
