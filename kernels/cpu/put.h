// Sums of a product as rows of y. Knows no product.
#pragma once

#include "packed.h"
#include "vector.h"

namespace kvmux {

// Up to two panels of a row, whose sums lie `apart`.
template <typename X>
void put_pair(const float* sums, int64_t apart, const float* added, X* to, int64_t count) {
  if (count == 2 * PANEL)
    for (int64_t i = 0; i < 2 * PANEL; i += 2 * W) {
      const auto sum = [&](int64_t j) { return load(sums + j / PANEL * apart + j % PANEL) + load(added + j); };
      store(sum(i), sum(i + W), to + i);
    }
  else
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<X>(sums[i / PANEL * apart + i % PANEL] + added[i]);
}

// The first `count` numbers of a row of panels, `size` numbers from one's sums to the next's, plus what the panels' bias, if
// there is one, has for whole pairs of them.
template <typename X>
void put_row(const float* sums, int64_t size, const float* bias, X* to, int64_t count) {
  static constexpr float NONE[2 * PANEL] = {};
  for (int64_t at = 0; at < count; at += 2 * PANEL)
    put_pair(sums + at / PANEL * size, size, bias == nullptr ? NONE : bias + at, to + at, std::min(2 * PANEL, count - at));
}

}  // namespace kvmux
