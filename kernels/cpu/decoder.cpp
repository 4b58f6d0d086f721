// `Ops.forward_layers` for torch: holds the layers of a model; each step is one call of the class in decoder_forward.h.
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include <limits>

#include "decoder_forward.h"

namespace kvmux {
namespace {

using at::Tensor;

// The keys and values of one strategy in all layers. Like all types that are registered with torch, it has internal
// linkage, as libraries for several instruction sets may be loaded together.
struct Planes : torch::CustomClassHolder {
  Planes(const std::vector<Tensor>& keys, const std::vector<Tensor>& values) : tensors{keys, values} {
    TORCH_CHECK_VALUE(keys.size() == values.size() && !keys.empty(), "forward_layers: keys and values of other layers");
    for (const Tensor& plane : keys) add("the keys' memory", plane, k);
    for (const Tensor& plane : values) add("the values' memory", plane, v);
  }

  // Adds the plane (keys or values) of one layer; all planes must have the type of the first one.
  void add(const char* name, const Tensor& plane, std::vector<Memory>& planes) {
    const Types types = k.empty() ? FLOATS | only(at::kChar) : only(k[0].type);
    expect("forward_layers", name, plane, types, {ANY, SOME, SOME, SOME});
    planes.emplace_back(plane);
  }

  const std::vector<Tensor> tensors[2];
  std::vector<Memory> k, v;
};

class Layers : public torch::CustomClassHolder {
 public:
  // Creates an empty list of layers for activations that have the dtype of `example`.
  explicit Layers(const Tensor& example) : type_(example.scalar_type()) {}

  // Adds the next layer. `tensors`: norms, biases and tables by name, without those that the model does not have;
  // `weights` and `formats`: its four packed weights; `shape`: in the order of the enum Shape; `numbers`: epsilon,
  // scale and softcap.
  void add(const c10::Dict<std::string, Tensor>& tensors, const std::vector<std::vector<Tensor>>& weights,
           const std::vector<std::vector<int64_t>>& formats, const std::vector<int64_t>& shape,
           const std::vector<double>& numbers);

  // Returns x [N, d] after all layers. For each slice of x (one strategy's tokens), `planes` has its keys and values,
  // `addresses` the four tensors of its addresses, and `numbers` its numbers in the order of the enum Number.
  Tensor run(const Tensor& x, const Tensor& positions, const std::vector<c10::intrusive_ptr<Planes>>& planes,
             const std::vector<Tensor>& addresses, const std::vector<int64_t>& numbers);

  // Returns the seconds that each operation took in the last run, in the order of the enum TimedOp.
  std::vector<double> seconds() const { return {seconds_.begin(), seconds_.end()}; }

 private:
  enum Shape { Q_HEADS, KV_HEADS, HEAD_DIM, WINDOW };
  enum Number : size_t { BLOCK_SIZE, SINKS, RING, REACH, FIRST_TOKEN, NUMBERS };
  static constexpr size_t TENSORS = 4;

  // Throws unless the tensors of a layer fit each other. Checked when the layer is added, as the threads of a step must
  // not throw.
  void expect_layer(const Layer& layer) const;
  void expect_planes(const Planes& planes, int64_t block_size) const;
  Slice slice(const Planes& planes, const Tensor* addresses, const int64_t* numbers) const;

