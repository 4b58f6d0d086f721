// Draws a token from the logits of a row, without sorting the vocabulary. Knows neither tensors nor threads.
//
// Top-k and top-p keep all tokens above some weight, and the first of those that have exactly that weight. That weight
// is found by bisection over the bits of a float: one pass over the row per step, until few candidates are left to
// sort.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "vector.h"

namespace kvmux {

constexpr int64_t NO_TOKEN = -1;   // where the logits are not finite
constexpr int64_t STRETCH = 1024;  // weights that are summed in float32; these sums are added in float64
constexpr int64_t FEW_LEFT = 256;  // candidates that are sorted
constexpr float COLDEST = 1e-30f;  // the lowest temperature that float32 can divide by

// A row of the parameters of `Ops.sample`.
struct SamplingParams {
  double temperature, top_k, top_p, min_p, noise;
};

// Returns the largest of n numbers; NaN if one of them is NaN.
template <typename T>
float largest(const T* x, int64_t n) {
  constexpr int LANES = 4;  // independent chains, as each step of one waits for the step before
  constexpr float LEAST = -std::numeric_limits<float>::infinity();
  Raw tops[LANES];
  unroll<LANES>([&](auto v) { tops[v] = Vec(LEAST); });
  int64_t i = 0;
  for (; i + LANES * W <= n; i += LANES * W)
    unroll<LANES>([&](auto v) { tops[v] = at::vec::maximum(Vec(tops[v]), load(x + i + v * W)); });
  Vec top(LEAST);
  unroll<LANES>([&](auto v) { top = at::vec::maximum(top, Vec(tops[v])); });
  float found = reduce(top, [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); });
  for (; i < n; ++i) {
    const float number = static_cast<float>(x[i]);
    if (number > found || std::isnan(number)) found = number;
    if (std::isnan(found)) return found;
  }
  return found;
}

// Returns whether one of the next W numbers is at least `least`.
template <typename T>
inline bool any_from(const T* x, float least) {
  return (load(x) >= Vec(least)).zero_mask() != (1 << W) - 1;
}

// Returns the index of the first of n numbers that equals `number`; one of them must.
template <typename T>
int64_t first_of(const T* x, int64_t n, float number) {
  int64_t i = 0;
  while (i + W <= n && !any_from(x + i, number)) i += W;
  while (static_cast<float>(x[i]) != number) ++i;
  return i;
}

// Tokens that can be drawn, in the order of the vocabulary.
class Candidates {
 public:
  // Begins with all n tokens, with the weights exp((logit - top) / temperature), which are at most 1.
  template <typename T>
  Candidates(const T* logits, int64_t n, float top, double temperature)
      : weights_(new float[n]), tokens_(new int32_t[n]), n_(n) {
    const float factor = 1.f / std::max(static_cast<float>(temperature), COLDEST);
    int64_t i = 0;
    for (; i + W <= n; i += W) ((load(logits + i) - Vec(top)) * Vec(factor)).exp().store(&weights_[i]);
    for (; i < n; ++i) weights_[i] = std::exp((static_cast<float>(logits[i]) - top) * factor);
    for (i = 0; i < n; ++i) tokens_[i] = static_cast<int32_t>(i);
  }

  // Keeps the tokens with at least this weight (min-p: Nguyen et al. 2024).
  void keep_from(float least) {
    int64_t kept = 0;
    for (int64_t begin = 0; begin < n_; begin += W) {
      if (begin + W <= n_ && !any_from(&weights_[begin], least)) continue;
      for (int64_t i = begin; i < std::min(begin + W, n_); ++i) {
        const float weight = weights_[i];
        weights_[kept] = weight;
        tokens_[kept] = tokens_[i];
        kept += weight >= least;
      }
    }
    n_ = kept;
  }

  // Keeps the k tokens with the largest weights.
  void keep_top_k(double k) {
    if (k < static_cast<double>(n_)) narrow(k, [](const Part& part) { return static_cast<double>(part.count); });
  }

  // Keeps the fewest tokens that have this share of all weight, at least one (Holtzman et al. 2020).
  void keep_top_p(double share) {
    narrow(share * from(0.f).weight, [](const Part& part) { return part.weight; });
  }

