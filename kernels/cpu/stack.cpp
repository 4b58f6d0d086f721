// `Ops.run_layers` as torch sees it: a model's layers, kept in the form of pass.h, and a step through them in one call.
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include "pass.h"

namespace kvmux {
namespace {

using at::Tensor;

// The keys of one strategy, of all layers. Like all that torch knows by its type, it has no name outside of this
// library: several instruction sets may be loaded together.
struct Planes : torch::CustomClassHolder {
  Planes(const std::vector<Tensor>& keys, const std::vector<Tensor>& values) : tensors{keys, values} {
    for (const Tensor& plane : keys) k.emplace_back(plane);
    for (const Tensor& plane : values) v.emplace_back(plane);
  }

  const std::vector<Tensor> tensors[2];
  std::vector<Memory> k, v;
};

class Layers : public torch::CustomClassHolder {
 public:
  // For activations of the example's dtype.
  explicit Layers(const Tensor& example) : type_(example.scalar_type()) {}

  // The next layer: its tensors by name, without those that its model does not have; its four weights, packed; its
  // shape as `Shape` says, epsilon, scale and softcap.
  void add(const c10::Dict<std::string, Tensor>& tensors, const std::vector<std::vector<Tensor>>& weights,
           const std::vector<std::vector<int64_t>>& formats, const std::vector<int64_t>& shape,
           const std::vector<double>& numbers);

  // x [N, d] after all layers; of each slice the keys, four tensors that say where they lie, and numbers as `Number`
  // says.
  Tensor run(const Tensor& x, const Tensor& positions, const std::vector<c10::intrusive_ptr<Planes>>& planes,
             const std::vector<Tensor>& addresses, const std::vector<int64_t>& numbers);

  // Of the parts of the last run, in order.
  std::vector<double> seconds() const { return {seconds_.begin(), seconds_.end()}; }

 private:
  enum Shape { Q_HEADS, KV_HEADS, HEAD_DIM, WINDOW };
  enum Number : size_t { BLOCK_SIZE, SINKS, RING, REACH, FIRST_TOKEN, NUMBERS };
  static constexpr size_t TENSORS = 4;

  Slice slice(const Planes& planes, const Tensor* addresses, const int64_t* numbers) const;

  at::ScalarType type_;
  std::vector<Layer> layers_;
  Workspace space_;
  Seconds seconds_{};
};

void Layers::add(const c10::Dict<std::string, Tensor>& tensors, const std::vector<std::vector<Tensor>>& weights,
                 const std::vector<std::vector<int64_t>>& formats, const std::vector<int64_t>& shape,
                 const std::vector<double>& numbers) {
  const auto found = [&](const char* name) { return tensors.contains(name) ? tensors.at(name) : Tensor(); };
  const auto projection = [&](size_t i, const char* bias) {
    const PackedWeight weight(weights[i], formats[i]);
    const Tensor added = found(bias);
    return Projection{multiplier(weight, type_),
                      padded_bias(added.defined() ? std::optional(added) : std::nullopt, weight.outputs)};
  };
  Layer l{
      .qkv = projection(0, "qkv_bias"),
      .o = projection(1, "o_bias"),
      .gate_up = projection(2, "gate_up_bias"),
      .down = projection(3, "down_bias"),
      .norm = found("norm"),
      .q_norm = found("q_norm"),
      .k_norm = found("k_norm"),
      .cos = found("cos"),
      .sin = found("sin"),
      .post_norm = found("post_norm"),
      .next_norm = found("next_norm"),
      .feed_norm = found("feed_norm"),
      .sink_logits = found("sink_logits"),
      .q_heads = shape[Q_HEADS],
      .kv_heads = shape[KV_HEADS],
      .head_dim = shape[HEAD_DIM],
      .model_window = shape[WINDOW],
      .eps = static_cast<float>(numbers[0]),
      .scores = {static_cast<float>(numbers[1]), static_cast<float>(numbers[2])},
  };
  TORCH_CHECK(l.head_dim <= MAX_DIM, "heads wider than ", MAX_DIM);
  TORCH_CHECK(l.qkv.weight->outputs == l.heads() * l.head_dim && l.o.weight->width == l.q_heads * l.head_dim,
              "heads and projections do not fit");
  TORCH_CHECK(l.gate_up.weight->outputs == 2 * l.down.weight->width && l.down.weight->outputs == l.width() &&
                  l.o.weight->outputs == l.width() && l.qkv.weight->width == l.width() &&
                  l.gate_up.weight->width == l.width(),
              "the layer's weights do not fit");
  layers_.push_back(std::move(l));
}

Slice Layers::slice(const Planes& planes, const Tensor* at, const int64_t* numbers) const {
  const Layout layout{numbers[BLOCK_SIZE], numbers[SINKS], numbers[RING]};
  Slice s{
      .rows = {at[0], at[1], at[2], at[3], layout},
      .k = planes.k,
      .v = planes.v,
      .kernels = attention_kernels(type_, planes.k[0].type),
      .begin = numbers[FIRST_TOKEN],
  };
  for (int64_t row = 0; row < s.rows.count; ++row) s.row_of.insert(s.row_of.end(), s.rows.tokens(row), row);
  for (size_t i = 0; i < layers_.size(); ++i) {  // layers that see alike, with as many heads, share a plan
    const Layer& l = layers_[i];
    size_t same = 0;
    while (same < i && !l.sees_like(layers_[same])) ++same;
    s.plan_of.push_back(same < i ? s.plan_of[same] : s.plans.size());
    if (same < i) continue;
    const Mask mask = mask_of(l.model_window, numbers[REACH], layout.sinks);
    s.plans.push_back(plan(s.rows, l.kv_heads, l.q_heads / l.kv_heads, mask, s.kernels.most_rows));
  }
  return s;
}

Tensor Layers::run(const Tensor& x, const Tensor& positions, const std::vector<c10::intrusive_ptr<Planes>>& planes,
                   const std::vector<Tensor>& addresses, const std::vector<int64_t>& numbers) {
  TORCH_CHECK(x.scalar_type() == type_ && x.dim() == 2 && x.size(1) == layers_.at(0).width(),
              "x does not fit the layers");
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
    const auto* at = positions.const_data_ptr<int64_t>();
    const Pass<X> pass(layers_, slices, out.data_ptr<X>(), out.size(0), at, space_, seconds_);
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
