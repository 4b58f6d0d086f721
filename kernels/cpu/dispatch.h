// Dispatch by the type of a tensor, and over torch's threads. Knows no operation.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>

namespace kvmux {

// Calls work(number) with a number of that C++ type.
template <typename Work>
void with_type(at::ScalarType type, const Work& work) {
  switch (type) {
    case at::kFloat: return work(float{});
    case at::kBFloat16: return work(at::BFloat16{});
    case at::kHalf: return work(at::Half{});
    default: TORCH_CHECK_VALUE(false, "no kernel for ", type);
  }
}

// The same for the types in which keys and values are stored.
template <typename Work>
void with_kept_type(at::ScalarType type, const Work& work) {
  if (type == at::kChar) return work(int8_t{});
  with_type(type, work);
}

// Runs work(begin, end) over parts of n rows of `width` numbers each.
template <typename Work>
void over_rows(int64_t n, int64_t width, const Work& work) {
  constexpr int64_t ENOUGH = 32768;  // numbers: with fewer, another thread is not worth waking
  at::parallel_for(0, n, std::max<int64_t>(1, ENOUGH / std::max<int64_t>(1, width)), work);
}

}  // namespace kvmux
