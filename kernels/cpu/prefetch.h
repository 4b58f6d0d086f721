// A queue of memory that is prefetched into the cache while something else is computed. Does not know what is stored
// there.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvmux {

// Memory that is needed soon. The memory delivers cache lines one after the other, so they are prefetched in
// small portions, spread over the computation. They are fetched into the second-level cache: on Zen 4 the first level
// waits for 24 lines at a time, which limits a core to 11 GB/s.
class PrefetchQueue {
 public:
  void clear() { at_ = count_ = lines_ = 0; }

  // Queues some memory; beyond MOST pieces the hardware prefetcher is left to read them.
  void add(const void* from, int64_t bytes) {
    if (count_ == MOST) return;
    const int64_t lines = (bytes + LINE - 1) / LINE;
    pieces_[count_++] = {static_cast<const char*>(from), lines};
    lines_ += lines;
  }

  // Sets how many lines a call of fetch() prefetches, so that `calls` calls prefetch all that is queued.
  void spread(int64_t calls) { portion_ = (lines_ + calls - 1) / calls; }

  void fetch() { fetch(portion_); }

  // Prefetches the next n lines.
  void fetch(int64_t n) {
    while (n > 0 && at_ < count_) {
      Piece& piece = pieces_[at_];
      const int64_t now = std::min(n, piece.lines);
      for (int64_t i = 0; i < now; ++i) __builtin_prefetch(piece.from + i * LINE, READ, L2);
      piece.from += now * LINE;
      piece.lines -= now;
      n -= now;
      if (piece.lines == 0) ++at_;
    }
  }

 private:
  static constexpr int READ = 0, L2 = 2;  // as __builtin_prefetch numbers them
  static constexpr int64_t LINE = 64;     // bytes
  static constexpr int64_t MOST = 256;    // pieces
  struct Piece {
    const char* from;
    int64_t lines;
  };
  Piece pieces_[MOST];
  int64_t at_ = 0, count_ = 0;       // the piece that is being prefetched, and the number of pieces
  int64_t lines_ = 0, portion_ = 0;  // lines queued, and lines that fetch() prefetches
};

}  // namespace kvmux
