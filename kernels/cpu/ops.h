// Operations on tensors that the fused operations call; kernels/ops.py says what each one computes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "check.h"

namespace kvmux {

// A packed weight in one format: its numbers; for integers also the scales and, if there are any, offsets [panels,
// groups, 16]; its numbers of outputs and inputs, the bits of a number (0: floats), and the columns of a group. The
// numbers may be places in a codebook (block_formats.h). With two levels of scales these are [panels, blocks of 256
// columns, 16], and `small` and `small_offset` are [panels, groups, 16].
struct PackedPart {
  PackedPart(at::TensorList tensors, at::IntArrayRef layout);

  at::Tensor numbers, scale, offset, small, small_offset;  // undefined tensors where the weight has none
  int64_t outputs, width, bits, group, book;
};

// A packed weight: a part in one format, or several parts of integers in their own formats, one after the other by
// their outputs. The layouts of the parts follow each other, and so do their tensors.
struct PackedWeight {
  PackedWeight(at::TensorList tensors, at::IntArrayRef layouts);

  std::vector<PackedPart> parts;
  int64_t outputs, width;
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
at::Tensor gated(const at::Tensor& gate_up, bool gelu);  // silu or gelu (by tanh) of the first half, times the second

}  // namespace kvmux
