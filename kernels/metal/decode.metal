// Attention for rows of one token (Flash-Decoding, Dao et al. 2023). Keys are read once for all query heads that share
// them. Long sequences are cut into splits of SPLIT positions, each computed by a threadgroup; `merge` merges the sums.
//
// In a split each simdgroup takes as many positions as it has lanes. All sums are merged in the order of positions,
// counted from the beginning of the sequence. So the result depends neither on where keys lie nor on other rows, and
// has the same bits with one split and with several.
#include "attend.h"

constant constexpr int SPLIT = SIMDGROUPS * LANES;  // positions

// Writes the N numbers of a vector that belong to this lane.
template <int N, typename Stored>
inline void write_numbers(device Stored* to, const thread float* numbers, int dim, int lane) {
  for (int n = 0; n < N; n++)
    if (lane * N + n < dim) to[lane * N + n] = Stored(numbers[n]);
}

// What a simdgroup keeps for HEADS query heads of one KV head: each lane holds N numbers of their queries and sums.
template <int N, int HEADS>
struct Heads {
  float queries[HEADS * N];
  Sums<N> sums[HEADS];

  // Loads the queries of `count` heads, the first at `q` and each `stride` numbers after the one before, and rotates
  // them if keys are rotated; if count < HEADS, the last query is repeated.
  void load(const device T* q, int count, int stride, PlaneSizes keys, int lane) {
#pragma unroll  // so that queries are in registers
    for (int h = 0; h < HEADS; h++) {
      float query[N];  // a member array is not a pointer to thread from Metal 4.1 on
      read_numbers<N>(query, q + min(h, count - 1) * stride, keys.dim, lane);
      if (is_rotated<K>(keys)) rotate<N, N>(query, keys.dim, lane);
      for (int n = 0; n < N; n++) queries[h * N + n] = query[n];
    }
  }

  void add(const device K* key, int k_dim, const device V* value, int v_dim, Scoring scoring, int lane) {
    float k[N], v[N];
    read_numbers<N>(k, key, k_dim, lane);
    read_numbers<N>(v, value, v_dim, lane);
    for (int h = 0; h < HEADS; h++) {
      float product = 0.0f;
      for (int n = 0; n < N; n++) product += queries[h * N + n] * k[n];
      sums[h].add(score_of(simd_sum(product), scoring), 1.0f, v);
    }
  }

  // Adds to the sums the keys and values at positions begin .. end - 1 that the query sees.
  void attend(Plane<const K> keys, Plane<const V> values, Mask mask, Scoring scoring, int query, int begin, int end,
              int lane) {
    for (int first = begin, run; first < end; first += run) {
      run = keys.layout.run(first, end);
      const device K* key = keys.at(first);
      const device V* value = values.at(first);
      for (int i = 0; i < run; i++, key += keys.sizes.vector_stride, value += values.sizes.vector_stride)
        if (mask.sees(query, first + i)) add(key, keys.sizes.dim, value, values.sizes.dim, scoring, lane);
    }
  }
};

// Threadgroup memory in which simdgroups store their sums of one query head, to merge them in the order of positions.
template <int N>
struct Left {
  threadgroup float* tops;    // [SIMDGROUPS]
  threadgroup float* totals;  // [SIMDGROUPS]
  threadgroup float* values;  // [SIMDGROUPS, N, LANES]

  void put(Sums<N> sums, uint simdgroup, uint lane) const {
    if (lane == 0) {
      tops[simdgroup] = sums.top;
      totals[simdgroup] = sums.total;
    }
    for (int n = 0; n < N; n++) values[(simdgroup * N + n) * LANES + lane] = sums.values[n];
  }

  Sums<N> joined(uint lane) const {
    Sums<N> all;
    for (int s = 0; s < SIMDGROUPS; s++) {
      float theirs[N];
      for (int n = 0; n < N; n++) theirs[n] = values[(s * N + n) * LANES + lane];
      all.add(tops[s], totals[s], theirs);
    }
    return all;
  }
};

struct Partial {
  float top, total;
};

// Writes the sums of one query and head over a split, which `merge` reads.
template <int N>
inline void write_partial(device Partial* partial, device float* values, Sums<N> sums, int dim, int lane) {
  if (lane == 0) {
    partial->top = sums.top;
    partial->total = sums.total;
  }
  write_numbers<N>(values, sums.values, dim, lane);
}

// Writes the attention output of one query and head, after all of its keys were summed, and the logarithm of the sum of
// exp(score) unless `lse` is null; a sum of rotated values is rotated back.
template <int N>
inline void finish(device T* to, Sums<N> sums, float sink, PlaneSizes values, int lane, device float* lse) {
  sums.add_sink(sink);
  if (lse != nullptr && lane == 0) *lse = sums.lse();
  float output[N];
  for (int n = 0; n < N; n++) output[n] = sums.values[n] / sums.total;
  if (is_rotated<V>(values)) rotate<N, N>(output, values.dim, lane);
  write_numbers<N>(to, output, values.dim, lane);
}

struct Splits {
  int count, first_row;  // number of splits per sequence; number of the first row of this launch
};

