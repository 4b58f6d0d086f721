// Stores the sums that a product computed as rows of y, plus a bias. Knows no product.
#pragma once

#include "packed.h"
#include "vector.h"

namespace kvmux {

// Returns the bias of two panels, from output number `first` on; zeros if there is no bias (null).
inline const float* bias_of_pair(const float* bias, int64_t first) {
  alignas(64) static constexpr float ZEROS[PAIR * PANEL] = {};
  return bias == nullptr ? ZEROS : bias + first;
}

// Stores `count` numbers of a row, from the sums of up to two panels plus `added`; the panels' sums begin `apart`
// numbers from each other.
template <typename X>
void store_pair(const float* sums, int64_t apart, const float* added, X* to, int64_t count) {
  if (count == PAIR * PANEL)
    for (int64_t i = 0; i < PAIR * PANEL; i += 2 * W) {
      const auto sum = [&](int64_t j) { return load(sums + j / PANEL * apart + j % PANEL) + load(added + j); };
      store(sum(i), sum(i + W), to + i);
    }
  else
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<X>(sums[i / PANEL * apart + i % PANEL] + added[i]);
}

// Stores the sums of panels first .. last - 1 in y [rows, outputs], plus their bias unless it is null; the sums of two
// successive panels begin `size` numbers from each other. Goes by pairs of panels, so that the sums, which are more
// than the L1 cache holds, are read in order.
template <typename X>
void store_rows(const float* sums, int64_t size, int64_t first, int64_t last, const float* bias, X* y, int64_t rows,
                int64_t outputs) {
  for (int64_t panel = first; panel < last; panel += PAIR, sums += PAIR * size) {
    const int64_t at = panel * PANEL, count = std::min(PAIR * PANEL, outputs - at);
    const float* const added = bias_of_pair(bias, at);
    for (int64_t row = 0; row < rows; ++row) store_pair(sums + row * PANEL, size, added, y + row * outputs + at, count);
  }
}

}  // namespace kvmux
