// A few rows times a weight, which is read once for all of them: that is what decoding is. Many rows are torch's.
#include "common.h"

constant constexpr int OUTPUTS = 4;  // of a simdgroup

struct LinearSizes {
  int rows, inputs, outputs, x_stride, weight_stride, biased;
};

// The simdgroup's sums into out [rows, outputs]; each lane has its part of them.
template <int ROWS>
inline void finish(device T* out, const device T* bias, thread float (&sums)[ROWS][OUTPUTS], int row, int output,
                   LinearSizes sizes, uint lane) {
  for (int r = 0; r < ROWS; r++) {
    for (int o = 0; o < OUTPUTS; o++) {
      const float sum = simd_sum(sums[r][o]);
      if (lane == 0 && row + r < sizes.rows && output + o < sizes.outputs)
        out[size_t(row + r) * sizes.outputs + output + o] = T(sizes.biased ? sum + float(bias[output + o]) : sum);
    }
  }
}

// A simdgroup OUTPUTS outputs of ROWS rows: x [rows, inputs], weight [outputs, inputs], bias [outputs].
template <int ROWS>
[[max_total_threads_per_threadgroup(GROUP)]] kernel void linear(
    device T* out [[buffer(0)]],
    const device T* x [[buffer(1)]],
    const device T* weight [[buffer(2)]],
    const device T* bias [[buffer(3)]],
    constant LinearSizes& linear_sizes [[buffer(4)]],
    uint2 group_at [[threadgroup_position_in_grid]],  // outputs, rows
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const LinearSizes sizes = linear_sizes;
  const int output = (group_at.x * SIMDGROUPS + simdgroup) * OUTPUTS, row = group_at.y * ROWS;
  if (output >= sizes.outputs) return;
  const device T* xs[ROWS];
  const device T* weights[OUTPUTS];
  for (int r = 0; r < ROWS; r++) xs[r] = x + size_t(min(row + r, sizes.rows - 1)) * sizes.x_stride;
  for (int o = 0; o < OUTPUTS; o++) weights[o] = weight + size_t(min(output + o, sizes.outputs - 1)) * sizes.weight_stride;

  constexpr int STEP = 4;  // inputs that a lane takes at once
  float sums[ROWS][OUTPUTS] = {{0.0f}};
  int i = lane * STEP;
  for (; i + STEP <= sizes.inputs; i += LANES * STEP) {
    for (int o = 0; o < OUTPUTS; o++) {
      for (int s = 0; s < STEP; s++) {
        const float w = float(weights[o][i + s]);
        for (int r = 0; r < ROWS; r++) sums[r][o] += w * float(xs[r][i + s]);
      }
    }
  }
  for (; i < sizes.inputs; i++)  // at most one lane has a part of a step left
    for (int o = 0; o < OUTPUTS; o++)
      for (int r = 0; r < ROWS; r++) sums[r][o] += float(weights[o][i]) * float(xs[r][i]);
  finish<ROWS>(out, bias, sums, row, output, sizes, lane);
}

#define LINEAR(ROWS) template [[host_name("linear_" #ROWS)]] kernel decltype(linear<ROWS>) linear<ROWS>;
LINEAR(1) LINEAR(2) LINEAR(4)