// Computes attention for rows of one token: one threadgroup computes one row, HEADS query heads of one KV head, and one
// split. With a single split it writes the result to `out`; otherwise it writes its sums to `partial`
// [rows, query heads, splits] and `values` [rows, query heads, splits, Dv].
template <int N, int HEADS>
[[max_total_threads_per_threadgroup(GROUP)]] kernel void decode(
    device T* out [[buffer(0)]],
    device Partial* partial [[buffer(1)]],
    device float* values [[buffer(2)]],
    const device T* q [[buffer(3)]],
    const device uchar* memory [[buffer(4)]],
    const device int* table [[buffer(5)]],
    const device int* table_row [[buffer(6)]],
    const device int* q_start [[buffer(7)]],
    const device int* start [[buffer(8)]],
    const device int* window_start [[buffer(9)]],
    const device float* sink_logits [[buffer(10)]],
    device float* lse [[buffer(11)]],
    constant Memory& memory_sizes [[buffer(12)]],
    constant Planes& plane_sizes [[buffer(13)]],
    constant AttentionCall& call [[buffer(14)]],
    constant Scoring& scoring [[buffer(15)]],
    constant Splits& splits [[buffer(16)]],
    uint3 group_at [[threadgroup_position_in_grid]],  // indices: KV head and part of its query heads, row, split
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(HEADS <= SIMDGROUPS, "each query head needs a simdgroup that merges its sums");
  threadgroup float tops[SIMDGROUPS], totals[SIMDGROUPS], shared[SIMDGROUPS * LANES * N];
  const Memory m = memory_sizes;
  const Planes planes = plane_sizes;
  const AttentionCall a = call;
  const int row = splits.first_row + group_at.y, split = group_at.z;
  const int parts = (a.group + HEADS - 1) / HEADS;
  const int kv_head = group_at.x / parts, first = group_at.x % parts * HEADS;
  const int own = m.own(row, kv_head);
  const int query = start[own];
  if (query < split * SPLIT) return;  // a padding row, or its sequence ends before this split
  const int first_head = kv_head * a.group + first, heads = min(HEADS, a.group - first);

  const device int* blocks = table + size_t(table_row[own]) * m.table_width;
  const Plane<const K> key_plane = {(const device K*)memory, blocks, planes.k, m.layout, m.head_in_block(kv_head)};
  const Plane<const V> value_plane = {(const device V*)memory, blocks, planes.v, m.layout, m.head_in_block(kv_head)};
  const Mask mask = mask_of(a, m, window_start, q_start[row], query, kv_head);
  const int begin = split * SPLIT + simdgroup * LANES;
  q += size_t(q_start[row]) * a.q_token;
  out += size_t(q_start[row]) * a.out_token;
  Heads<N, HEADS> ours;
  ours.load(q + size_t(first_head) * a.q_head, heads, a.q_head, planes.k, lane);
  ours.attend(key_plane, value_plane, mask, scoring, query, begin, min(begin + LANES, query + 1), lane);

  const Left<N> left = {tops, totals, shared};
#pragma unroll  // all HEADS, so that no sum is looked up by its index: sums in registers have none
  for (int h = 0; h < HEADS; h++) {
    if (h >= heads) break;
    left.put(ours.sums[h], simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == uint(h)) {
      const Sums<N> all = left.joined(lane);
      const int head = first_head + h;
      const size_t at = (size_t(group_at.y) * a.q_heads + head) * splits.count + split;
      if (splits.count == 1)
        finish(out + size_t(head) * a.out_head, all, sink_logits[head], planes.v, lane,
               lse_of(lse, a, q_start[row], head));
      else
        write_partial(partial + at, values + at * planes.v.dim, all, planes.v.dim, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// One simdgroup merges the sums of all splits of one row and query head into `out`.
template <int N>
kernel void merge(
    device T* out [[buffer(0)]],
    const device Partial* partial [[buffer(1)]],
    const device float* values [[buffer(2)]],
    const device int* q_start [[buffer(3)]],
    const device int* start [[buffer(4)]],
    const device float* sink_logits [[buffer(5)]],
    device float* lse [[buffer(6)]],
    constant Memory& memory_sizes [[buffer(7)]],
    constant AttentionCall& call [[buffer(8)]],
    constant Splits& splits [[buffer(9)]],
    constant PlaneSizes& value_sizes [[buffer(10)]],
    uint3 at [[thread_position_in_grid]]) {  // lane, query head, row
  const AttentionCall a = call;
  const Memory m = memory_sizes;
  const PlaneSizes v = value_sizes;
  const int lane = at.x, head = at.y, row = splits.first_row + at.z;
  const int query = start[m.own(row, head / a.group)];
  if (query < 0) return;
  Sums<N> all;
  for (int split = 0; split <= query / SPLIT; split++) {
    const size_t from = (size_t(at.z) * a.q_heads + head) * splits.count + split;
    float theirs[N];
    read_numbers<N>(theirs, values + from * v.dim, v.dim, lane);
    all.add(partial[from].top, partial[from].total, theirs);
  }
  const int token = q_start[row];
  out += size_t(token) * a.out_token + size_t(head) * a.out_head;
  finish(out, all, sink_logits[head], v, lane, lse_of(lse, a, token, head));
}

#define DECODE(N, HEADS) \
  template [[host_name("decode_" #N "_" #HEADS)]] kernel decltype(decode<N, HEADS>) decode<N, HEADS>;
#define WIDTH(N) \
  template [[host_name("merge_" #N)]] kernel decltype(merge<N>) merge<N>; \
  DECODE(N, 1) DECODE(N, 2) DECODE(N, 4)

WIDTH(2) WIDTH(4) WIDTH(8)
// There is no kernel for 8 query heads with N = 8, as it would need too many registers: see MAX_HEADS_PER_GROUP in
// attention.py.
DECODE(2, 8) DECODE(4, 8)
