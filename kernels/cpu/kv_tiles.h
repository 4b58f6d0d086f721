// The stored keys and values that some query rows see, TILE positions at a time: where each of them is stored, and what
// is prefetched while a tile is computed. Knows no scores.
#pragma once

#include <algorithm>
#include <optional>

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

// The stored keys and values of one head of a sequence, as some query rows see them.
struct KVView {
  KVView(const StoredVectors& keys, const StoredVectors& values, const Mask& seen, const QueryRows& query_rows)
      : k(keys), v(values), mask(seen), rows(query_rows), oldest(rows.position(0)),
        newest(rows.position(rows.count - 1)) {}

  // Returns whether every query row sees all positions of a range.
  bool all_see(Range range) const { return mask.all_see(oldest, newest, range); }
  // Returns the first position from `first` on that any query row sees.
  int64_t next_seen(int64_t first) const { return mask.next_seen(oldest, newest, first); }

  StoredVectors k, v;
  Mask mask;
  QueryRows rows;
  int64_t oldest, newest;  // positions of the first query and of the last one
};

// The addresses of the keys and values of TILE positions. `seen` spans all positions that any query row sees; within
// it, keys between the sinks and the window are read as well, and masked later. Outside of `seen` the addresses are
// those of one key that is seen.
template <int64_t TILE>
struct KVTile {
  // Finds the addresses of the tile that begins at position `tile`.
  void find(const KVView& kv, int64_t tile) {
    seen = kv.mask.seen(kv.oldest, kv.newest, {tile, tile + TILE});
    for (int64_t p = seen.begin, n; p < seen.end; p += n) {
      n = kv.k.layout.run(p, seen.end);
      const char *const first_k = kv.k.at(p), *const first_v = kv.v.at(p);
      for (int64_t i = 0; i < n; ++i) {
        k[p - tile + i] = first_k + i * kv.k.vector_stride;
        v[p - tile + i] = first_v + i * kv.v.vector_stride;
      }
    }
    if (seen.empty()) return;
    for (const char** vectors : {k, v}) {
      const char* const instead = vectors[seen.begin - tile];
      std::fill_n(vectors, seen.begin - tile, instead);
      std::fill(vectors + (seen.end - tile), vectors + TILE, instead);
    }
  }

  // Queues the keys and values for prefetching.
  void enqueue(const KVView& kv, PrefetchQueue& queue) const {
    for (int64_t p = seen.begin, n; p < seen.end; p += n) {
      n = kv.k.layout.run(p, seen.end);
      queue.add(k[p % TILE], n * kv.k.vector_stride);
      queue.add(v[p % TILE], n * kv.v.vector_stride);
    }
  }

  Range seen;
  const char *k[TILE], *v[TILE];
};

// Reads tiles one after the other. While one is computed, the next one is prefetched, and with the last one the first
// tile of what this thread reads afterwards. This is done for up to PREFETCH_ROWS query rows: with more of them the
// products take longer than reading memory.
template <int64_t TILE, int64_t PREFETCH_ROWS>
class KVTileReader {
 public:
  using Tile = KVTile<TILE>;

  // `kv` must live as long as the reader.
  explicit KVTileReader(const KVView& kv) : kv_(kv) {}

  // Sets what this thread reads afterwards: from position `begin` on.
  void set_next(const KVView& kv, int64_t begin) {
    if (prefetches(kv_) && prefetches(kv)) next_.emplace(Next{kv, begin});
  }

  // Starts at the tile that begins at position `begin`; tiles from position `end` on are not read.
  void start(int64_t begin, int64_t end) {
    end_ = std::min(end, kv_.newest + 1);
    tiles_[at_].find(kv_, begin);
  }

  // Returns the tile that begins at position `tile`, the next one in order, and queues the one after it.
  const Tile& read(int64_t tile) {
    const Tile& found = tiles_[at_];
    at_ = 1 - at_;
    queue_.clear();
    if (tile + TILE < end_)
      prepare(kv_, tile + TILE);
    else if (next_)
      prepare(next_->kv, next_->begin);
    return found;
  }

  // The memory to prefetch while the current tile is computed.
  PrefetchQueue& queue() { return queue_; }

 private:
  struct Next {
    KVView kv;
    int64_t begin;
  };

  static bool prefetches(const KVView& kv) { return kv.rows.count <= PREFETCH_ROWS; }

  void prepare(const KVView& kv, int64_t tile) {
    tiles_[at_].find(kv, tile);
    if (prefetches(kv)) tiles_[at_].enqueue(kv, queue_);
  }

  const KVView& kv_;
  int64_t end_ = 0;
  std::optional<Next> next_;  // if known
  Tile tiles_[2];             // the current tile and the one after it; they swap places at each read()
  int64_t at_ = 0;            // which of `tiles_` the next read() returns
  PrefetchQueue queue_;
};

}  // namespace kvmux
