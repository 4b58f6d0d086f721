// What a step of all layers works on: the weights of a layer, the planes of a store, and where the keys and values of
// each strategy's tokens are. Computes nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "attention.h"
#include "gemm.h"

namespace kvmux {

// A packed weight, ready to multiply, and its bias.
struct Projection {
  std::unique_ptr<Gemm> weight;
  at::Tensor bias;  // padded float32; or undefined

  const float* biases() const { return bias.defined() ? bias.const_data_ptr<float>() : nullptr; }
};

// One layer's weights.
struct Layer {
  Projection qkv, o, gate_up, down;
  // Tensors that the model does not have are undefined.
  at::Tensor norm, q_norm, k_norm, cos, sin, post_norm, next_norm, mlp_post_norm, sink_logits;
  int64_t q_heads, kv_heads, head_dim, model_window;
  bool gelu;  // whether the feed-forward is gated by GELU (its approximation by tanh), not by SiLU
  float eps;
  Scores scores;

  int64_t width() const { return norm.numel(); }
  int64_t heads() const { return q_heads + 2 * kv_heads; }
  // Returns whether attention in both layers can be cut into the same pieces of work.
  bool shares_plan_with(const Layer& other) const {
    return model_window == other.model_window && q_heads == other.q_heads && kv_heads == other.kv_heads;
  }
};

// The keys and values of one store, in those layers that it holds.
struct Planes {
  const Plane& k(size_t layer) const { return keys[index[layer]]; }
  const Plane& v(size_t layer) const { return values[index[layer]]; }
  bool holds(size_t layer) const { return layer < index.size() && index[layer] >= 0; }

  std::vector<Plane> keys, values;
  std::vector<int64_t> index;  // by layer: its index in `keys` and `values`; negative: not held
};

// The addresses of one strategy's rows in some layers, with the attention plans of those layers.
struct Location {
  const Plan& plan(size_t layer) const { return plans[plan_of[layer]]; }

  Rows rows;
  const Planes& planes;
  AttentionKernels kernels;
  std::vector<int64_t> row_of;  // for each token, its row in `rows`
  std::vector<Plan> plans;      // attention plans, one for each kind of layer (shares_plan_with)
  std::vector<size_t> plan_of;  // by layer
};

// The tokens of a step that belong to one strategy.
struct Slice {
  int64_t begin, end;                      // the slice's tokens in the step
  std::vector<const Location*> locations;  // by layer; null: the caller computes attention (a hook)
  std::vector<int64_t> tap_of;             // for each token, the number of its query among those that are copied, or -1
  std::vector<char*> taps;                 // by layer: where queries are copied to, dense; null: nowhere
};

}  // namespace kvmux
