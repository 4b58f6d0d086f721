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

constexpr int64_t NO_TOKEN = -1;   // returned for a row of logits that is not finite
constexpr int64_t STRETCH = 1024;  // number of weights summed in float32; their sums are added in float64
constexpr int64_t FEW_LEFT = 256;  // candidates that are sorted
constexpr float COLDEST = 1e-30f;  // the lowest temperature that float32 can divide by

// The sampling parameters of one row of logits, as in `kernels.sampling.SamplingRow`.
struct SamplingParams {
  double temperature, top_k, top_p, min_p, noise;
};

// Returns the largest of n numbers; NaN if one of them is NaN.
template <typename T>
float largest(const T* x, int64_t n) {
  constexpr int LANES = 4;  // vectors compared independently, as each comparison waits for the one before in its chain
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

// Returns whether at least one of the W numbers at x is `least` or more.
template <typename T>
inline bool any_from(const T* x, float least) {
  return (load(x) >= Vec(least)).zero_mask() != (1 << W) - 1;
}

// Returns the index of the first of n numbers that equals `number`; at least one of them must.
template <typename T>
int64_t first_of(const T* x, int64_t n, float number) {
  int64_t i = 0;
  while (i + W <= n && !any_from(x + i, number)) i += W;
  while (static_cast<float>(x[i]) != number) ++i;
  return i;
}

// The tokens that can still be drawn, in the order of the vocabulary, and their weights.
class Candidates {
 public:
  // Starts with all n tokens and their weights exp((logit - top) / temperature), which are at most 1.
  template <typename T>
  Candidates(const T* logits, int64_t n, float top, double temperature)
      : weights_(new float[n]), tokens_(new int32_t[n]), n_(n) {
    const float factor = 1.f / std::max(static_cast<float>(temperature), COLDEST);
    int64_t i = 0;
    for (; i + W <= n; i += W) ((load(logits + i) - Vec(top)) * Vec(factor)).exp().store(&weights_[i]);
    for (; i < n; ++i) weights_[i] = std::exp((static_cast<float>(logits[i]) - top) * factor);
    for (i = 0; i < n; ++i) tokens_[i] = static_cast<int32_t>(i);
  }

  // Keeps the tokens whose weight is `least` or more (min-p: Nguyen et al. 2024).
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

  // Keeps the fewest of the heaviest tokens that together have this share of the sum of all weights, at least one token
  // (top-p: Holtzman et al. 2020).
  void keep_top_p(double share) {
    narrow(share * from(0.f).weight, [](const Part& part) { return part.weight; });
  }

  // Returns the token that a random number (noise, in [0, 1)) selects: the one in whose interval of the cumulative
  // weights it lies.
  int64_t at(double noise) const {
    const double place = noise * from(0.f).weight;
    double before = 0;
    int64_t begin = 0;
    for (; begin + STRETCH < n_; begin += STRETCH) {
      const double after = before + stretch(begin, begin + STRETCH, 0.f).weight;
      if (after > place) break;
      before = after;
    }
    int64_t chosen = begin;  // the last token whose weight is not 0, in case rounding leaves no interval for the noise
    for (int64_t i = begin; i < std::min(begin + STRETCH, n_) && before <= place; ++i) {
      if (weights_[i] == 0) continue;
      chosen = i;
      before += weights_[i];
    }
    return tokens_[chosen];
  }

 private:
  // How many candidates there are in some set, and the sum of their weights.
  struct Part {
    double weight = 0;
    int64_t count = 0;
  };

  // Counts and sums those of candidates begin .. end - 1 whose weight is `least` or more.
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

  // Counts and sums all candidates whose weight is `least` or more.
  Part from(float least) const {
    Part all;
    for (int64_t begin = 0; begin < n_; begin += STRETCH) {
      const Part part = stretch(begin, std::min(begin + STRETCH, n_), least);
      all.weight += part.weight;
      all.count += part.count;
    }
    return all;
  }

  // Keeps the heaviest candidates, of equal ones the first, until they measure `limit` or more; `measure` gives their
  // number (top-k) or the sum of their weights (top-p).
  template <typename Measure>
  void narrow(double limit, const Measure& measure) {
    // Bisection over weights: those of `high` or more are kept, those below `low` are not.
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

  // Drops all candidates lighter than `least`. Of those with weights in [least, surely) it keeps the heaviest, as many
  // as keeps() returns.
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

// Returns a token drawn from logits [n]; if the temperature is 0, the first one with the largest logit.
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
