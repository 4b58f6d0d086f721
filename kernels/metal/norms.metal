// RMS norms, one threadgroup per row. W is the type of the norm's weight: T as in Llama, or float as in Gemma.
#include "common.h"

struct NormSizes {
  int width, x_stride, delta_stride;  // numbers of a row; numbers from row to row of x and of delta
};

// Returns to each thread the sum of `x` over all threads of the threadgroup.
inline float group_sum(float x, threadgroup float* sums, uint lane, uint simdgroup, uint simdgroups) {
  const float ours = simd_sum(x);
  if (lane == 0) sums[simdgroup] = ours;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? sums[lane] : 0.0f);
}

// Returns 1 / RMS of a row, from the sum of squares that each thread has for its part of the row.
inline float factor_of(float squares, uint width, float eps, threadgroup float* sums, uint lane, uint simdgroup,
                       uint simdgroups) {
  return rsqrt(group_sum(squares, sums, lane, simdgroup, simdgroups) / float(width) + eps);
}

// Returns x * weight; x is rounded to T before it is multiplied (Llama), or only the product is, if the weight is float
// (Gemma).
inline T weighted(float x, W weight) {
  return is_same_v<W, float> ? T(x * float(weight)) : T(float(T(x)) * float(weight));
}

// Computes the RMS norm of each row, one threadgroup per row: x [N, width] -> out [N, width].
[[max_total_threads_per_threadgroup(GROUP)]] kernel void rms_norm(
    device T* out [[buffer(0)]],
    const device T* x [[buffer(1)]],
    const device W* weight [[buffer(2)]],
    constant NormSizes& sizes [[buffer(3)]],
    constant float& eps [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[SIMDGROUPS];
  const uint width = uint(sizes.width);
  x += size_t(row) * sizes.x_stride;
  out += size_t(row) * width;
  float squares = 0.0f;
  for (uint i = thread_index; i < width; i += threads) squares += float(x[i]) * float(x[i]);
  const float factor = factor_of(squares, width, eps, sums, lane, simdgroup, simdgroups);
  for (uint i = thread_index; i < width; i += threads) out[i] = weighted(float(x[i]) * factor, weight[i]);
}

// Computes the RMS norm of x + delta, one threadgroup per row; the sum is rounded and stored in `total`. Each thread
// reads only those numbers of `total` that it wrote itself.
[[max_total_threads_per_threadgroup(GROUP)]] kernel void add_rms_norm(
    device T* total [[buffer(0)]],
    device T* out [[buffer(1)]],
    const device T* x [[buffer(2)]],
    const device T* delta [[buffer(3)]],
    const device W* weight [[buffer(4)]],
    constant NormSizes& sizes [[buffer(5)]],
    constant float& eps [[buffer(6)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[SIMDGROUPS];
  const uint width = uint(sizes.width);
  x += size_t(row) * sizes.x_stride;
  delta += size_t(row) * sizes.delta_stride;
  total += size_t(row) * width;
  out += size_t(row) * width;
  float squares = 0.0f;
  for (uint i = thread_index; i < width; i += threads) {
    const T sum = T(float(x[i]) + float(delta[i]));
    total[i] = sum;
    squares += float(sum) * float(sum);
  }
  const float factor = factor_of(squares, width, eps, sums, lane, simdgroup, simdgroups);
  for (uint i = thread_index; i < width; i += threads) out[i] = weighted(float(total[i]) * factor, weight[i]);
}
