// Writes keys and values to the store, reads them, and copies blocks and tokens. K and V are the types in which keys
// and values are stored.
#include "vectors.h"

constant constexpr float TINY = 1e-30f;  // least divisor in rounding, so that nothing is divided by 0

// ---------------------------------------------------------------- write_kv: one simdgroup writes a vector
inline void write_vector(const device T* from, device T* to, PlaneSizes sizes, uint lane) {
  for (int i = lane; i < sizes.dim; i += LANES) to[i] = from[i];
}

// Rounds to int8: the largest magnitude becomes 127, halves are rounded to even. The scale is NaN if one of the numbers
// is not finite.
constant constexpr float LARGEST = 127.0f;
inline void write_vector(const device T* from, device char* to, PlaneSizes sizes, uint lane) {
  const int n = sizes.dim;
  float largest = 0.0f;
  for (int i = lane; i < n; i += LANES) largest = max(largest, fabs(float(from[i])));
  const float scale = simd_max(largest) / LARGEST, divisor = max(scale, TINY);
  for (int i = lane; i < n; i += LANES) to[i] = char(rint(float(from[i]) / divisor));
  bool sound = true;
  for (int i = lane; i < n; i += LANES) sound = sound && is_number(float(from[i]));
  sound = simd_all(sound);
  if (lane == 0) *(device float*)(to + n) = sound ? scale : as_type<float>(NO_NUMBER);
}

// Rounds to int4. Each lane holds EIGHT numbers, whose group is in the same lanes.
constant constexpr int EIGHT = MOST_NUMBERS, LANES_OF_GROUP = MOST_GROUPED / EIGHT;
constant constexpr float LARGEST_FLOAT = 3.402823466e+38f;

