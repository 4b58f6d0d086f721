// Attention for rows of several tokens, of any lengths: queries of one KV head go over the keys together, in tiles in
// threadgroup memory (FlashAttention, Dao et al. 2022). Tiles are counted from the beginning of the sequence, so the
// order of summation depends on positions alone.
#include "attend.h"

// Types in threadgroup memory: rounding to T must not change what was dequantized, or rotated.
typedef conditional_t<is_same_v<K, T> && is_same_v<V, T>, T, float> Staged;
typedef conditional_t<is_same_v<K, uchar>, float, T> Query;

// Sizes of tiles for heads of up to N * LANES numbers. For wider heads there are fewer queries per simdgroup and fewer
// keys per tile, as all of them share 32 KiB of threadgroup memory.
template <int N>
struct Shape {
  static constant constexpr int QUERIES = MOST_NUMBERS / N;  // of a simdgroup
  static constant constexpr int ROWS = SIMDGROUPS * QUERIES;
  static constant constexpr int WIDTH = N * LANES;
  static constant constexpr int PITCH = WIDTH + 1;  // numbers from key to key: odd, or lanes would share a memory bank
  static constant constexpr int KEYS = N == MOST_NUMBERS ? LANES / 2 : LANES;
};

// The indices of a threadgroup's queries among the kept tokens: that of the first query and that of the last.
struct Span {
  int oldest, newest;
};

// Returns whether any of the queries sees a key: if one does, the query nearest to the key does.
inline bool any_sees(Span queries, int key, Mask mask) {
  return key <= queries.newest && mask.sees(max(queries.oldest, key), key);
}

// Returns whether any of the queries sees a key in [begin, end): it suffices to check the latest key, and the last sink
// among them.
inline bool any_sees(Span queries, int begin, int end, Mask mask) {
  return any_sees(queries, min(end - 1, queries.newest), mask) ||
         (begin < mask.sinks && any_sees(queries, min(end, mask.sinks) - 1, mask));
}

// A tile of keys or values in threadgroup memory.
template <int N>
struct Tile {
  threadgroup Staged* numbers;  // [KEYS, PITCH], what they are worth
  threadgroup uint* sound;      // [KEYS]: 0 for a vector with a NaN or infinite number, otherwise 1

  // Loads the tile that begins at position `begin`; the simdgroups load one vector after the other. Keys that no query
  // sees become 0, as they may never have been written.
  template <typename Stored>
  void fetch(Plane<const Stored> from, int begin, Span queries, Mask mask, uint simdgroup, uint lane) const {
    const int dim = from.sizes.dim;
    for (int j = simdgroup; j < Shape<N>::KEYS; j += SIMDGROUPS) {
      float vector[N] = {0.0f};
      if (any_sees(queries, begin + j, mask)) read_numbers<N>(vector, from.at(begin + j), dim, lane);
      bool numbers_only = true;
      for (int n = 0; n < N; n++) numbers_only = numbers_only && is_number(vector[n]);
      threadgroup Staged* to = numbers + j * Shape<N>::PITCH + lane * N;
      for (int n = 0; n < N; n++)
        if (int(lane) * N + n < dim) to[n] = Staged(vector[n]);
      numbers_only = simd_all(numbers_only);
      if (lane == 0) sound[j] = numbers_only;
    }
  }
};

// All queries of one row and KV head, numbered by token and, within a token, by query head of the KV head's group.
struct Queries {
  int first_token, start;  // the row's first token: its number in the step, its index among the kept tokens
  int kv_head, group, count;

  int token(int i) const { return first_token + i / group; }
  int position(int i) const { return start + i / group; }
  int head(int i) const { return kv_head * group + i % group; }
};

// What one simdgroup computes: QUERIES queries from number `first` on; if there are fewer, the last one is repeated.
template <int N>
struct Share {
  typedef Shape<N> S;
  int first;
  threadgroup Query* queries;  // [QUERIES, WIDTH], rotated if keys are
  threadgroup float* weights;  // [QUERIES, KEYS]: softmax weights of the keys of a tile
  int position[S::QUERIES];
  Sums<N> sums[S::QUERIES];

  void load(const device T* q, Queries all, AttentionCall a, PlaneSizes keys, int lane) {
    for (int r = 0; r < S::QUERIES; r++) {
      const int i = min(first + r, all.count - 1);
      position[r] = all.position(i);
      const device T* from = q + size_t(all.token(i)) * a.q_token + size_t(all.head(i)) * a.q_head;
      float query[N];
      read_numbers<N>(query, from, keys.dim, lane);
      if (is_rotated<K>(keys)) rotate<N, N>(query, keys.dim, lane);
      for (int n = 0; n < N; n++)
        if (lane * N + n < keys.dim) queries[r * S::WIDTH + lane * N + n] = Query(query[n]);
    }
  }

  // Computes the softmax weights of the keys of a tile that begins at position `begin`; one lane per key.
  void score(Tile<N> tile, int begin, int dim, Mask mask, Scoring scoring, int lane) {
    const int key = min(lane, S::KEYS - 1);
    float products[S::QUERIES] = {0.0f};
    for (int d = 0; d < dim; d++) {
      const float number = float(tile.numbers[key * S::PITCH + d]);
      for (int r = 0; r < S::QUERIES; r++) products[r] += float(queries[r * S::WIDTH + d]) * number;
    }
    for (int r = 0; r < S::QUERIES; r++) {
      const bool visible = lane < S::KEYS && mask.sees(position[r], begin + key);
      const float score = visible ? score_of(products[r], scoring) : NOTHING;
      const float higher = max(sums[r].top, simd_max(score));
      const float weight = visible ? fast::exp(score - higher) : 0.0f;
      sums[r].raise(higher);
      sums[r].total += simd_sum(weight);
      if (lane < S::KEYS) weights[r * S::KEYS + lane] = weight;
    }
  }

