// Vectors of 16 scores in AVX-512: their scale, which keys a query sees, their softmax weights, and the sums of these.
// Weights are powers of 2. Does not know how products are computed.
#pragma once

#ifdef CPU_CAPABILITY_AVX512

#include "online_softmax.h"
#include "slots.h"

namespace kvmux {

constexpr int64_t LANES = 16;  // scores of a vector

// Returns 2^x with a relative error of 3e-6; 0 for minus infinity.
inline __m512 exp2(__m512 x) {
  constexpr int FLOOR = 0x09;
  const __m512 part = _mm512_reduce_ps(x, FLOOR);
  __m512 power = _mm512_set1_ps(1.353417e-2f);
  for (const float factor : {5.201146e-2f, 2.4144275e-1f, 6.9300384e-1f, 1.00000259f})
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(power, x);
}

// Multiplies scores by the layer's scale (with softcap, if it has one), by `factor`, and by log2(e), as weights are
// powers of 2.
template <int N>
inline void scale_scores(Raw (&x)[N], const Scores& scores, float factor = 1.f) {
  constexpr float LOG2E = 1.44269504f;
  if (scores.softcap == 0.f) {
    const __m512 scale = _mm512_set1_ps(scores.scale * LOG2E * factor);
    unroll<N>([&](auto j) { x[j] = _mm512_mul_ps(x[j], scale); });
  } else {
    const Vec inner(scores.scale / scores.softcap * factor), outer(scores.softcap * LOG2E);
    unroll<N>([&](auto j) { x[j] = (Vec(x[j]) * inner).tanh() * outer; });
  }
}

// Returns a mask of the 16 positions from `at` on: which of them are within `range`.
inline __mmask16 part_of(Range range, int64_t at) {
  const auto before = [at](int64_t position) { return (1 << std::clamp<int64_t>(position - at, 0, LANES)) - 1; };
  return range.empty() ? 0 : static_cast<__mmask16>(before(range.end) & ~before(range.begin));
}

// Masks (sets to -infinity) those of the scores of the keys from position `at` on that a query does not see.
template <int N>
inline void mask_scores(const SeenBy& seen_by, int64_t at, Raw (&x)[N]) {
  unroll<N>([&](auto j) {
    const __mmask16 seen = part_of(seen_by.latest, at + j * LANES) | part_of(seen_by.sinks, at + j * LANES);
    x[j] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(MASKED_SCORE), x[j]);
  });
}

// Sums of softmax attention over the keys of one split, for up to ROWS query rows, while they are computed: those of
// OnlineSoftmax, but scores are times log2(e), and each vector lane sums the weights of its own keys.
template <int64_t ROWS>
struct SplitSums {
  // The most by which a score may exceed the one to which its row's sums are relative: weights are at most 2^8.
  static constexpr float SLACK = 8.f;

  float top[ROWS];
  alignas(64) float totals[ROWS * LANES];
  alignas(64) float values[ROWS * MAX_DIM];

  void clear(int64_t rows, int64_t width) {
    std::fill_n(top, rows, NO_SCORE);
    std::fill_n(totals, rows * LANES, 0.f);
    std::fill_n(values, rows * width, 0.f);
  }

  // Turns scores of query row r into weights relative to its top, which is raised first if one exceeds it by SLACK.
  template <int N>
  void weigh(int64_t r, Raw (&x)[N], int64_t width) {
    __m512 highest = x[0];
    unroll<N>([&](auto j) { highest = _mm512_max_ps(highest, x[j]); });
    if (_mm512_cmp_ps_mask(highest, _mm512_set1_ps(top[r] + SLACK), _CMP_GT_OQ))
      raise(r, _mm512_reduce_max_ps(highest), width);
    const __m512 all = _mm512_set1_ps(top[r]);
    unroll<N>([&](auto j) { x[j] = exp2(_mm512_sub_ps(x[j], all)); });
  }

  // Adds the sums of query row r to `sums`; restore_order(values) is called before, with those of the row.
  template <typename RestoreOrder>
  void merge_into(OnlineSoftmax<ROWS>& sums, int64_t r, int64_t width, const RestoreOrder& restore_order) {
    constexpr float LN2 = 0.693147181f;
    const float total = _mm512_reduce_add_ps(_mm512_load_ps(totals + r * LANES));
    if (top[r] == NO_SCORE && total == 0.f) return;  // skips a row that saw no key, unless its total is NaN
    restore_order(values + r * width);
    sums.merge(r, top[r] * LN2, total, values + r * width, width);
  }

 private:
  // Makes the sums of query row r relative to `higher`, a new highest score.
  void raise(int64_t r, float higher, int64_t width) {
    const __m512 factor = exp2(_mm512_set1_ps(top[r] - higher));
    top[r] = higher;
    const auto multiply = [factor](float* x) { _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), factor)); };
    multiply(totals + r * LANES);
    for (int64_t d = 0; d < width; d += LANES) multiply(values + r * width + d);
  }
};

}  // namespace kvmux

#endif