  // Returns the token in whose interval of the cumulative weights the noise, in [0, 1), lies.
  int64_t at(double noise) const {
    const double place = noise * from(0.f).weight;
    double before = 0;
    int64_t begin = 0;
    for (; begin + STRETCH < n_; begin += STRETCH) {
      const double after = before + stretch(begin, begin + STRETCH, 0.f).weight;
      if (after > place) break;
      before = after;
    }
    int64_t chosen = begin;  // the last token with a weight, in case sums are rounded differently
    for (int64_t i = begin; i < std::min(begin + STRETCH, n_) && before <= place; ++i) {
      if (weights_[i] == 0) continue;
      chosen = i;
      before += weights_[i];
    }
    return tokens_[chosen];
  }

 private:
  // The number of some candidates, and the sum of their weights.
  struct Part {
    double weight = 0;
    int64_t count = 0;
  };

  // Returns the candidates begin .. end - 1 with at least this weight.
  Part stretch(int64_t begin, int64_t end, float least) const {
    const Vec bound(least), one(1.f);
    Vec weight(0.f), count(0.f);
    int64_t i = begin;
    for (; i + W <= end; i += W) {
      const Vec weights = load(&weights_[i]), there = weights >= bound;
      weight = weight + (there & weights);
      count = count + (there & one);
    }
    Part part{sum(weight), static_cast<int64_t>(sum(count))};
    for (; i < end; ++i) {
      if (weights_[i] < least) continue;
      part.weight += weights_[i];
      ++part.count;
    }
    return part;
  }

  // Returns all candidates with at least this weight.
  Part from(float least) const {
    Part all;
    for (int64_t begin = 0; begin < n_; begin += STRETCH) {
      const Part part = stretch(begin, std::min(begin + STRETCH, n_), least);
      all.weight += part.weight;
      all.count += part.count;
    }
    return all;
  }

  // Keeps candidates in the order of their weights, of equal ones the first, while those kept before measure less than
  // `limit` together.
  template <typename Measure>
  void narrow(double limit, const Measure& measure) {
    // Weights from `high` on are kept, those below `low` are not.
    uint32_t low = 0, high = std::bit_cast<uint32_t>(1.f) + 1;
    Part from_low = from(0.f), from_high;
    if (measure(from_low) < limit) return;
    while (high - low > 1 && from_low.count - from_high.count > FEW_LEFT) {
      const uint32_t middle = low + (high - low) / 2;
      const Part part = from(std::bit_cast<float>(middle));
      (measure(part) < limit ? high : low) = middle;
      (measure(part) < limit ? from_high : from_low) = part;
    }
    drop_last(std::bit_cast<float>(low), std::bit_cast<float>(high), [&](const std::vector<int32_t>& doubtful) {
      double before = measure(from_high);
      size_t kept = 0;
      for (; kept < doubtful.size() && before < limit; ++kept) before += measure({weights_[doubtful[kept]], 1});
      return kept;
    });
  }

  // Of the candidates with weights in [least, surely), keeps the heaviest, as many as keeps() returns; drops all below.
  template <typename Keeps>
  void drop_last(float least, float surely, const Keeps& keeps) {
    std::vector<int32_t> doubtful;
    for (int64_t begin = 0; begin < n_; begin += W) {
      if (begin + W <= n_ && !any_from(&weights_[begin], least)) continue;
      for (int64_t i = begin; i < std::min(begin + W, n_); ++i)
        if ((weights_[i] >= least) & (weights_[i] < surely)) doubtful.push_back(static_cast<int32_t>(i));
    }
    std::stable_sort(doubtful.begin(), doubtful.end(), [&](int32_t a, int32_t b) { return weights_[a] > weights_[b]; });
    for (size_t i = keeps(doubtful); i < doubtful.size(); ++i) weights_[doubtful[i]] = 0;
    keep_from(least);
  }

  std::unique_ptr<float[]> weights_;   // [n]
  std::unique_ptr<int32_t[]> tokens_;  // [n]
  int64_t n_;
};

// Returns the token drawn from logits [n]; the first of the largest if the temperature is 0.
template <typename T>
int64_t sample_row(const T* logits, int64_t n, const SamplingParams& params) {
  const float top = largest(logits, n);
  if (!std::isfinite(top)) return NO_TOKEN;
  if (params.temperature <= 0) return first_of(logits, n, top);
  Candidates candidates(logits, n, top, params.temperature);
  if (params.min_p > 0) candidates.keep_from(static_cast<float>(params.min_p));
  if (params.top_k > 0) candidates.keep_top_k(params.top_k);
  if (params.top_p < 1) candidates.keep_top_p(params.top_p);
  return candidates.at(params.noise);
}

}  // namespace kvmux