  // Adds the values of a tile, times their weights, to the sums, of which each lane has N numbers.
  void add(Tile<N> tile, int lane) {
    for (int j = 0; j < S::KEYS; j++) {
      // A value with a NaN or infinity is not multiplied: times a weight of 0 it would be NaN, too.
      if (!tile.sound[j]) {
        for (int r = 0; r < S::QUERIES; r++)
          if (weights[r * S::KEYS + j] != 0.0f)
            for (int n = 0; n < N; n++) sums[r].values[n] = as_type<float>(NO_NUMBER);
        continue;
      }
      for (int n = 0; n < N; n++) {
        const float value = float(tile.numbers[j * S::PITCH + n * LANES + lane]);
        for (int r = 0; r < S::QUERIES; r++) sums[r].values[n] += weights[r * S::KEYS + j] * value;
      }
    }
  }

  // Writes the outputs, and the logarithms of sums if they are wanted; sums of rotated values are rotated back.
  void write(device T* out, Queries all, AttentionCall a, const device float* sink_logits, PlaneSizes values, int lane,
             device float* lse) {
    for (int r = 0; r < S::QUERIES; r++) {
      if (first + r >= all.count) continue;
      const int token = all.token(first + r), head = all.head(first + r);
      sums[r].add_sink(sink_logits[head]);
      device float* const log_sum = lse_of(lse, a, token, head);
      if (log_sum != nullptr && lane == 0) *log_sum = sums[r].lse();
      device T* to = out + size_t(token) * a.out_token + size_t(head) * a.out_head;
      float output[N];
      for (int n = 0; n < N; n++) output[n] = sums[r].values[n] / sums[r].total;
      if (is_rotated<V>(values)) rotate<N, 1>(output, values.dim, lane);
      for (int n = 0; n < N; n++)
        if (n * LANES + lane < values.dim) to[n * LANES + lane] = T(output[n]);
    }
  }
};

// Computes attention for rows of several tokens: one threadgroup computes Shape<N>::ROWS queries of one row and KV
// head.
template <int N>
[[max_total_threads_per_threadgroup(GROUP)]] kernel void prefill(
    device T* out [[buffer(0)]],
    const device T* q [[buffer(1)]],
    const device uchar* memory [[buffer(2)]],
    const device int* table [[buffer(3)]],
    const device int* table_row [[buffer(4)]],
    const device int* q_start [[buffer(5)]],
    const device int* start [[buffer(6)]],
    const device int* window_start [[buffer(7)]],
    const device float* sink_logits [[buffer(8)]],
    device float* lse [[buffer(9)]],
    constant Memory& memory_sizes [[buffer(10)]],
    constant Planes& plane_sizes [[buffer(11)]],
    constant AttentionCall& call [[buffer(12)]],
    constant Scoring& scoring [[buffer(13)]],
    constant int& first_row [[buffer(14)]],
    uint3 group_at [[threadgroup_position_in_grid]],  // queries, KV head, row
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Shape<N> S;
  threadgroup Query queries[S::ROWS * S::WIDTH];
  threadgroup Staged numbers[S::KEYS * S::PITCH];
  threadgroup float weights[S::ROWS * S::KEYS];
  threadgroup uint sound[S::KEYS];
  const Memory m = memory_sizes;
  const Planes planes = plane_sizes;
  const AttentionCall a = call;
  const int row = first_row + group_at.z, kv_head = group_at.y, first = group_at.x * S::ROWS;
  const int own = m.own(row, kv_head);
  const Queries all = {q_start[row], start[own], kv_head, a.group, (q_start[row + 1] - q_start[row]) * a.group};
  if (all.start < 0 || first >= all.count) return;

  const device int* blocks = table + size_t(table_row[own]) * m.table_width;
  const Plane<const K> keys = {(const device K*)memory, blocks, planes.k, m.layout, m.head_in_block(kv_head)};
  const Plane<const V> values = {(const device V*)memory, blocks, planes.v, m.layout, m.head_in_block(kv_head)};
  const Mask mask = mask_of(a, m, window_start, all.first_token, all.start, kv_head);
  const Span span = {all.position(first), all.position(min(first + S::ROWS, all.count) - 1)};
  const Tile<N> tile = {numbers, sound};
  const int before = simdgroup * S::QUERIES;  // queries of other simdgroups
  Share<N> ours;
  ours.first = first + before;
  ours.queries = queries + before * S::WIDTH;
  ours.weights = weights + before * S::KEYS;
  ours.load(q, all, a, planes.k, lane);

  for (int begin = 0; begin <= span.newest; begin += S::KEYS) {
    if (!any_sees(span, begin, begin + S::KEYS, mask)) continue;
    tile.fetch(keys, begin, span, mask, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ours.score(tile, begin, planes.k.dim, mask, scoring, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile.fetch(values, begin, span, mask, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ours.add(tile, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  ours.write(out, all, a, sink_logits, planes.v, lane, lse);
}

#define PREFILL(N) template [[host_name("prefill_" #N)]] kernel decltype(prefill<N>) prefill<N>;
PREFILL(2) PREFILL(4) PREFILL(8)
