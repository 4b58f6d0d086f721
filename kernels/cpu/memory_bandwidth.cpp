// Reads memory with plain loads in all threads, to measure its bandwidth.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>

#include "dispatch.h"

namespace kvmux {
namespace {

using Words = int64_t __attribute__((vector_size(64)));

// Returns the sum of all words of `memory`, so that the compiler keeps every load; the end of `memory`, if it does not
// fill whole groups of lines, is not read.
int64_t read(const at::Tensor& memory) {
  constexpr int64_t LINES = 8;  // cache lines that a thread loads in one iteration; the hardware prefetches more
  const auto* lines = static_cast<const Words*>(memory.const_data_ptr());
  std::atomic<int64_t> total{0};
  at::parallel_for(0, memory.nbytes() / sizeof(Words) / LINES, 1, [&](int64_t begin, int64_t end) {
    Words sums[LINES] = {};
    for (int64_t i = begin * LINES; i < end * LINES; i += LINES)
      for (int64_t j = 0; j < LINES; ++j) sums[j] += lines[i + j];
    for (const Words& sum : sums)
      for (int64_t word = 0; word < 8; ++word) total += sum[word];
  });
  return total;
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) { library.def("read(Tensor memory) -> int", &kvmux::read); }
