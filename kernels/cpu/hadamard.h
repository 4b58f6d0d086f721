// Rotation of keys and values before they are stored in few bits: a Hadamard transform, which spreads outliers over all
// numbers of a vector. Knows no format.
#pragma once

#include <cmath>

#include "vector.h"

namespace kvmux {

// Replaces the numbers of a vector by sums and differences of those that are H places apart: x[i] + x[i + H] and
// x[i] - x[i + H], for each i whose bit H is 0.
template <int H, size_t... Lane>
inline Raw butterfly(Raw x, std::index_sequence<Lane...>) {
  using Bits = int32_t __attribute__((vector_size(sizeof(Vec))));
  constexpr Bits SIGN = {(Lane & H ? INT32_MIN : 0)...};
  const Raw other = __builtin_shufflevector(x, x, (Lane ^ H)...);
  return other + (Raw)((Bits)x ^ SIGN);
}

// Rotates x [dim]: multiplies each run of `size` numbers by a Hadamard matrix with numbers of +-size^-0.5, where `size`
// is the largest power of two that divides dim. It is its own inverse. The order of sums is that of kv_formats.py.
inline void rotate(float* x, int64_t dim) {
  const int64_t size = dim & -dim;
  int64_t half = 1;
  if (size >= W) {
    for (int64_t i = 0; i < dim; i += W) {
      constexpr std::make_index_sequence<W> LANES{};
      Raw v = load(x + i);
      v = butterfly<1>(v, LANES);
      v = butterfly<2>(v, LANES);
      if constexpr (W > 4) v = butterfly<4>(v, LANES);
      if constexpr (W > 8) v = butterfly<8>(v, LANES);
      Vec(v).store(x + i);
    }
    half = W;
  }
  const auto add_and_subtract = [](auto& a, auto& b) {
    const auto sum = a + b;
    b = a - b;
    a = sum;
  };
  for (; half < size; half *= 2)
    for (int64_t i = 0; i < dim; i += 2 * half) {
      int64_t j = i;
      for (; j + W <= i + half; j += W) {
        Vec a = load(x + j), b = load(x + j + half);
        add_and_subtract(a, b);
        a.store(x + j);
        b.store(x + j + half);
      }
      for (; j < i + half; ++j) add_and_subtract(x[j], x[j + half]);
    }
  const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(size)));
  for (int64_t i = 0; i < dim; ++i) x[i] *= factor;
}

}  // namespace kvmux
