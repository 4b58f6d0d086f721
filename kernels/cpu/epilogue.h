// Sums of a product as rows of y. Knows no product.
#pragma once

#include "packed.h"
#include "vector.h"

namespace kvmux {

// Up to two panels of a row, whose sums lie `apart`.
template <typename X>
void put_pair(const float* sums, int64_t apart, const float* added, X* to, int64_t count) {
  if (count == PAIR * PANEL)
    for (int64_t i = 0; i < PAIR * PANEL; i += 2 * W) {
      const auto sum = [&](int64_t j) { return load(sums + j / PANEL * apart + j % PANEL) + load(added + j); };
      store(sum(i), sum(i + W), to + i);
    }
  else
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<X>(sums[i / PANEL * apart + i % PANEL] + added[i]);
}

// What panels first .. last - 1 are in y [rows, outputs], `size` numbers from one panel's sums to the next's, plus
// their bias, if there is one. Pair by pair of panels: so sums, of which there are more than the first cache holds, are
// read in order.
template <typename X>
void put_rows(const float* sums, int64_t size, int64_t first, int64_t last, const float* bias, X* y, int64_t rows,
              int64_t outputs) {
  static constexpr float NONE[PAIR * PANEL] = {};
  for (int64_t panel = first; panel < last; panel += PAIR, sums += PAIR * size) {
    const int64_t at = panel * PANEL, count = std::min(PAIR * PANEL, outputs - at);
    const float* const added = bias == nullptr ? NONE : bias + at;
    for (int64_t row = 0; row < rows; ++row) put_pair(sums + row * PANEL, size, added, y + row * outputs + at, count);
  }
}

}  // namespace kvmux
