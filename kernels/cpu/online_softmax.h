// The sums of softmax attention over the keys of a sequence, or of a split of it, and how splits are merged. A sequence
// is cut into splits of SPLIT positions, which are summed independently and merged in order. Knows neither keys nor
// queries.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector.h"

namespace kvmux {

constexpr int64_t SPLIT = 1024;   // positions
constexpr int64_t MAX_DIM = 256;  // of a head

constexpr float MASKED_SCORE = -std::numeric_limits<float>::infinity();  // the score of a masked key: its weight is 0
constexpr float NO_SCORE = std::numeric_limits<float>::lowest();         // the maximum score while no key has been seen

struct Scores {
  float scale, softcap;  // softcap 0: none
};

// Sums so far of softmax attention, for up to ROWS query rows: `values` of exp(score - top) * value, and `total` of
// exp(score - top).
template <int64_t ROWS>
struct OnlineSoftmax {
  // Returns how many numbers the sums of one row take where they are stored: its top, its total, its values [width].
  static constexpr int64_t stored_size(int64_t width) { return 2 + width; }

  float top[ROWS];
  float total[ROWS];
  alignas(64) float values[ROWS * MAX_DIM];

  void clear(int64_t rows, int64_t width) {
    std::fill_n(top, rows, NO_SCORE);
    std::fill_n(total, rows, 0.f);
    std::fill_n(values, rows * width, 0.f);
  }

  // Makes the sums of query row r relative to `higher`, a new highest score; returns the factor by which they were
  // multiplied.
  float raise(int64_t r, float higher, int64_t width) {
    const float factor = std::exp(top[r] - higher);
    top[r] = higher;
    if (factor != 1.f) {
      total[r] *= factor;
      for (int64_t d = 0; d < width; d += W) (load(values + r * width + d) * Vec(factor)).store(values + r * width + d);
    }
    return factor;
  }

  // Adds sums over other keys to those of query row r.
  void merge(int64_t r, float other_top, float other_total, const float* other, int64_t width) {
    if (other_top == NO_SCORE && other_total == 0.f) return;  // skips sums over no key, unless their total is NaN
    if (top[r] == NO_SCORE && total[r] == 0.f) {
      top[r] = other_top;
      total[r] = other_total;
      std::copy_n(other, width, values + r * width);
      return;
    }
    if (other_top > top[r]) raise(r, other_top, width);
    const float factor = std::exp(other_top - top[r]);
    total[r] += factor * other_total;
    float* mine = values + r * width;
    for (int64_t d = 0; d < width; d += W) at::vec::fmadd(Vec(factor), load(other + d), load(mine + d)).store(mine + d);
  }

  void merge_stored(int64_t r, const float* from, int64_t width) { merge(r, from[0], from[1], from + 2, width); }

  void store(int64_t r, float* to, int64_t width) const {
    to[0] = top[r];
    to[1] = total[r];
    std::copy_n(values + r * width, width, to + 2);
  }
};

}  // namespace kvmux
