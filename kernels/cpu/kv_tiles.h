// The keys and values of a sequence, TILE positions at a time: where each of them is stored, and which of them some
// query rows see. The next tile is prefetched while one is computed. Knows no scores.
#pragma once

#include <algorithm>
#include <utility>

#include "prefetch.h"
#include "slots.h"

namespace kvmux {

// Some query rows of one KV head. Query rows are the pairs (query, head of the KV head's group), numbered query by
// query; these are `count` of them from number `first` on.
struct QueryRows {
  int64_t start;  // index of the row's first query
  int64_t first, count, group;

  int64_t query(int64_t r) const { return (first + r) / group; }  // of the step's
  int64_t head(int64_t r) const { return (first + r) % group; }   // of the group's
  int64_t position(int64_t r) const { return start + query(r); }
};

template <typename T, int64_t TILE>
class Keys {
 public:
  // The keys and values that the queries at positions oldest .. newest see.
  Keys(Plane<T> k, Plane<T> v, Mask mask, int64_t oldest, int64_t newest)
      : k_(k), v_(v), mask_(mask), oldest_(oldest), newest_(newest) {}

  // The addresses of the keys and values of TILE positions. `seen` spans all positions that any query row sees; within
  // it, keys between the sinks and the window are read as well, and masked later. Outside of `seen` the addresses are
  // those of one key that is seen.
  struct Tile {
    Range seen;
    const T *k[TILE], *v[TILE];
  };

  // Starts reading at the tile that begins at position `tile`.
  void begin(int64_t tile) { find(tile, tiles_[0]); }

  // Starts reading at the tile that begins at position `tile`, and queues this tile for prefetching.
  void begin(int64_t tile, PrefetchQueue& queue) {
    begin(tile);
    enqueue(tiles_[0], queue);
  }

  // Returns the current tile and prepares the one at position `next`, if that is before `end`. The next tile is queued
  // for prefetching in `queue`, unless that is null: with many query rows the products take longer than reading memory.
  const Tile& step(int64_t next, int64_t end, PrefetchQueue* queue) {
    const Tile& tile = tiles_[at_];
    at_ = 1 - at_;
    if (queue != nullptr) queue->clear();
    if (next < end) {
      find(next, tiles_[at_]);
      if (queue != nullptr) enqueue(tiles_[at_], *queue);
    }
    return tile;
  }

  // Returns whether every query row sees all positions of a range.
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

  // Queues the keys and values of a tile, to be prefetched while the tile before it is computed.
  void enqueue(const Tile& tile, PrefetchQueue& queue) const {
    for (int64_t p = tile.seen.begin, n; p < tile.seen.end; p += n) {
      n = k_.layout.run(p, tile.seen.end);
      queue.add(tile.k[p % TILE], n * k_.vector_stride * sizeof(T));
      queue.add(tile.v[p % TILE], n * v_.vector_stride * sizeof(T));
    }
  }

  Plane<T> k_, v_;
  Mask mask_;
  int64_t oldest_, newest_;
  Tile tiles_[2];   // the current tile and the next one; they swap places at each step
  int64_t at_ = 0;  // which of `tiles_` the next step() returns
};

}  // namespace kvmux
