// Norms, RoPE and gates for torch. Like every C++ source of this folder, this one is compiled for each instruction set,
// and its operations are registered under a library name for that set (KVMUX_LIBRARY; see setup.py). Knows no layer as
// a whole.
#include "layers.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dispatch.h"
#include "ops.h"

namespace kvmux {

using at::Tensor;

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  expect("rms_norm", "x", x, FLOATS, {ANY, SOME});
  expect("rms_norm", "weight", weight, FLOATS, {x.size(1)});
  Tensor y = at::empty(x.sizes(), x.options());
  with_type(x.scalar_type(), [&](auto of_x) {
    with_type(weight.scalar_type(), [&](auto of_weight) {
      using T = decltype(of_x);
      using Weight = decltype(of_weight);
      const T* from = x.const_data_ptr<T>();
      T* to = y.data_ptr<T>();
      const auto* factors = weight.const_data_ptr<Weight>();
      parallel_over_rows(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n)
          rms_norm_row(from + n * x.stride(0), factors, static_cast<float>(eps), to + n * y.stride(0), x.size(1));
      });
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& delta, const Tensor& weight, double eps) {
  expect("add_rms_norm", "x", x, FLOATS, {ANY, SOME});
  expect("add_rms_norm", "delta", delta, only(x.scalar_type()), {x.size(0), x.size(1)});
  expect("add_rms_norm", "weight", weight, FLOATS, {x.size(1)});
  Tensor total = at::empty(x.sizes(), x.options()), normed = at::empty(x.sizes(), x.options());
  const int64_t d = x.size(1);
  with_type(x.scalar_type(), [&](auto of_x) {
    with_type(weight.scalar_type(), [&](auto of_weight) {
      using T = decltype(of_x);
      const T* a = x.const_data_ptr<T>();
      const T* b = delta.const_data_ptr<T>();
      const auto* factors = weight.const_data_ptr<decltype(of_weight)>();
      T* sums = total.data_ptr<T>();
      T* to = normed.data_ptr<T>();
      parallel_over_rows(x.size(0), d, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
          add_row(a + n * x.stride(0), b + n * delta.stride(0), sums + n * d, d);
          rms_norm_row(sums + n * d, factors, static_cast<float>(eps), to + n * d, d);
        }
      });
    });
  });
  return {total, normed};
}

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions) {
  expect("rope", "x", x, FLOATS, {ANY, SOME, SOME});
  const int64_t heads = x.size(1), half = x.size(2) / 2;
  TORCH_CHECK_VALUE(x.size(2) == 2 * half, "rope: x must have heads of an even dimension, and is ", x.sizes());
  expect("rope", "cos", cos, only(at::kFloat), {ANY, half});
  expect("rope", "sin", sin, only(at::kFloat), {cos.size(0), half});
  expect("rope", "positions", positions, only(at::kLong), {x.size(0)});
  expect_indices("rope", "positions", positions, cos.size(0));
  Tensor y = at::empty(x.sizes(), x.options());
  const auto* c = cos.const_data_ptr<float>();
  const auto* s = sin.const_data_ptr<float>();
  const auto* position = positions.const_data_ptr<int64_t>();
  with_type(x.scalar_type(), [&](auto of_x) {
    using T = decltype(of_x);
    const T* from = x.const_data_ptr<T>();
    T* to = y.data_ptr<T>();
    parallel_over_rows(x.size(0), heads * 2 * half, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t h = 0; h < heads; ++h)
          rope_row(from + n * x.stride(0) + h * x.stride(1), c + position[n] * cos.stride(0),
                   s + position[n] * sin.stride(0), to + n * y.stride(0) + h * y.stride(1), half);
    });
  });
  return y;
}

Tensor silu_mul(const Tensor& gate_up) { return gated(gate_up, /*gelu=*/false); }

Tensor gated(const Tensor& gate_up, bool gelu) {
  expect("silu_mul", "gate_up", gate_up, FLOATS, {ANY, SOME});
  const int64_t f = gate_up.size(1) / 2;
  TORCH_CHECK_VALUE(gate_up.size(1) == 2 * f, "silu_mul: gate_up must be two halves of one width, and is ",
                    gate_up.sizes());
  Tensor y = at::empty({gate_up.size(0), f}, gate_up.options());
  with_type(gate_up.scalar_type(), [&](auto of_x) {
    using T = decltype(of_x);
    const T* from = gate_up.const_data_ptr<T>();
    T* to = y.data_ptr<T>();
    parallel_over_rows(gate_up.size(0), f, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const T* gate = from + n * gate_up.stride(0);
        gelu ? gelu_tanh_mul_row(gate, gate + f, to + n * f, f) : silu_mul_row(gate, gate + f, to + n * f, f);
      }
    });
  });
  return y;
}

}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", &kvmux::rms_norm);
  library.def("add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)",
              &kvmux::add_rms_norm);
  library.def("rope(Tensor x, Tensor cos, Tensor sin, Tensor positions) -> Tensor", &kvmux::rope);
  library.def("silu_mul(Tensor gate_up) -> Tensor", &kvmux::silu_mul);
}
