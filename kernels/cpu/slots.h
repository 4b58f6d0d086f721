// Where the keys of a row are stored (`kernels.types.Slots`), and which of them a query sees (the windows of
// `Ops.attend`). Knows neither what is stored there nor scores.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>

namespace kvmux {

struct Layout {
  int64_t block_size, sinks, ring;

  int64_t slot(int64_t index) const { return ring && index >= sinks ? sinks + (index - sinks) % ring : index; }

  // Returns how many tokens with the indices from `first` on, before `end`, have consecutive slots within one block.
  int64_t run(int64_t first, int64_t end) const {
    const int64_t at = slot(first);
    int64_t n = std::min(end - first, block_size - at % block_size);
    if (ring) n = std::min(n, first < sinks ? sinks - first : sinks + ring - at);
    return n;
  }
};

// The stored keys or values of one head of one row: vectors of `dim` numbers in a format (kv_formats.h).
struct StoredVectors {
  const char* memory;                   // address of the head's first vector in block 0
  int64_t block_stride, vector_stride;  // bytes
  int64_t dim;
  at::ScalarType format;
  bool rotated;
  const int32_t* blocks;  // ids of its blocks: a row of the block table
  Layout layout;

  const char* at(int64_t index) const {
    const int64_t slot = layout.slot(index);
    return memory + blocks[slot / layout.block_size] * block_stride + slot % layout.block_size * vector_stride;
  }
};

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  bool has(int64_t i) const { return begin <= i && i < end; }
};

// The indices of the tokens that one query sees.
struct SeenBy {
  Range latest, sinks;
  bool has(int64_t i) const { return latest.has(i) || sinks.has(i); }
};

// The indices of the tokens that a query sees: the latest `window` ones, its own included, and the sinks; of these,
// those in the model's window.
struct Mask {
  int64_t window, model_window, sinks;
  // The index of the oldest token in the model's window, for each query of a row from index `start` on, `stride`
  // numbers apart; null: the window has the latest `model_window` tokens.
  const int32_t* window_start = nullptr;
  int64_t start = 0, stride = 0;

  int64_t oldest_of(int64_t query) const {
    return window_start ? window_start[(query - start) * stride] : std::max<int64_t>(0, query - model_window + 1);
  }
  Range latest(int64_t query) const { return {std::max(oldest_of(query), query - window + 1), query + 1}; }
  Range sinks_of(int64_t query) const { return {oldest_of(query), std::min(sinks, query + 1)}; }
  SeenBy seen_by(int64_t query) const { return {latest(query), sinks_of(query)}; }

  // Returns whether each of the queries oldest .. newest sees all tokens of a range.
  bool all_see(int64_t oldest, int64_t newest, Range range) const {
    return latest(newest).begin <= range.begin && range.end <= oldest + 1;
  }

  // Returns the smallest range within `where` that contains all tokens seen by any of the queries oldest .. newest.
  Range seen(int64_t oldest, int64_t newest, Range where) const {
    const Range kept{std::max(where.begin, sinks_of(oldest).begin), std::min(where.end, sinks_of(newest).end)};
    const Range late{std::max(where.begin, latest(oldest).begin), std::min(where.end, newest + 1)};
    if (kept.empty() || late.empty()) return kept.empty() ? late : kept;
    return {std::min(kept.begin, late.begin), std::max(kept.end, late.end)};
  }

  // Returns the first token from index `first` on that any of the queries oldest .. newest sees; an index after
  // `newest` if there is none.
  int64_t next_seen(int64_t oldest, int64_t newest, int64_t first) const {
    return seen(oldest, newest, {first, newest + 1}).begin;
  }
};

}  // namespace kvmux
