// `Ops.run_layers` as torch sees it: a model's layers, kept in the form of pass.h, and a step through them in one call.
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include "pass.h"

namespace kvmux {
namespace {

class Layers : public torch::CustomClassHolder {
 public:
  // For activations of the example's dtype.
  explicit Layers(const Tensor& example) : type_(example.scalar_type()) {}

  // The next layer: its tensors by name, without those that its model does not have; its four weights, packed; query heads, KV
  // heads, their width and the model's window; epsilon, scale and softcap.
  void add(const c10::Dict<std::string, Tensor>& tensors, const std::vector<std::vector<Tensor>>& weights,
           const std::vector<std::vector<int64_t>>& formats, const std::vector<int64_t>& shape, const std::vector<double>& numbers);

  // x [N, d] after all layers; of each slice the keys, four tensors that say where they lie, and block size, sinks, ring,
  // window and the number of its first token.
  Tensor run(const Tensor& x, const Tensor& positions, const std::vector<c10::intrusive_ptr<Planes>>& planes,
             const std::vector<Tensor>& addresses, const std::vector<int64_t>& numbers);

  // Of the parts of the last run, in order.
  std::vector<double> seconds() const { return {seconds_.begin(), seconds_.end()}; }

 private:
  Slice slice(const Planes& planes, const Tensor* addresses, const int64_t* numbers) const;

  at::ScalarType type_;
  std::vector<Layer> layers_;
  std::vector<Tensor> kept_;  // weights
  Workspace space_;
  Seconds seconds_{};
};

void Layers::add(const c10::Dict<std::string, Tensor>& tensors, const std::vector<std::vector<Tensor>>& weights,
                 const std::vector<std::vector<int64_t>>& formats, const std::vector<int64_t>& shape,
                 const std::vector<double>& numbers) {
  const auto found = [&](const char* name) { return tensors.contains(name) ? tensors.at(name) : Tensor(); };
  const auto projection = [&](size_t i, const char* bias) {
    const Factor factor(weights[i], formats[i]);
    kept_.insert(kept_.end(), weights[i].begin(), weights[i].end());
    const Tensor added = found(bias);
    return Projection{multiplier(factor, type_), padded_bias(added.defined() ? std::optional(added) : std::nullopt, factor.outputs)};
  };
  Layer l{projection(0, "qkv_bias"), projection(1, "o_bias"), projection(2, "gate_up_bias"), projection(3, "down_bias"),
          found("norm"), found("q_norm"), found("k_norm"), found("cos"), found("sin"), found("post_norm"), found("next_norm"),
          found("feed_norm"), found("sink_logits"), shape[0], shape[1], shape[2], shape[3], static_cast<float>(numbers[0]),
          {static_cast<float>(numbers[1]), static_cast<float>(numbers[2])}};
  TORCH_CHECK(l.head_dim <= MAX_DIM, "heads wider than ", MAX_DIM);
  TORCH_CHECK(l.qkv.weight->outputs == l.heads() * l.head_dim && l.o.weight->width == l.q_heads * l.head_dim,
              "heads and projections do not fit");
  TORCH_CHECK(l.gate_up.weight->outputs == 2 * l.down.weight->width && l.down.weight->outputs == l.width() &&
              l.o.weight->outputs == l.width() && l.qkv.weight->width == l.width() && l.gate_up.weight->width == l.width(),
              "the layer's weights do not fit");
  layers_.push_back(std::move(l));
}

Slice Layers::slice(const Planes& planes, const Tensor* at, const int64_t* numbers) const {
  Slice s{{at[0], at[1], at[2], at[3], {numbers[0], numbers[1], numbers[2]}}, planes, how(type_, planes.k[0].type), numbers[3],
          numbers[1], numbers[4], {}, {}, {}};
  for (int64_t row = 0; row < s.rows.count; ++row) s.row_of.insert(s.row_of.end(), s.rows.tokens(row), row);
  std::vector<int64_t> windows;
  for (const Layer& l : layers_) {
    const auto same = std::find(windows.begin(), windows.end(), l.model_window);
    s.plan_of.push_back(same - windows.begin());
    if (same != windows.end()) continue;
    windows.push_back(l.model_window);
    s.plans.push_back(plan(s.rows, l.kv_heads, l.q_heads / l.kv_heads, sight_of(l.model_window, s.window, s.sinks), s.how.rows));
  }
  return s;
}

Tensor Layers::run(const Tensor& x, const Tensor& positions, const std::vector<c10::intrusive_ptr<Planes>>& planes,
                   const std::vector<Tensor>& addresses, const std::vector<int64_t>& numbers) {
  constexpr size_t TENSORS = 4, NUMBERS = 5;
  TORCH_CHECK(x.scalar_type() == type_ && x.dim() == 2 && x.size(1) == layers_.at(0).width(), "x does not fit the layers");
  TORCH_CHECK(addresses.size() == TENSORS * planes.size() && numbers.size() == NUMBERS * planes.size(), "slices?");
  const Tensor out = x.clone(at::MemoryFormat::Contiguous);
  if (out.size(0) == 0) return out;
  std::vector<Slice> slices;
  for (size_t i = 0; i < planes.size(); ++i) {
    TORCH_CHECK(planes[i]->k.size() == layers_.size(), "keys of other layers");
    slices.push_back(slice(*planes[i], &addresses[TENSORS * i], &numbers[NUMBERS * i]));
  }
  space_.clear();
  seconds_ = {};
  with_type(type_, [&](auto number) {
    using X = decltype(number);
    const Pass<X> pass(layers_, slices, out.data_ptr<X>(), out.size(0), positions.const_data_ptr<int64_t>(), space_, seconds_);
    Team::run(Team::most(), pass);
  });
  return out;
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.class_<kvmux::Planes>("Planes").def(torch::init<std::vector<at::Tensor>, std::vector<at::Tensor>>());
  library.class_<kvmux::Layers>("Layers")
      .def(torch::init<const at::Tensor&>())
      .def("add", &kvmux::Layers::add)
      .def("run", &kvmux::Layers::run)
      .def("seconds", &kvmux::Layers::seconds);
}
