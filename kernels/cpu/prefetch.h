// A queue of memory that is prefetched into the cache while something else is computed.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvmux {

// A queue of cache lines that are needed soon. The memory delivers them one after the other, so they are prefetched in
// small portions, spread over the computation.
class PrefetchQueue {
 public:
  static constexpr int64_t MOST = 1024;  // lines
  static constexpr int64_t STEPS = 256;  // lines that one product may request, possibly more than are queued

  void clear() { used_ = count_ = 0; }

  // Queues the cache lines of some memory; beyond MOST lines the hardware prefetcher is left to read them.
  void add(const void* from, int64_t bytes) {
    const char* line = static_cast<const char*>(from);
    const int64_t n = std::min((bytes + LINE - 1) / LINE, MOST - count_);
    for (int64_t i = 0; i < n; ++i) lines_[count_ + i] = line + i * LINE;
    count_ += n;
  }

  // Returns the next n (at most STEPS) queued lines, for the caller to prefetch; when the queue is empty, a line that
  // is in the cache already.
  const char* const* next(int64_t n) {
    const char* const* lines = lines_ + used_;
    for (int64_t i = count_; i < used_ + n; ++i) lines_[i] = reinterpret_cast<const char*>(this);
    used_ = std::min(used_ + n, count_);
    return lines;
  }

  void fetch(int64_t n) {
    const int64_t first = used_;
    used_ = std::min(used_ + n, count_);
    for (int64_t i = first; i < used_; ++i) __builtin_prefetch(lines_[i]);
  }

 private:
  static constexpr int64_t LINE = 64;  // bytes
  const char* lines_[MOST + STEPS];
  int64_t used_ = 0, count_ = 0;  // lines prefetched so far, and lines queued (at most MOST)
};

}  // namespace kvmux
