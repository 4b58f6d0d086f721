// Where the keys of a row are stored (`kernels.types.Slots`), how one is read and written (`kernels/store.py`), and
// which of them a query sees (the windows of `Ops.attend`). Knows nothing of scores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "vector.h"

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

// The stored keys or values of one head of one row: vectors of `dim` numbers; an int8 vector is followed by its float32
// scale.
template <typename T>
struct StoredVectors {
  const T* memory;  // address of the head's first vector in block 0
  int64_t block_stride, vector_stride, dim;
  const int32_t* blocks;  // ids of its blocks: a row of the block table
  Layout layout;

  const T* at(int64_t index) const {
    const int64_t slot = layout.slot(index);
    return memory + blocks[slot / layout.block_size] * block_stride + slot % layout.block_size * vector_stride;
  }
};

// Reads a stored key or value of n numbers as float32.
template <typename T>
inline void read_vector(const T* from, float* to, int64_t n) {
  to_float(from, to, n);
}

// Returns the scale of a stored vector of n numbers.
inline float scale_of(const int8_t* from, int64_t n) {
  float scale;
  std::memcpy(&scale, from + n, sizeof(scale));
  return scale;
}

inline void read_vector(const int8_t* from, float* to, int64_t n) {
  const float scale = scale_of(from, n);
  const Vec scales(scale);
  int64_t i = 0;
  for (; i + W <= n; i += W) (load(from + i) * scales).store(to + i);
  for (; i < n; ++i) to[i] = static_cast<float>(from[i]) * scale;
}

// Reads W stored keys or values of n numbers as the columns of [n, W] of float32, whose rows begin `ld` numbers apart;
// calls between() from time to time.
template <typename T, typename Between>
inline void read_transposed(const T* const* from, int64_t n, float* to, int64_t ld, const Between& between) {
  transpose_rows(from, n, to, ld, between);
}

template <typename Between>
inline void read_transposed(const int8_t* const* from, int64_t n, float* to, int64_t ld, const Between& between) {
  float scales[W];
  for (int64_t i = 0; i < W; ++i) scales[i] = scale_of(from[i], n);
  int64_t at = 0;
  for (; at + 4 * W <= n; at += 4 * W, between()) transpose_quads(from, at, load(scales), to + at * ld, ld);
  for (; at + W <= n; at += W, between()) transpose_block(from, at, to + at * ld, ld, load(scales));
  for (; at < n; ++at)
    for (int64_t i = 0; i < W; ++i) to[at * ld + i] = static_cast<float>(from[i][at]) * scales[i];
}

// Stores a key or value of n numbers; as int8 the largest magnitude becomes 127, as in reference/backend.py.
template <typename T, typename KV>
inline void write_vector(const T* from, KV* to, int64_t n) {
  convert(from, to, n);
}

template <typename T>
inline void write_vector(const T* from, int8_t* to, int64_t n) {
  constexpr float TINY = 1e-30f;
  float largest = 0.f;
  bool finite = true;  // if any of the numbers is NaN or infinite, the scale becomes NaN
  for (int64_t i = 0; i < n; ++i) {
    const float size = std::abs(static_cast<float>(from[i]));
    finite &= size <= std::numeric_limits<float>::max();
    largest = std::max(largest, size);
  }
  const float scale = finite ? largest / 127.f : std::numeric_limits<float>::quiet_NaN();
  const float divisor = finite ? std::max(scale, TINY) : std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i) {
    const float number = std::nearbyint(static_cast<float>(from[i]) / divisor);
    to[i] = finite ? static_cast<int8_t>(number) : int8_t{0};
  }
  std::memcpy(to + n, &scale, sizeof(scale));
}

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
