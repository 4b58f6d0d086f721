// Writes keys and values to the store, reads them, and copies blocks and tokens. KV is the type in which their numbers are stored.
#include "slots.h"

// ---------------------------------------------------------------- int8
constant constexpr float LARGEST = 127.0f;
constant constexpr float TINY = 1e-30f;  // least divisor in quantizing, so that nothing is divided by 0

// One simdgroup quantizes a vector of n numbers to int8: the largest magnitude becomes 127, halves are rounded to even.
// Returns the scale to each lane; it is NaN if one of the numbers is not finite.
inline float quantize_vector(const device T* from, device char* to, int n, uint lane) {
  float largest = 0.0f;
  for (int i = lane; i < n; i += LANES) largest = max(largest, fabs(float(from[i])));
  const float scale = simd_max(largest) / LARGEST, divisor = max(scale, TINY);
  for (int i = lane; i < n; i += LANES) to[i] = char(rint(float(from[i]) / divisor));
  bool sound = true;
  for (int i = lane; i < n; i += LANES) sound = sound && is_number(float(from[i]));
  return simd_all(sound) ? scale : as_type<float>(NO_NUMBER);
}

// ---------------------------------------------------------------- write_kv
inline void write_vector(const device T* from, device T* to, int n, uint lane) {
  for (int i = lane; i < n; i += LANES) to[i] = from[i];
}

inline void write_vector(const device T* from, device char* to, int n, uint lane) {
  const float scale = quantize_vector(from, to, n, lane);
  if (lane == 0) *(device float*)(to + n) = scale;
}

struct Entering {
  int k_token, k_head, v_token, v_head;  // strides in numbers
};

// Writes k [N, H, D] and v [N, H, Dv] to their slots, one simdgroup per token and head.
kernel void write_kv(
    device KV* memory [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device int* table [[buffer(3)]],
    const device int* table_row [[buffer(4)]],
    const device int* q_start [[buffer(5)]],
    const device int* start [[buffer(6)]],
    constant Memory& sizes [[buffer(7)]],
    constant Planes& plane_sizes [[buffer(8)]],
    constant Entering& entering [[buffer(9)]],
    uint3 at [[thread_position_in_grid]]) {  // lane, head, token
  const Memory m = sizes;
  const Planes planes = plane_sizes;
  const int token = at.z, head = at.y;
  const int row = row_of(token, q_start, m.rows);
  const int own = m.own(row, head);
  if (start[own] < 0 || token >= q_start[m.rows]) return;
  const device int* blocks = table + size_t(table_row[own]) * m.table_width;
  const Plane<KV> keys = {memory, blocks, planes.k, m.layout, m.head_in_block(head)};
  const Plane<KV> values = {memory, blocks, planes.v, m.layout, m.head_in_block(head)};
  const int index = start[own] + token - q_start[row];
  k += size_t(token) * entering.k_token + size_t(head) * entering.k_head;
  v += size_t(token) * entering.v_token + size_t(head) * entering.v_head;
  write_vector(k, keys.at(index), planes.k.dim, at.x);
  write_vector(v, values.at(index), planes.v.dim, at.x);
}

// ---------------------------------------------------------------- gather
typedef conditional_t<is_same_v<KV, char>, float, KV> Plain;

inline T number_of(const device T* vector, int i, int) { return vector[i]; }
inline float number_of(const device char* vector, int i, int dim) { return float(vector[i]) * scale_of(vector, dim); }

// Reads the keys or values of one row's tokens with indices [S], or [S, H] if heads have addresses of their own, -> out
// [S, H, dim], as float if they are stored as int8; one simdgroup per token and head.
kernel void gather(
    device Plain* out [[buffer(0)]],
    const device KV* memory [[buffer(1)]],
    const device int* table [[buffer(2)]],
    const device int* table_row [[buffer(3)]],
    const device long* indices [[buffer(4)]],
    constant Memory& sizes [[buffer(5)]],
    constant PlaneSizes& plane_sizes [[buffer(6)]],
    constant int& row [[buffer(7)]],
    uint3 at [[thread_position_in_grid]],  // lane, head, token
    uint3 grid [[threads_per_grid]]) {
  const Memory m = sizes;
  const PlaneSizes p = plane_sizes;
  const int head = at.y;
  const device int* blocks = table + size_t(table_row[m.own(row, head)]) * m.table_width;
  const Plane<const KV> plane = {memory, blocks, p, m.layout, m.head_in_block(head)};
  const device KV* vector = plane.at(int(indices[m.own(int(at.z), head)]));
  out += (size_t(at.z) * grid.y + at.y) * p.dim;
  for (int i = at.x; i < p.dim; i += LANES) out[i] = number_of(vector, i, p.dim);
}

// ---------------------------------------------------------------- copy_blocks
// Copies blocks, 16 bytes per thread. `pairs` [n]: ids of source and destination blocks; block number b begins at byte
// b * page * 16 of memory. A large block is copied in parts, one per launch; `memory` points to the launch's part of
// block 0.
kernel void copy_blocks(
    device uint4* memory [[buffer(0)]],
    constant int2* pairs [[buffer(1)]],
    constant long& page [[buffer(2)]],
    uint2 at [[thread_position_in_grid]]) {  // 16 bytes, pair
  const int2 pair = pairs[at.y];
  memory[size_t(pair.y) * page + at.x] = memory[size_t(pair.x) * page + at.x];
}

// ---------------------------------------------------------------- copy_tokens
// How the slots of tokens are stored, for what is read and for what is written: the number of slots of a block, and
// strides in numbers from token to token, and from head to head (0: all heads have the same).
struct CopiedSlots {
  long src_block_size, src_token, src_head, dst_block_size, dst_token, dst_head;
};

// A slot of one head: its keys or values begin at index(planes.k) or index(planes.v).
struct HeadSlot {
  long slot, block_size;
  int head;

  size_t index(PlaneSizes p) const {
    return size_t(slot / block_size) * p.block_stride + p.offset + size_t(head) * p.head_stride +
           size_t(slot % block_size) * p.vector_stride;
  }
};

// One simdgroup copies a stored vector. A scale is part of its vector.
inline void copy_vector(device KV* to, const device KV* from, PlaneSizes p, uint lane) {
  for (int i = lane; i < int(p.vector_stride); i += LANES) to[i] = from[i];
}

// Copies keys and values from slots src of one memory to slots dst of another, one simdgroup per token and head.
kernel void copy_tokens(
    device KV* to [[buffer(0)]],
    const device KV* from [[buffer(1)]],
    const device long* src [[buffer(2)]],
    const device long* dst [[buffer(3)]],
    constant Planes& to_planes [[buffer(4)]],
    constant Planes& from_planes [[buffer(5)]],
    constant CopiedSlots& slots [[buffer(6)]],
    uint3 at [[thread_position_in_grid]]) {  // lane, head, token
  const Planes written = to_planes, read = from_planes;
  const CopiedSlots s = slots;
  const HeadSlot source = {src[at.z * s.src_token + at.y * s.src_head], s.src_block_size, int(at.y)};
  const HeadSlot target = {dst[at.z * s.dst_token + at.y * s.dst_head], s.dst_block_size, int(at.y)};
  copy_vector(to + target.index(written.k), from + source.index(read.k), read.k, at.x);
  copy_vector(to + target.index(written.v), from + source.index(read.v), read.v, at.x);
}
