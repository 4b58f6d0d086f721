// Multiplies few rows of x by a weight, which is read once for several rows, as in decoding. For many rows torch is
// used.
#include "linear.h"

// One simdgroup computes OUTPUTS outputs of ROWS rows. Arguments: x [rows, inputs], weight [outputs, inputs], bias
// [outputs].
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
  for (int r = 0; r < ROWS; r++) xs[r] = row_at(x, row + r, sizes);
  for (int o = 0; o < OUTPUTS; o++)
    weights[o] = weight + size_t(min(output + o, sizes.outputs - 1)) * sizes.weight_stride;

  constexpr int STEP = 4;  // number of inputs that a lane takes in one step
  Product<ROWS> product;
  int i = lane * STEP;
  for (; i + STEP <= sizes.inputs; i += LANES * STEP) {
    for (int o = 0; o < OUTPUTS; o++) {
      for (int s = 0; s < STEP; s++) {
        const float w = float(weights[o][i + s]);
        for (int r = 0; r < ROWS; r++) product.sums[r][o] += w * float(xs[r][i + s]);
      }
    }
  }
  for (; i < sizes.inputs; i++)  // the rest of the row, less than STEP inputs, in one lane
    for (int o = 0; o < OUTPUTS; o++)
      for (int r = 0; r < ROWS; r++) product.sums[r][o] += float(weights[o][i]) * float(xs[r][i]);
  product.finish(out, bias, row, output, sizes, lane);
}

#define LINEAR(ROWS) template [[host_name("linear_" #ROWS)]] kernel decltype(linear<ROWS>) linear<ROWS>;
LINEAR(1) LINEAR(2) LINEAR(4)
