// The operations of a layer before and after attention, each fused from several and run in one call, as a call from
// Python takes as long as a small operation. The results have the same bits as the single operations.
// Knows neither how these are computed nor what attention is.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "ops.h"

namespace kvmux {
namespace {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using Maybe = std::optional<Tensor>;

// Adds `added`, if given, to x [N, d]; returns the sum, and q, k and v [N, heads, dim] computed from its norm; q and k
// are rotated by RoPE if cos is given.
std::tuple<Tensor, Tensor, Tensor, Tensor> qkv_proj_rope(const Tensor& x, const Maybe& added, const Tensor& norm,
                                                         double eps, TensorList qkv, IntArrayRef format,
                                                         const Maybe& bias, const Maybe& q_norm, const Maybe& k_norm,
                                                         const Maybe& cos, const Maybe& sin, const Tensor& positions,
                                                         int64_t q_heads, int64_t kv_heads) {
  TORCH_CHECK_VALUE(q_heads > 0 && kv_heads > 0 && q_heads < (1 << 20) && kv_heads < (1 << 20),
                    "qkv_proj_rope: there are ", q_heads, " query heads and ", kv_heads, " of keys");
  expect("qkv_proj_rope", "x", x, FLOATS, {ANY, SOME});
  expect("qkv_proj_rope", "positions", positions, only(at::kLong), {x.size(0)});
  TORCH_CHECK_VALUE(q_norm.has_value() == k_norm.has_value() && cos.has_value() == sin.has_value(),
                    "qkv_proj_rope: a norm or a table of RoPE lacks its other half");
  const auto [sum, normed] = added ? add_rms_norm(x, *added, norm, eps) : std::tuple(x.clone(), rms_norm(x, norm, eps));
  const Tensor all = linear(normed, PackedWeight(qkv, format), bias);
  const int64_t rows = all.size(0), dim = all.size(1) / (q_heads + 2 * kv_heads);
  TORCH_CHECK_VALUE(all.size(1) == dim * (q_heads + 2 * kv_heads), "qkv_proj_rope: qkv has ", all.size(1),
                    " outputs, which are not ", q_heads, " query heads and twice ", kv_heads,
                    " heads of one dimension");
  const auto heads = [&](int64_t first, int64_t count) {
    return all.narrow(1, first * dim, count * dim).view({rows, count, dim});
  };
  const auto normed_heads = [&](int64_t first, int64_t count, const Tensor& weight) {
    return rms_norm(heads(first, count).reshape({rows * count, dim}), weight, eps).view({rows, count, dim});
  };
  const auto rotated = [&](const Tensor& t) { return cos ? rope(t, *cos, *sin, positions) : t; };
  const Tensor v = heads(q_heads + kv_heads, kv_heads);
  if (q_norm)
    return {sum, rotated(normed_heads(0, q_heads, *q_norm)), rotated(normed_heads(q_heads, kv_heads, *k_norm)), v};
  const Tensor qk = rotated(heads(0, q_heads + kv_heads));
  return {sum, qk.narrow(1, 0, q_heads), qk.narrow(1, q_heads, kv_heads), v};
}

// Adds the projection of attention's output, mixed [N, heads * dim], to x [N, d]; returns the sum and its norm.
std::tuple<Tensor, Tensor> o_proj_add_norm(const Tensor& x, const Tensor& mixed, TensorList o, IntArrayRef format,
                                           const Maybe& bias, const Maybe& post_norm, const Tensor& norm, double eps) {
  const Tensor projected = linear(mixed, PackedWeight(o, format), bias);
  return add_rms_norm(x, post_norm ? rms_norm(projected, *post_norm, eps) : projected, norm, eps);
}

Tensor mlp(const Tensor& h, TensorList gate_up, IntArrayRef gate_up_format, const Maybe& gate_up_bias, TensorList down,
           IntArrayRef down_format, const Maybe& down_bias, bool gelu) {
  const Tensor both = linear(h, PackedWeight(gate_up, gate_up_format), gate_up_bias);
  return linear(gated(both, gelu), PackedWeight(down, down_format), down_bias);
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def(
      "qkv_proj_rope(Tensor x, Tensor? added, Tensor norm, float eps, Tensor[] qkv, int[] format, Tensor? bias, "
      "Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin, Tensor positions, int q_heads, int kv_heads) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      &kvmux::qkv_proj_rope);
  library.def(
      "o_proj_add_norm(Tensor x, Tensor mixed, Tensor[] o, int[] format, Tensor? bias, Tensor? post_norm, Tensor norm, "
      "float eps) -> (Tensor, Tensor)",
      &kvmux::o_proj_add_norm);
  library.def(
      "mlp(Tensor h, Tensor[] gate_up, int[] gate_up_format, Tensor? gate_up_bias, Tensor[] down, "
      "int[] down_format, Tensor? down_bias, bool gelu) -> Tensor",
      &kvmux::mlp);
}
