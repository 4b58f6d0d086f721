// The operations that others are made of, on tensors; what each means stands in kernels/ops.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "check.h"

namespace kvmux {

// A packed weight: its numbers, and of whole numbers the scale and perhaps the offset [panels, groups, 16]; and its
// shape, bits of a number (0: floats) and columns of a group.
struct PackedWeight {
  PackedWeight(at::TensorList parts, at::IntArrayRef format);

  at::Tensor numbers, scale, offset;  // the latter two undefined where there are none
  int64_t outputs, width, bits, group;
};

// Of a whole packed weight; bytes: of 8 bits.
int64_t packed_numbers(int64_t outputs, int64_t width, at::ScalarType type);
// The bias of a product, if there is one, as float32 with zeros behind it, for whole blocks.
at::Tensor padded_bias(const std::optional<at::Tensor>& bias, const PackedWeight& weight, const char* name = "bias");
at::Tensor linear(const at::Tensor& x, const PackedWeight& weight, const std::optional<at::Tensor>& bias);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                                                double eps);
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions);
at::Tensor silu_mul(const at::Tensor& gate_up);

}  // namespace kvmux
