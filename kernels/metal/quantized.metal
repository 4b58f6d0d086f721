// Multiplies few rows of x by a weight quantized to 8 or 4 bits (`kernels.weights.quantization.QuantizedTensor`), like
// linear.metal. S is the type of scales and offsets.
#include "linear.h"

constant constexpr int STEP = 8;  // quantized numbers that a lane takes in one step; all belong to one group

struct Groups {
  int size, row;  // quantized numbers per group, and groups per row
};

// Unpacks STEP quantized numbers of BITS bits each; the first is in the lowest bits of a word.
template <int BITS>
inline void unpack(thread float* to, const device uint* from) {
  constexpr int WORD = 32 / BITS;  // numbers
  for (int s = 0; s < STEP; s++) to[s] = float((from[s / WORD] >> (s % WORD * BITS)) & ((1u << BITS) - 1u));
}

// One simdgroup computes OUTPUTS outputs of ROWS rows. Arguments: x [rows, inputs], numbers [outputs, inputs], scale
// and offset [outputs, groups]. An offset is multiplied by the sum of the inputs, not by each of them.
template <int BITS, int ROWS>
[[max_total_threads_per_threadgroup(GROUP)]] kernel void quantized_linear(
    device T* out [[buffer(0)]],
    const device T* x [[buffer(1)]],
    const device uint* numbers [[buffer(2)]],
    const device S* scale [[buffer(3)]],
    const device S* offset [[buffer(4)]],
    const device T* bias [[buffer(5)]],
    constant LinearSizes& linear_sizes [[buffer(6)]],
    constant Groups& groups [[buffer(7)]],
    uint2 group_at [[threadgroup_position_in_grid]],  // outputs, rows
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const LinearSizes sizes = linear_sizes;
  const int output = (group_at.x * SIMDGROUPS + simdgroup) * OUTPUTS, row = group_at.y * ROWS;
  if (output >= sizes.outputs) return;
  Product<ROWS> product;
  for (int i = lane * STEP; i < sizes.inputs; i += LANES * STEP) {
    float xs[ROWS][STEP], totals[ROWS] = {0.0f};
    for (int r = 0; r < ROWS; r++) {
      const device T* from = row_at(x, row + r, sizes) + i;
      for (int s = 0; s < STEP; s++) {
        xs[r][s] = float(from[s]);
        totals[r] += xs[r][s];
      }
    }
    for (int o = 0; o < OUTPUTS; o++) {
      const size_t weight_row = min(output + o, sizes.outputs - 1), group = weight_row * groups.row + i / groups.size;
      float weights[STEP];
      unpack<BITS>(weights, numbers + weight_row * sizes.weight_stride + i * BITS / 32);
      for (int r = 0; r < ROWS; r++) {
        float sum = 0.0f;
        for (int s = 0; s < STEP; s++) sum += xs[r][s] * weights[s];
        product.sums[r][o] += float(scale[group]) * sum + float(offset[group]) * totals[r];
      }
    }
  }
  product.finish(out, bias, row, output, sizes, lane);
}

struct WeightSizes {
  int inputs, weight_stride;  // numbers per row, and 32-bit words from row to row of the weight
};

// Dequantizes a weight to out [outputs, inputs], for torch to multiply; each thread dequantizes STEP numbers.
template <int BITS>
kernel void dequantize_weight(
    device T* out [[buffer(0)]],
    const device uint* numbers [[buffer(1)]],
    const device S* scale [[buffer(2)]],
    const device S* offset [[buffer(3)]],
    constant WeightSizes& sizes [[buffer(4)]],
    constant Groups& groups [[buffer(5)]],
    uint2 at [[thread_position_in_grid]]) {  // steps, output
  const int i = at.x * STEP;
  const size_t group = size_t(at.y) * groups.row + i / groups.size;
  float weights[STEP];
  unpack<BITS>(weights, numbers + size_t(at.y) * sizes.weight_stride + i * BITS / 32);
  for (int s = 0; s < STEP; s++)
    out[size_t(at.y) * sizes.inputs + i + s] = T(float(scale[group]) * weights[s] + float(offset[group]));
}

#define QUANTIZED(BITS, ROWS)                                      \
  template [[host_name("quantized_linear_" #BITS "_" #ROWS)]] kernel \
      decltype(quantized_linear<BITS, ROWS>) quantized_linear<BITS, ROWS>;
#define OF_BITS(BITS)                                                                                              \
  QUANTIZED(BITS, 1) QUANTIZED(BITS, 2) QUANTIZED(BITS, 4)                                                         \
  template [[host_name("dequantize_weight_" #BITS)]] kernel decltype(dequantize_weight<BITS>) dequantize_weight<BITS>;
OF_BITS(8) OF_BITS(4)