  at::ScalarType type_;
  std::vector<Layer> layers_;
  int64_t positions_ = std::numeric_limits<int64_t>::max();  // all RoPE tables have at least this many positions
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
    return Projection{make_gemm(weight, type_),
                      padded_bias(added.defined() ? std::optional(added) : std::nullopt, weight, bias)};
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
      .mlp_post_norm = found("mlp_post_norm"),
      .sink_logits = found("sink_logits"),
      .q_heads = shape[Q_HEADS],
      .kv_heads = shape[KV_HEADS],
      .head_dim = shape[HEAD_DIM],
      .model_window = shape[WINDOW],
      .eps = static_cast<float>(numbers[0]),
      .scores = {static_cast<float>(numbers[1]), static_cast<float>(numbers[2])},
  };
  expect_layer(l);
  if (l.sink_logits.defined()) l.sink_logits = l.sink_logits.to(at::kFloat);
  if (l.cos.defined()) positions_ = std::min(positions_, l.cos.size(0));
  layers_.push_back(std::move(l));
}

void Layers::expect_layer(const Layer& l) const {
  constexpr int64_t MOST = 1 << 20;  // limit for the number of heads: times a dimension it does not overflow
  const auto between = [](int64_t n, int64_t last) { return 0 < n && n <= last; };
  TORCH_CHECK_VALUE(between(l.q_heads, MOST) && between(l.kv_heads, l.q_heads) && l.q_heads % l.kv_heads == 0 &&
                        between(l.head_dim, MAX_DIM) && l.model_window > 0,
                    "forward_layers: a layer of ", l.q_heads, " query heads and ", l.kv_heads, " of keys, ", l.head_dim,
                    " wide, in a window of ", l.model_window);
  TORCH_CHECK_VALUE(!layers_.empty() || between(l.qkv.weight->width, MOST * MAX_DIM), "forward_layers: no width");
  const int64_t d = layers_.empty() ? l.qkv.weight->width : layers_[0].width(), f = l.down.weight->width;
  const auto weight = [](const char* name, const Projection& p, int64_t outputs, int64_t width) {
    TORCH_CHECK_VALUE(p.weight->outputs == outputs && p.weight->width == width, "forward_layers: ", name, " must be [",
                      outputs, ", ", width, "], and is [", p.weight->outputs, ", ", p.weight->width, "]");
  };
  weight("qkv", l.qkv, l.heads() * l.head_dim, d);
  weight("o", l.o, d, l.q_heads * l.head_dim);
  weight("gate_up", l.gate_up, 2 * f, d);
  weight("down", l.down, d, f);
  const auto norm = [&](const char* name, const Tensor& t, int64_t size) {
    if (t.defined()) expect("forward_layers", name, t, FLOATS, {size});
  };
  TORCH_CHECK_VALUE(l.norm.defined() && l.next_norm.defined(), "forward_layers: a layer without norms");
  TORCH_CHECK_VALUE(l.q_norm.defined() == l.k_norm.defined() && l.cos.defined() == l.sin.defined(),
                    "forward_layers: a norm or a table of RoPE lacks its other half");
  norm("norm", l.norm, d);
  norm("next_norm", l.next_norm, d);
  norm("post_norm of attention", l.post_norm, d);
  norm("post_norm", l.mlp_post_norm, d);
  norm("q_norm", l.q_norm, l.head_dim);
  norm("k_norm", l.k_norm, l.head_dim);
  if (l.sink_logits.defined()) expect("forward_layers", "sink_logits", l.sink_logits, FLOATS, {l.q_heads});
  if (!l.cos.defined()) return;
  expect("forward_layers", "cos", l.cos, only(at::kFloat), {SOME, SOME});
  expect("forward_layers", "sin", l.sin, only(at::kFloat), {l.cos.size(0), l.cos.size(1)});
  TORCH_CHECK_VALUE(2 * l.cos.size(1) <= l.head_dim && l.cos.stride(0) == l.sin.stride(0), "forward_layers: tables of ",
                    "RoPE for ", 2 * l.cos.size(1), " numbers of heads of ", l.head_dim);
}

void Layers::expect_planes(const Planes& planes, int64_t block_size) const {
  TORCH_CHECK_VALUE(planes.k.size() == layers_.size(), "forward_layers: keys of ", planes.k.size(), " layers, not ",
                    layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i)
    for (const Memory* plane : {&planes.k[i], &planes.v[i]})
      expect_plane("forward_layers", *plane, layers_[i].kv_heads, layers_[i].head_dim, block_size);
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
  // Layers with the same mask and number of heads share an attention plan.
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& l = layers_[i];
    size_t same = 0;
    while (same < i && !l.shares_plan_with(layers_[same])) ++same;
    s.plan_of.push_back(same < i ? s.plan_of[same] : s.plans.size());
    if (same < i) continue;
    const Mask mask = mask_of(l.model_window, numbers[REACH], layout.sinks);
    s.plans.push_back(plan(s.rows, l.kv_heads, l.q_heads / l.kv_heads, mask, s.kernels.most_rows));
  }
  return s;
}

Tensor Layers::run(const Tensor& x, const Tensor& positions, const std::vector<c10::intrusive_ptr<Planes>>& planes,
                   const std::vector<Tensor>& addresses, const std::vector<int64_t>& numbers) {
  expect("forward_layers", "x", x, only(type_), {ANY, layers_.at(0).width()});
  expect("forward_layers", "positions", positions, only(at::kLong), {x.size(0)});
  expect_indices("forward_layers", "positions", positions, positions_);
  TORCH_CHECK(addresses.size() == TENSORS * planes.size() && numbers.size() == NUMBERS * planes.size(),
              "forward_layers: ", planes.size(), " slices with ", addresses.size(), " tensors and ", numbers.size(),
              " numbers");
  const Tensor out = x.clone(at::MemoryFormat::Contiguous);
  seconds_ = {};
  if (out.size(0) == 0) return out;
  TORCH_CHECK_VALUE(!planes.empty(), "forward_layers: nothing says where keys lie");
  std::vector<Slice> slices;
  for (size_t i = 0; i < planes.size(); ++i) {
    const int64_t* at = &numbers[NUMBERS * i];
    const int64_t next = i + 1 < planes.size() ? at[NUMBERS + FIRST_TOKEN] : x.size(0), tokens = next - at[FIRST_TOKEN];
    const Tensor* where = &addresses[TENSORS * i];
    expect_rows("forward_layers", where[0], where[1], where[2], where[3], {at[BLOCK_SIZE], at[SINKS], at[RING]},
                tokens);
    const Tensor& q_start = where[2];
    const auto* first = q_start.const_data_ptr<int32_t>();
    TORCH_CHECK_VALUE((i > 0 || at[FIRST_TOKEN] == 0) && first[0] == 0 && first[q_start.size(0) - 1] == tokens,
                      "forward_layers: the slices of the strategies must cover all ", x.size(0), " tokens, in order");
    TORCH_CHECK_VALUE(at[REACH] > 0, "forward_layers: a window of ", at[REACH]);
    expect_planes(*planes[i], at[BLOCK_SIZE]);
    slices.push_back(slice(*planes[i], &addresses[TENSORS * i], &numbers[NUMBERS * i]));
  }
  space_.clear();
  with_type(type_, [&](auto number) {
    using X = decltype(number);
    const auto* at = positions.const_data_ptr<int64_t>();
    const DecoderForward<X> forward(layers_, slices, out.data_ptr<X>(), out.size(0), at, space_, seconds_);
    Team::run(Team::max_threads(), forward);
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
