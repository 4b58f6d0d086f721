// Operations on tensors that the fused operations call; kernels/ops.py says what each one computes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "check.h"

namespace kvmux {

// A packed weight: its numbers; for integers also the scales and, if there are any, offsets [panels, groups, 16]; its
// numbers of outputs and inputs, the bits of a number (0: floats), and the columns of a group.
struct PackedWeight {
  PackedWeight(at::TensorList parts, at::IntArrayRef format);

  at::Tensor numbers, scale, offset;  // scale and offset are undefined tensors if the weight has none
  int64_t outputs, width, bits, group;
};

// Returns how many elements a packed weight's tensor has, padding included; kByte stands for integers of 8 bits.
int64_t packed_numbers(int64_t outputs, int64_t width, at::ScalarType type);
// Returns a bias as float32, padded with zeros to whole blocks of outputs; an undefined tensor if no bias is given.
at::Tensor padded_bias(const std::optional<at::Tensor>& bias, const PackedWeight& weight, const char* name = "bias");
at::Tensor linear(const at::Tensor& x, const PackedWeight& weight, const std::optional<at::Tensor>& bias);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                                                double eps);
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions);
at::Tensor silu_mul(const at::Tensor& gate_up);

}  // namespace kvmux
