// Vectors of 16 scores in AVX-512: their scale, which keys a query sees, and powers of 2. Knows neither keys nor sums.
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

// Masks (sets to -infinity) those of the scores of the keys from position `at` on that a query does not see, and sets
// which ones it sees.
template <int N>
inline void mask_scores(const SeenBy& seen_by, int64_t at, Raw (&x)[N], __mmask16 (&seen)[N]) {
  unroll<N>([&](auto j) {
    seen[j] = part_of(seen_by.latest, at + j * LANES) | part_of(seen_by.sinks, at + j * LANES);
    x[j] = _mm512_mask_blend_ps(seen[j], _mm512_set1_ps(MASKED_SCORE), x[j]);
  });
}

}  // namespace kvmux

#endif
