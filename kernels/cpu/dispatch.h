// Dispatch of templates by the type of a tensor, and of rows to torch's threads. Knows no operation.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>

namespace kvmux {

// Calls work(number) with a zero of the C++ type that `type` stands for: float32, bfloat16 or float16.
template <typename Work>
void with_type(at::ScalarType type, const Work& work) {
  switch (type) {
    case at::kFloat: return work(float{});
    case at::kBFloat16: return work(at::BFloat16{});
    case at::kHalf: return work(at::Half{});
    default: TORCH_CHECK_VALUE(false, "no kernel for ", type);
  }
}

// Calls work(begin, end) for ranges of n rows of `width` numbers each, in several threads if there are enough numbers.
template <typename Work>
void parallel_over_rows(int64_t n, int64_t width, const Work& work) {
  constexpr int64_t ENOUGH = 32768;  // numbers per thread: for fewer it is not worth waking another thread
  at::parallel_for(0, n, std::max<int64_t>(1, ENOUGH / std::max<int64_t>(1, width)), work);
}

}  // namespace kvmux