// Returns the bits of a float rounded to a bfloat, halves to even.
inline uint bfloat_bits(float x) {
  const uint bits = as_type<uint>(x);
  return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

// How the numbers of half a group are rounded: the one of the largest magnitude, of two such numbers the negative one,
// becomes -8. The scale is stored as NaN if one of the numbers, or the scale itself, is not finite.
struct Rounding {
  float scale;
  bool sound;

  // `from` and `to`: which of the lane's numbers are in this half.
  Rounding(const thread float* numbers, int from, int to) {
    float least = LARGEST_FLOAT, largest = -LARGEST_FLOAT, finite = 1.0f;
    for (int n = 0; n < EIGHT; n++) {
      if (n < from || n >= to) continue;
      least = min(least, numbers[n]);
      largest = max(largest, numbers[n]);
      finite = is_number(numbers[n]) ? finite : 0.0f;
    }
    for (int distance = 1; distance < LANES_OF_GROUP; distance *= 2) {
      least = min(least, simd_shuffle_xor(least, ushort(distance)));
      largest = max(largest, simd_shuffle_xor(largest, ushort(distance)));
      finite = min(finite, simd_shuffle_xor(finite, ushort(distance)));
    }
    scale = as_type<float>(bfloat_bits((largest > -least ? largest : least) / -8.0f) << 16);
    sound = finite != 0.0f && is_number(scale);
  }

  uint round(float x) const {
    const float divisor = fabs(scale) > TINY ? scale : TINY;
    return sound ? uint(clamp(rint(x / divisor) + float(MIDDLE), 0.0f, 15.0f)) : uint(MIDDLE);
  }

  // Returns the scale as it is stored.
  uint bits() const { return sound ? as_type<uint>(scale) >> 16 : 0x7FC0u; }
};

inline void write_vector(const device T* from, device uchar* to, PlaneSizes sizes, uint lane) {
  const int first = lane * EIGHT, dim = sizes.dim;
  const bool there = first < dim;
  float numbers[EIGHT];
  read_numbers<EIGHT>(numbers, from, dim, lane);
  if (is_rotated<uchar>(sizes)) rotate<EIGHT, EIGHT>(numbers, dim, lane);
  const Grouped at = Grouped(there ? first : 0, dim);
  const int middle = there ? at.begin + at.size / 2 - first : 0;  // the lane's first number of the second half
  const Rounding lower = Rounding(numbers, 0, there ? middle : 0), upper = Rounding(numbers, middle, there ? EIGHT : 0);
  uint integers[2] = {0, 0};  // of four numbers each, in the low bits of four bytes
  for (int n = 0; n < EIGHT; n++)
    integers[n / 4] |= (n < middle ? lower.round(numbers[n]) : upper.round(numbers[n])) << (n % 4 * 8);
  // Lane i of a group writes word i of its bytes: fours i and n / 8 + i, which are in other lanes.
  const int begin = there ? at.begin / EIGHT : lane, i = lane - begin, high = there ? at.size / 8 + i : 0;
  uint words[2];
  for (int w = 0; w < 2; w++) {
    const int four = w == 0 ? i : high;
    const uint even = simd_shuffle(integers[0], ushort(begin + four / 2));
    const uint odd = simd_shuffle(integers[1], ushort(begin + four / 2));
    words[w] = four % 2 == 0 ? even : odd;
  }
  if (!there) return;
  ((device uint*)(to + at.begin / 2))[i] = words[0] | words[1] << 4;
  if (i == 0) ((device uint*)(to + dim / 2))[at.begin / MOST_GROUPED] =
        lower.bits() | upper.bits() << 16;
}

struct Entering {
  int k_token, k_head, v_token, v_head;  // strides in numbers
};

// Writes k [N, H, D] and v [N, H, Dv] to their slots, one simdgroup per token and head.
kernel void write_kv(
    device uchar* memory [[buffer(0)]],
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
  const Plane<K> keys = {(device K*)memory, blocks, planes.k, m.layout, m.head_in_block(head)};
  const Plane<V> values = {(device V*)memory, blocks, planes.v, m.layout, m.head_in_block(head)};
  const int index = start[own] + token - q_start[row];
  k += size_t(token) * entering.k_token + size_t(head) * entering.k_head;
  v += size_t(token) * entering.v_token + size_t(head) * entering.v_head;
  write_vector(k, keys.at(index), planes.k, at.x);
  write_vector(v, values.at(index), planes.v, at.x);
}

// ---------------------------------------------------------------- gather
typedef conditional_t<is_same_v<K, T>, T, float> PlainK;
typedef conditional_t<is_same_v<V, T>, T, float> PlainV;

inline void read_vector(device T* out, const device T* from, PlaneSizes sizes, uint lane) {
  for (int i = lane; i < sizes.dim; i += LANES) out[i] = from[i];
}

inline void read_vector(device float* out, const device char* from, PlaneSizes sizes, uint lane) {
  const float scale = *(const device float*)(from + sizes.dim);
  for (int i = lane; i < sizes.dim; i += LANES) out[i] = float(from[i]) * scale;
}

inline void read_vector(device float* out, const device uchar* from, PlaneSizes sizes, uint lane) {
  float numbers[EIGHT];
  read_numbers<EIGHT>(numbers, from, sizes.dim, lane);
  if (is_rotated<uchar>(sizes)) rotate<EIGHT, EIGHT>(numbers, sizes.dim, lane);
  for (int n = 0; n < EIGHT; n++)
    if (int(lane) * EIGHT + n < sizes.dim) out[lane * EIGHT + n] = numbers[n];
}

// Reads the keys and values of one row's tokens with indices [S], or [S, H] if heads have addresses of their own, ->
// k [S, H, D] and v [S, H, Dv], as float if they are stored as integers; one simdgroup per token and head.
kernel void gather(
    device PlainK* k [[buffer(0)]],
    device PlainV* v [[buffer(1)]],
    const device uchar* memory [[buffer(2)]],
    const device int* table [[buffer(3)]],
    const device int* table_row [[buffer(4)]],
    const device long* indices [[buffer(5)]],
    constant Memory& sizes [[buffer(6)]],
    constant Planes& plane_sizes [[buffer(7)]],
    constant int& row [[buffer(8)]],
    uint3 at [[thread_position_in_grid]],  // lane, head, token
    uint3 grid [[threads_per_grid]]) {
  const Memory m = sizes;
  const Planes planes = plane_sizes;
  const int head = at.y;
  const device int* blocks = table + size_t(table_row[m.own(row, head)]) * m.table_width;
  const Plane<const K> keys = {(const device K*)memory, blocks, planes.k, m.layout, m.head_in_block(head)};
  const Plane<const V> values = {(const device V*)memory, blocks, planes.v, m.layout, m.head_in_block(head)};
  const int index = int(indices[m.own(int(at.z), head)]);
  const size_t vector = size_t(at.z) * grid.y + at.y;
  read_vector(k + vector * planes.k.dim, keys.at(index), planes.k, at.x);
  read_vector(v + vector * planes.v.dim, values.at(index), planes.v, at.x);
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
// Whatever the format of keys and values, they are copied as 16-bit units, in which all strides are counted.
//
// How the slots of tokens are stored, for what is read and for what is written: the number of slots of a block, and
// strides from token to token, and from head to head (0: all heads have the same).
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
inline void copy_vector(device ushort* to, const device ushort* from, PlaneSizes p, uint lane) {
  for (int i = lane; i < int(p.vector_stride); i += LANES) to[i] = from[i];
}

// Copies keys and values from slots src of one memory to slots dst of another, one simdgroup per token and head.
kernel void copy_tokens(
    device ushort* to [[buffer(0)]],
    const device ushort* from [[buffer(1)]],
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
