// Attention of rows of one token (Flash-Decoding, Dao et al. 2023): keys are read once for all query heads that share
// them, and long texts are cut into splits of SPLIT positions, each a threadgroup's, whose sums `merge` joins.
//
// In a split each simdgroup takes as many positions as it has lanes. All sums are joined in the order of positions, which
// is counted from the text's beginning; so the result depends neither on where keys lie nor on what else is computed, and
// has the same bits in one pass and in two.
#include "attend.h"

constant constexpr int SPLIT = SIMDGROUPS * LANES;  // positions

// N numbers of a vector, those of this lane; 0 beyond its end.
template <int N, typename Stored>
inline void read_numbers(thread float* to, const device Stored* from, int dim, int lane) {
  for (int n = 0; n < N; n++) to[n] = lane * N + n < dim ? float(from[lane * N + n]) : 0.0f;
}

template <int N>
inline void write_result(device T* to, Sums<N> sums, int dim, int lane) {
  for (int n = 0; n < N; n++)
    if (lane * N + n < dim) to[lane * N + n] = T(sums.values[n] / sums.total);
}

// The keys at [begin, end) of one KV head into the sums of the HEADS queries that share it.
template <int N, int HEADS>
inline void attend_keys(thread Sums<N>* sums, const thread float* q, const device KV* memory,
                        const device int* blocks, Memory m, Attending a, Scoring scoring, int head, int query, int begin,
                        int end, int lane) {
  for (int first = begin, run; first < end; first += run) {
    run = m.layout.run(first, end);
    const int slot = m.layout.slot(first);
    const device KV* key = memory + m.k.at(blocks, m.layout.block_size, slot, head);
    const device KV* value = memory + m.v.at(blocks, m.layout.block_size, slot, head);
    for (int i = 0; i < run; i++, key += m.k.vector_stride, value += m.v.vector_stride) {
      if (!sees(query, first + i, a, m.layout.sinks)) continue;
      float k[N], v[N];
      read_numbers<N>(k, key, m.k.dim, lane);
      read_numbers<N>(v, value, m.v.dim, lane);
      const float k_scale = scale_of(key, m.k.dim), v_scale = scale_of(value, m.v.dim);
      for (int n = 0; n < N; n++) v[n] *= v_scale;
      for (int h = 0; h < HEADS; h++) {
        float product = 0.0f;
        for (int n = 0; n < N; n++) product += q[h * N + n] * k[n];
        sums[h].add(score_of(simd_sum(product) * k_scale, scoring), 1.0f, v);
      }
    }
  }
}

struct Partial {
  float top, total;
};

struct Splits {
  int count, first_row;  // of each text; the row that the launch begins with
};

