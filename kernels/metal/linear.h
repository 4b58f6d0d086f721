// What a simdgroup sums in a product: OUTPUTS outputs of some rows; each lane has a part of every sum.
#pragma once

#include "common.h"

constant constexpr int OUTPUTS = 4;

struct LinearSizes {
  int rows, inputs, outputs;
  int x_stride;       // in numbers
  int weight_stride;  // stride of the weight in numbers of T, or in 32-bit words if it is quantized
  int biased;         // 0 if there is no bias, otherwise 1
};

// The sums of OUTPUTS outputs for ROWS rows of x.
template <int ROWS>
struct Product {
  float sums[ROWS][OUTPUTS] = {{0.0f}};

  // Adds up the parts of all lanes and the bias, and writes the sums to out [rows, outputs], from `row` and `output`
  // on.
  void finish(device T* out, const device T* bias, int row, int output, LinearSizes sizes, uint lane) const {
    for (int r = 0; r < ROWS; r++) {
      for (int o = 0; o < OUTPUTS; o++) {
        const float sum = simd_sum(sums[r][o]);
        if (lane == 0 && row + r < sizes.rows && output + o < sizes.outputs)
          out[size_t(row + r) * sizes.outputs + output + o] = T(sizes.biased ? sum + float(bias[output + o]) : sum);
      }
    }
  }
};

// Returns a pointer to a row of x; if `row` is beyond the end, to the last row.
inline const device T* row_at(const device T* x, int row, LinearSizes sizes) {
  return x + size_t(min(row, sizes.rows - 1)) * sizes.x_stride;
}
