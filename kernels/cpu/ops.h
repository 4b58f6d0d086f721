// Operations on tensors that fused operations call; kernels/ops.py says what each means.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "check.h"

namespace kvmux {

// A packed weight: its numbers; for integers also the scale and perhaps the offset [panels, groups, 16]; its shape, the
// bits of a number (0: floats), and the columns of a group.
struct PackedWeight {
  PackedWeight(at::TensorList parts, at::IntArrayRef format);

  at::Tensor numbers, scale, offset;  // scale and offset are undefined where there are none
  int64_t outputs, width, bits, group;
};

// Returns the number of elements of a packed weight; kByte: integers of 8 bits.
int64_t packed_numbers(int64_t outputs, int64_t width, at::ScalarType type);
// Returns the bias as float32, padded with zeros to whole blocks; an undefined tensor without a bias.
at::Tensor padded_bias(const std::optional<at::Tensor>& bias, const PackedWeight& weight, const char* name = "bias");
at::Tensor linear(const at::Tensor& x, const PackedWeight& weight, const std::optional<at::Tensor>& bias);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                                                double eps);
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions);
at::Tensor silu_mul(const at::Tensor& gate_up);

}  // namespace kvmux
