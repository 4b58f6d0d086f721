// Products with weights as torch sees them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "linear.h"
#include "quantised.h"
#include "sharing.h"

namespace kvmux {
namespace {

using at::Tensor;

// y [rows, outputs] = x [rows, k] times weight [outputs, k], plus bias: x rounded to the weights' type, y to x's.
template <typename T, typename X>
void linear_as(const Tensor& y, const Tensor& x, const Tensor& weight, const T* bias) {
  const int64_t rows = x.size(0), outputs = weight.size(0), k = weight.size(1), pitch = weight.stride(0);
  const Tensor grouped = at::empty({rows, (k + GROUP<T> - 1) / GROUP<T> * GROUP<T>}, at::kFloat);
  float* const numbers = grouped.data_ptr<float>();
  const X* from = x.const_data_ptr<X>();
  over_rows(rows, k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) group_row<T>(from + row * x.stride(0), k, row, rows, numbers);
  });
  const T* weights = weight.const_data_ptr<T>();
  X* to = y.data_ptr<X>();
  over_rows(outputs, k, [&](int64_t begin, int64_t end) {
    const auto some = [&](auto n, int64_t first) {
      linear_weights<T, n>(numbers, rows, weights + first * pitch, pitch, k, [&](int64_t row, int64_t i, float number) {
        const float added = bias == nullptr ? 0.f : static_cast<float>(bias[first + i]);
        to[row * outputs + first + i] = static_cast<X>(number + added);
      });
    };
    int64_t first = begin;
    for (; first + WEIGHTS <= end; first += WEIGHTS) some(std::integral_constant<int, WEIGHTS>{}, first);
    for (; first < end; ++first) some(std::integral_constant<int, 1>{}, first);
  });
}

bool dense(const Tensor& t) { return t.size(-1) <= 1 || t.stride(-1) == 1; }

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), "x ", x.sizes(), " and weight ",
              weight.sizes(), " cannot be multiplied");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)), "one bias for each row of the weight");
  TORCH_CHECK(dense(x) && dense(weight) && (!bias || dense(*bias)), "the last dimension has to be dense");
  Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  with_type(x.scalar_type(), [&](auto of_x) {
    with_type(weight.scalar_type(), [&](auto of_weight) {
      using T = decltype(of_weight);
      linear_as<T, decltype(of_x)>(y, x, weight, bias ? bias->const_data_ptr<T>() : nullptr);
    });
  });
  return y;
}

// The same of a weight in numbers of so many bits, everything in float32.
template <int BITS, typename S, typename X>
void quantised_linear_as(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& scale,
                         const Tensor& offset, int64_t group, const float* bias) {
  const int64_t rows = x.size(0), outputs = weight.size(0), k = x.size(1), groups = k / group;
  const Tensor grouped = at::empty({rows, k + groups}, at::kFloat);
  float *const numbers = grouped.data_ptr<float>(), *const sums = numbers + rows * k;
  const X* from = x.const_data_ptr<X>();
  over_rows(rows, k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      quantised_row<BITS>(from + row * x.stride(0), k, group, row, rows, numbers, sums + row * groups);
  });
  const S *scales = scale.const_data_ptr<S>(), *offsets = offset.const_data_ptr<S>();
  X* to = y.data_ptr<X>();
  over_rows(outputs, k, [&](int64_t begin, int64_t end) {
    const auto some = [&](auto n, int64_t first) {
      const uint8_t* bytes = weight.const_data_ptr<uint8_t>() + first * weight.stride(0);
      const QuantisedRows<S> w{bytes, weight.stride(0), scales + first * groups, offsets + first * groups, groups, group};
      quantised_weights<BITS, n>(numbers, rows, sums, w, [&](int64_t row, int64_t i, float number) {
        to[row * outputs + first + i] = static_cast<X>(number + (bias == nullptr ? 0.f : bias[first + i]));
      });
    };
    int64_t first = begin;
    for (; first + QUANTISED_WEIGHTS <= end; first += QUANTISED_WEIGHTS)
      some(std::integral_constant<int, QUANTISED_WEIGHTS>{}, first);
    for (; first < end; ++first) some(std::integral_constant<int, 1>{}, first);
  });
}

Tensor quantised_linear(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor& offset, int64_t bits,
                        int64_t group, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) * bits == weight.size(1) * 8, "x ", x.sizes(),
              " and a weight of ", weight.sizes(), " bytes cannot be multiplied");
  TORCH_CHECK(group % (2 * W) == 0 && (bits == 4 || bits == 8), "no kernel for ", bits, " bits in groups of ", group);
  TORCH_CHECK(dense(x) && dense(weight) && scale.is_contiguous() && offset.is_contiguous(), "all have to be dense");
  const std::optional<Tensor> added = bias ? std::optional(bias->to(at::kFloat).contiguous()) : std::nullopt;
  Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  with_type(x.scalar_type(), [&](auto of_x) {
    with_type(scale.scalar_type(), [&](auto of_scale) {
      const auto run = bits == 4 ? quantised_linear_as<4, decltype(of_scale), decltype(of_x)>
                                 : quantised_linear_as<8, decltype(of_scale), decltype(of_x)>;
      run(y, x, weight, scale, offset, group, added ? added->const_data_ptr<float>() : nullptr);
    });
  });
  return y;
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", &kvmux::linear);
  library.def(
      "quantised_linear(Tensor x, Tensor weight, Tensor scale, Tensor offset, int bits, int group, Tensor? bias) -> Tensor",
      &kvmux::quantised_linear);
}
