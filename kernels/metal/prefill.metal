// Attention of rows of several tokens, of whatever lengths: queries of one KV head go over the keys together, in tiles
// that wait in threadgroup memory (FlashAttention, Dao et al. 2022). Tiles are counted from the text's beginning, so the
// order of summation depends on positions alone.
#include "attend.h"

// For heads of up to N * LANES numbers. The wider, the fewer queries a simdgroup has, and the fewer keys a tile: all of
// them share 32 KiB.
template <int N>
struct Shape {
  static constant constexpr int QUERIES = MOST_NUMBERS / N;  // of a simdgroup
  static constant constexpr int ROWS = SIMDGROUPS * QUERIES;
  static constant constexpr int WIDTH = N * LANES;
  static constant constexpr int PITCH = WIDTH + 1;  // from key to key: odd, or lanes would share a bank
  static constant constexpr int KEYS = N == MOST_NUMBERS ? LANES / 2 : LANES;
};

struct Queries {
  int oldest, newest;  // positions
};

// Whether any of the queries sees the key: if so, then the one that is nearest to it.
inline bool any_sees(Queries queries, int key, Attending a, int sinks) {
  return key <= queries.newest && sees(max(queries.oldest, key), key, a, sinks);
}

// The same of keys at [begin, end): the latest, or the last sink among them.
inline bool any_sees(Queries queries, int begin, int end, Attending a, int sinks) {
  return any_sees(queries, min(end - 1, queries.newest), a, sinks) ||
         (begin < sinks && any_sees(queries, min(end, sinks) - 1, a, sinks));
}

// Keys or values from `begin` on into the tile, a simdgroup one after the other. What no query sees may never have been
// written, and is 0.
template <int N>
inline void fetch(threadgroup KV* tile, threadgroup float* scales, const device KV* memory, Plane plane, Layout layout,
                  const device int* blocks, int head, int begin, Queries queries, Attending a, uint simdgroup,
                  uint lane) {
  for (int j = simdgroup; j < Shape<N>::KEYS; j += SIMDGROUPS) {
    threadgroup KV* to = tile + j * Shape<N>::PITCH;
    if (!any_sees(queries, begin + j, a, layout.sinks)) {
      for (int d = lane; d < plane.dim; d += LANES) to[d] = KV(0);
      if (lane == 0) scales[j] = 0.0f;
      continue;
    }
    const device KV* from = memory + plane.at(blocks, layout.block_size, layout.slot(begin + j), head);
    for (int d = lane; d < plane.dim; d += LANES) to[d] = from[d];
    if (lane == 0) scales[j] = scale_of(from, plane.dim);
  }
}

// A threadgroup: Shape<N>::ROWS queries of one KV head and row, counted over the heads of its group and then over tokens.
template <int N>
[[max_total_threads_per_threadgroup(GROUP)]] kernel void prefill(
    device T* out [[buffer(0)]],
    const device T* q [[buffer(1)]],
    const device KV* memory [[buffer(2)]],
    const device int* table [[buffer(3)]],
    const device int* row_seat [[buffer(4)]],
    const device int* q_start [[buffer(5)]],
    const device int* start [[buffer(6)]],
    const device float* sink_logits [[buffer(7)]],
    constant Memory& memory_sizes [[buffer(8)]],
    constant Attending& attending [[buffer(9)]],
    constant Scoring& scoring [[buffer(10)]],
    constant int& first_row [[buffer(11)]],
    uint3 group_at [[threadgroup_position_in_grid]],  // queries, KV head, row
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Shape<N> S;
  threadgroup T queries[S::ROWS * S::WIDTH];
  threadgroup KV tile[S::KEYS * S::PITCH];
  threadgroup float scales[S::KEYS], weights[S::ROWS * S::KEYS];
  const Memory m = memory_sizes;
  const Attending a = attending;
  const int row = first_row + group_at.z, kv_head = group_at.y;
  const int count = (q_start[row + 1] - q_start[row]) * a.group;
  const int first = group_at.x * S::ROWS;
  if (start[row] < 0 || first >= count) return;
  const device int* blocks = table + size_t(row_seat[row]) * m.table_width;

  // Which query each of the simdgroup's rows is; the last one stands for those beyond the end.
  int token[S::QUERIES], head[S::QUERIES], position[S::QUERIES];
  Sums<N> sums[S::QUERIES];
  threadgroup T* ours = queries + simdgroup * S::QUERIES * S::WIDTH;
  for (int r = 0; r < S::QUERIES; r++) {
    const int number = min(first + int(simdgroup) * S::QUERIES + r, count - 1);
    token[r] = q_start[row] + number / a.group;
    head[r] = kv_head * a.group + number % a.group;
    position[r] = start[row] + number / a.group;
    const device T* from = q + size_t(token[r]) * a.q_token + size_t(head[r]) * a.q_head;
    for (int d = lane; d < m.k.dim; d += LANES) ours[r * S::WIDTH + d] = from[d];
  }

  const Queries all = {start[row] + first / a.group, start[row] + (min(first + S::ROWS, count) - 1) / a.group};
  for (int begin = 0; begin <= all.newest; begin += S::KEYS) {
    if (!any_sees(all, begin, begin + S::KEYS, a, m.layout.sinks)) continue;
    fetch<N>(tile, scales, memory, m.k, m.layout, blocks, kv_head, begin, all, a, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Scores: a lane a key.
    const int key = min(int(lane), S::KEYS - 1);
    float products[S::QUERIES] = {0.0f};
    for (int d = 0; d < m.k.dim; d++) {
      const float number = float(tile[key * S::PITCH + d]);
      for (int r = 0; r < S::QUERIES; r++) products[r] += float(ours[r * S::WIDTH + d]) * number;
    }
    for (int r = 0; r < S::QUERIES; r++) {
      const bool visible = int(lane) < S::KEYS && sees(position[r], begin + key, a, m.layout.sinks);
      const float score = visible ? score_of(products[r] * scales[key], scoring) : NOTHING;
      const float higher = max(sums[r].top, simd_max(score));
      const float weight = visible ? fast::exp(score - higher) : 0.0f;
      sums[r].raise(higher);
      sums[r].total += simd_sum(weight);
      if (int(lane) < S::KEYS) weights[(simdgroup * S::QUERIES + r) * S::KEYS + lane] = weight;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Values: a lane N numbers.
    fetch<N>(tile, scales, memory, m.v, m.layout, blocks, kv_head, begin, all, a, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int j = 0; j < S::KEYS; j++) {
      for (int n = 0; n < N; n++) {
        const float value = float(tile[j * S::PITCH + n * LANES + lane]) * scales[j];
        for (int r = 0; r < S::QUERIES; r++)
          sums[r].values[n] += weights[(simdgroup * S::QUERIES + r) * S::KEYS + j] * value;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  for (int r = 0; r < S::QUERIES; r++) {
    if (first + int(simdgroup) * S::QUERIES + r >= count) continue;
    sums[r].add_sink(sink_logits[head[r]]);
    device T* to = out + size_t(token[r]) * a.out_token + size_t(head[r]) * a.out_head;
    for (int n = 0; n < N; n++)
      if (n * LANES + int(lane) < m.v.dim) to[n * LANES + lane] = T(sums[r].values[n] / sums[r].total);
  }
}

#define PREFILL(N) template [[host_name("prefill_" #N)]] kernel decltype(prefill<N>) prefill<N>;
PREFILL(2) PREFILL(4) PREFILL(8)