// A threadgroup: one row, HEADS query heads of one KV head, one split. If there is one split only, the result goes to `out`;
// otherwise its sums go to `partial` [rows, query heads, splits] and `values` [rows, query heads, splits, Dv].
template <int N, int HEADS>
[[max_total_threads_per_threadgroup(GROUP)]] kernel void decode(
    device T* out [[buffer(0)]],
    device Partial* partial [[buffer(1)]],
    device float* values [[buffer(2)]],
    const device T* q [[buffer(3)]],
    const device KV* memory [[buffer(4)]],
    const device int* table [[buffer(5)]],
    const device int* row_seat [[buffer(6)]],
    const device int* q_start [[buffer(7)]],
    const device int* start [[buffer(8)]],
    const device float* sink_logits [[buffer(9)]],
    constant Memory& memory_sizes [[buffer(10)]],
    constant Attending& attending [[buffer(11)]],
    constant Scoring& scoring [[buffer(12)]],
    constant Splits& splits [[buffer(13)]],
    uint3 group_at [[threadgroup_position_in_grid]],  // KV head and which of its heads, row, split
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float tops[SIMDGROUPS], totals[SIMDGROUPS], shared[SIMDGROUPS * LANES * N];
  const Memory m = memory_sizes;
  const Attending a = attending;
  const int row = splits.first_row + group_at.y, split = group_at.z;
  const int query = start[row];
  if (query < split * SPLIT) return;  // padding, or a text that ends before
  const int parts = (a.group + HEADS - 1) / HEADS;
  const int kv_head = group_at.x / parts, first_head = group_at.x % parts * HEADS;
  const int heads = min(HEADS, a.group - first_head);
  q += size_t(q_start[row]) * a.q_token + size_t(kv_head * a.group + first_head) * a.q_head;

  Sums<N> sums[HEADS];
  float queries[HEADS * N];
  for (int h = 0; h < HEADS; h++) read_numbers<N>(queries + h * N, q + min(h, heads - 1) * a.q_head, m.k.dim, lane);
  const int begin = split * SPLIT + simdgroup * LANES;
  attend_keys<N, HEADS>(sums, queries, memory, table + size_t(row_seat[row]) * m.table_width, m, a, scoring, kv_head,
                        query, begin, min(begin + LANES, query + 1), lane);

  for (int h = 0; h < heads; h++) {
    if (lane == 0) {
      tops[simdgroup] = sums[h].top;
      totals[simdgroup] = sums[h].total;
    }
    for (int n = 0; n < N; n++) shared[(simdgroup * N + n) * LANES + lane] = sums[h].values[n];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == uint(h) % SIMDGROUPS) {
      Sums<N> all;
      for (int s = 0; s < SIMDGROUPS; s++) {
        float theirs[N];
        for (int n = 0; n < N; n++) theirs[n] = shared[(s * N + n) * LANES + lane];
        all.add(tops[s], totals[s], theirs);
      }
      const int head = kv_head * a.group + first_head + h;
      if (splits.count == 1) {
        all.add_sink(sink_logits[head]);
        write_result(out + size_t(q_start[row]) * a.out_token + size_t(head) * a.out_head, all, m.v.dim, lane);
      } else {
        const size_t at = (size_t(group_at.y) * a.q_heads + head) * splits.count + split;
        if (lane == 0) {
          partial[at].top = all.top;
          partial[at].total = all.total;
        }
        for (int n = 0; n < N; n++)
          if (lane * N + n < uint(m.v.dim)) values[at * m.v.dim + lane * N + n] = all.values[n];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// A simdgroup: the splits of one row and query head.
template <int N>
kernel void merge(
    device T* out [[buffer(0)]],
    const device Partial* partial [[buffer(1)]],
    const device float* values [[buffer(2)]],
    const device int* q_start [[buffer(3)]],
    const device int* start [[buffer(4)]],
    const device float* sink_logits [[buffer(5)]],
    constant Attending& attending [[buffer(6)]],
    constant Splits& splits [[buffer(7)]],
    constant int& dim [[buffer(8)]],
    uint3 at [[thread_position_in_grid]]) {  // lane, query head, row
  const Attending a = attending;
  const int lane = at.x, head = at.y, row = splits.first_row + at.z;
  if (start[row] < 0) return;
  Sums<N> all;
  for (int split = 0; split <= start[row] / SPLIT; split++) {
    const size_t from = (size_t(at.z) * a.q_heads + head) * splits.count + split;
    float theirs[N];
    read_numbers<N>(theirs, values + from * dim, dim, lane);
    all.add(partial[from].top, partial[from].total, theirs);
  }
  all.add_sink(sink_logits[head]);
  write_result(out + size_t(q_start[row]) * a.out_token + size_t(head) * a.out_head, all, dim, lane);
}

#define DECODE(N, HEADS) \
  template [[host_name("decode_" #N "_" #HEADS)]] kernel decltype(decode<N, HEADS>) decode<N, HEADS>;
#define WIDTH(N) \
  template [[host_name("merge_" #N)]] kernel decltype(merge<N>) merge<N>; \
  DECODE(N, 1) DECODE(N, 2) DECODE(N, 4)

WIDTH(2) WIDTH(4) WIDTH(8)
DECODE(2, 8) DECODE(4, 8)
