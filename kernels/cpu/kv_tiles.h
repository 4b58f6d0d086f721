// A text's keys and values, TILE positions at a time: where each of them lies, which of them some query rows see, and
// the next ones fetched while these are computed. Knows no scores.
#pragma once

#include <algorithm>
#include <utility>

#include "prefetch.h"
#include "slots.h"

namespace kvmux {

// Query rows of one KV head, counted from `first` over the heads of its group (GQA) and then over queries.
struct QueryRows {
  int64_t start;  // position of the text's query 0
  int64_t first, count, group;

  int64_t query(int64_t r) const { return (first + r) / group; }  // of the step's
  int64_t head(int64_t r) const { return (first + r) % group; }   // of the group's
  int64_t position(int64_t r) const { return start + query(r); }
};

template <typename T, int64_t TILE>
class Keys {
 public:
  // Those that queries at positions oldest .. newest see.
  Keys(Plane<T> k, Plane<T> v, Mask mask, int64_t oldest, int64_t newest)
      : k_(k), v_(v), mask_(mask), oldest_(oldest), newest_(newest) {}

  // Keys and values of TILE positions. `seen` spans all that any row sees; what lies between the sinks and the window
  // is read with it, and hidden. Outside `seen` nothing is read: a key that is seen stands for it.
  struct Tile {
    Range seen;
    const T *k[TILE], *v[TILE];
  };

  void begin(int64_t tile) { find(tile, tiles_[0]); }

  // What whoever begins at `tile` will read first is to be fetched.
  void begin(int64_t tile, PrefetchQueue& queue) {
    begin(tile);
    want(tiles_[0], queue);
  }

  // The tile that was to be next; behind it comes the one at position `next`, if that is before `end`: `queue`, if any,
  // is to fetch it. Whoever has many query rows waits for products, not for the memory.
  const Tile& step(int64_t next, int64_t end, PrefetchQueue* queue) {
    const Tile& tile = tiles_[at_];
    at_ = 1 - at_;
    if (queue != nullptr) queue->clear();
    if (next < end) {
      find(next, tiles_[at_]);
      if (queue != nullptr) want(tiles_[at_], *queue);
    }
    return tile;
  }

  // Whether every row sees all of a range.
  bool all_see(Range range) const { return mask_.latest(newest_).begin <= range.begin && range.end <= oldest_ + 1; }

 private:
  void find(int64_t tile, Tile& found) const {
    const Range seen = found.seen = mask_.seen(oldest_, newest_, {tile, tile + TILE});
    for (int64_t p = seen.begin, n; p < seen.end; p += n) {
      n = k_.layout.run(p, seen.end);
      const T *k = k_.at(p), *v = v_.at(p);
      for (int64_t i = 0; i < n; ++i) {
        found.k[p - tile + i] = k + i * k_.vector_stride;
        found.v[p - tile + i] = v + i * v_.vector_stride;
      }
    }
    if (seen.empty()) return;
    for (const T** vectors : {found.k, found.v}) {
      const T* const instead = vectors[seen.begin - tile];
      std::fill_n(vectors, seen.begin - tile, instead);
      std::fill(vectors + (seen.end - tile), vectors + TILE, instead);
    }
  }

  // To be fetched while the tile before it is computed.
  void want(const Tile& tile, PrefetchQueue& queue) const {
    for (int64_t p = tile.seen.begin, n; p < tile.seen.end; p += n) {
      n = k_.layout.run(p, tile.seen.end);
      queue.add(tile.k[p % TILE], n * k_.vector_stride * sizeof(T));
      queue.add(tile.v[p % TILE], n * v_.vector_stride * sizeof(T));
    }
  }

  Plane<T> k_, v_;
  Mask mask_;
  int64_t oldest_, newest_;
  Tile tiles_[2];   // that which is computed and the next, by turns
  int64_t at_ = 0;  // the next
};

}  // namespace kvmux
