// `Ops.forward_layers` for torch: holds the layers of a model; each step is one call of the class in decoder_forward.h.
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <tuple>

#include "decoder_forward.h"

namespace kvmux {
namespace {

using at::Tensor;

// Tensors that may be missing: None in Python.
using OptionalTensors = c10::List<std::optional<Tensor>>;

// The keys and values of one store, for torch. Like all types that are registered with torch, it has internal linkage,
// as libraries for several instruction sets may be loaded together.
struct StorePlanes : torch::CustomClassHolder {
  // Takes the keys and the values of those layers whose numbers are `layers`, whether they are rotated, and the centers
  // of the keys of each layer, if it has any.
  StorePlanes(const std::vector<Tensor>& keys, const std::vector<Tensor>& values, const std::vector<int64_t>& layers,
              bool k_rotated, bool v_rotated, const OptionalTensors& k_centers)
      : tensors{keys, values}, centers(k_centers.vec()) {
    TORCH_CHECK_VALUE(keys.size() == values.size() && keys.size() == layers.size() && !keys.empty(),
                      "forward_layers: keys and values of other layers");
    add("the keys' memory", keys, k_rotated, planes.keys);
    add("the values' memory", values, v_rotated, planes.values);
    TORCH_CHECK_VALUE(centers.size() == keys.size(), "forward_layers: centers of keys of other layers");
    for (size_t i = 0; i < centers.size(); ++i) {
      Plane& plane = planes.keys[i];
      if (centers[i]) plane.centers = centers_of("forward_layers", centers[i], SOME, plane.dim);
    }
    planes.index.resize(*std::ranges::max_element(layers) + 1, -1);
    for (size_t i = 0; i < layers.size(); ++i) planes.index.at(layers[i]) = i;
  }

  // Adds the planes (keys or values) of all layers, which must have the same format.
  static void add(const char* name, const std::vector<Tensor>& from, bool rotated, std::vector<Plane>& to) {
    for (const Tensor& plane : from) {
      expect_plane_tensor("forward_layers", name, plane, to.empty() ? KV_TYPES : only(to[0].format));
      to.emplace_back(plane, rotated);
    }
  }

  const std::vector<Tensor> tensors[2];
  const std::vector<std::optional<Tensor>> centers;  // by plane
  Planes planes;
};

// The arguments of a step, as Python passes them. A location is where one strategy keeps its keys in some layers.
struct StepArguments {
  std::vector<c10::intrusive_ptr<StorePlanes>> planes;  // by location
  std::vector<std::optional<Tensor>> addresses;         // by location: the tensors of `kernels.types.Slots`
  std::vector<int64_t> numbers;                         // by location, in the order of the enum Number
  std::vector<int64_t> first_tokens;                    // by slice (the tokens of one strategy)
  std::vector<int64_t> locations;           // by slice and layer: the number of a location; negative: a hook
  std::vector<std::optional<Tensor>> taps;  // by slice: which tokens' queries are copied; by layer: whereto
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

  // Runs a step for x [N, d] (see StepArguments) to its end or to the first layer with a hook. Returns x after all
  // layers, once the step has ended, and the number of that layer, -1 at the end.
  std::tuple<Tensor, int64_t> run(const Tensor& x, const Tensor& positions,
                                  const std::vector<c10::intrusive_ptr<StorePlanes>>& planes,
                                  const OptionalTensors& addresses, const std::vector<int64_t>& numbers,
                                  const std::vector<int64_t>& first_tokens, const std::vector<int64_t>& locations,
                                  const OptionalTensors& taps);

  // Returns q, k, v and the attention output [n, heads, head_dim] of a slice in the layer with a hook that the step has
  // reached.
  std::vector<Tensor> hook_tensors(int64_t slice) const {
    TORCH_CHECK(step_ != nullptr, "forward_layers: no step has stopped at a hook");
    return step_->hook_tensors(slice);
  }

  // Runs the step on after a hook has written its output; returns the number of the next layer with a hook, or -1.
  int64_t resume() {
    TORCH_CHECK(step_ != nullptr, "forward_layers: no step has stopped at a hook");
    return run_step();
  }

  // Returns the seconds that each operation took in the last run, in the order of the enum TimedOp.
  std::vector<double> seconds() const { return {seconds_.begin(), seconds_.end()}; }

 private:
  enum Shape { Q_HEADS, KV_HEADS, HEAD_DIM, MODEL_WINDOW, GELU };
  enum Number : size_t { BLOCK_SIZE, SINKS, RING, NUM_DECODE, MAX_Q, MAX_KV, WINDOW, NUMBERS };
  enum AddressTensor : size_t { TABLE, TABLE_ROW, Q_START, START, WINDOW_START, TENSORS };

  // Throws unless the tensors of a layer fit each other. Checked when the layer is added, as the threads of a step must
  // not throw.
  void expect_layer(const Layer& layer) const;
  Slice slice(size_t s, int64_t tokens);
  const Location* location(size_t number, const std::vector<size_t>& layers, int64_t tokens);
  void add_plans(const std::vector<size_t>& layers, int64_t window, Location& to) const;
  void add_taps(size_t s, Slice& slice) const;
  int64_t run_step();

  at::ScalarType type_;
  std::vector<Layer> layers_;
  int64_t positions_ = std::numeric_limits<int64_t>::max();  // all RoPE tables have at least this many positions
  Workspace space_;
  Seconds seconds_{};
  // The step that is being run.
  StepArguments arguments_;
  Tensor positions_of_step_, out_;
  std::deque<Location> locations_;
  std::vector<Slice> slices_;
  std::unique_ptr<ForwardStep> step_;
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
      .model_window = shape[MODEL_WINDOW],
      .gelu = shape[GELU] != 0,
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

// Returns where a slice of `tokens` tokens keeps its keys in some layers, with the attention plans of these layers.
const Location* Layers::location(size_t number, const std::vector<size_t>& layers, int64_t tokens) {
  const StorePlanes& stored = *arguments_.planes[number];
  const Planes& planes = stored.planes;
  const int64_t* numbers = &arguments_.numbers[NUMBERS * number];
  const auto* tensors = &arguments_.addresses[TENSORS * number];
  for (size_t i = 0; i < WINDOW_START; ++i) TORCH_CHECK_VALUE(tensors[i], "forward_layers: addresses are missing");
  const Addresses at{*tensors[TABLE],
                     *tensors[TABLE_ROW],
                     *tensors[Q_START],
                     *tensors[START],
                     tensors[WINDOW_START],
                     {numbers[BLOCK_SIZE], numbers[SINKS], numbers[RING]},
                     {numbers[NUM_DECODE], numbers[MAX_Q], numbers[MAX_KV]}};
  const bool is_split = at.start.dim() == 2;
  TORCH_CHECK_VALUE(numbers[WINDOW] > 0, "forward_layers: a window of ", numbers[WINDOW]);
  for (const size_t i : layers) {
    TORCH_CHECK_VALUE(planes.holds(i), "forward_layers: the store does not hold layer ", i);
    for (const Plane* plane : {&planes.k(i), &planes.v(i)})
      expect_plane("forward_layers", *plane, is_split ? 1 : layers_[i].kv_heads, layers_[i].head_dim,
                   numbers[BLOCK_SIZE]);
    expect("forward_layers", "the centers of keys", stored.centers[planes.index[i]], only(at::kFloat),
           {layers_[i].kv_heads, SOME});
    TORCH_CHECK_VALUE(!is_split || at.start.size(1) == layers_[i].kv_heads, "forward_layers: addresses of ",
                      at.start.size(1), " heads in a layer of ", layers_[i].kv_heads);
  }
  const int64_t blocks = stored.tensors[0][0].size(0);
  expect_rows("forward_layers", at, is_split ? layers_[layers[0]].kv_heads : 0, blocks, tokens);
  const int64_t rows = at.start.size(0);
  TORCH_CHECK_VALUE(at.q_start.const_data_ptr<int32_t>()[rows] == tokens,
                    "forward_layers: the rows of a strategy must cover its ", tokens, " tokens");
  Location& to = locations_.emplace_back(
      Location{.rows = Rows(at),
               .planes = planes,
               .kernels = attention_kernels(type_, planes.keys[0].format, planes.values[0].format)});
  for (int64_t row = 0; row < rows; ++row) to.row_of.insert(to.row_of.end(), to.rows.tokens(row), row);
  add_plans(layers, numbers[WINDOW], to);
  return &to;
}

// Makes the attention plans of some layers of a strategy with this window. Layers with the same mask and number of
// heads share one.
void Layers::add_plans(const std::vector<size_t>& layers, int64_t window, Location& to) const {
  to.plan_of.resize(layers_.size());
  for (const size_t i : layers) {
    const Layer& l = layers_[i];
    const auto same = std::ranges::find_if(layers, [&](size_t j) { return j == i || l.shares_plan_with(layers_[j]); });
    to.plan_of[i] = *same < i ? to.plan_of[*same] : to.plans.size();
    if (*same < i) continue;
    const Mask mask = mask_of(to.rows, l.model_window, window);
    to.plans.push_back(make_plan(to.rows, l.kv_heads, l.q_heads / l.kv_heads, mask, to.kernels.most_rows));
  }
}

// Returns slice number s of a step of `tokens` tokens.
Slice Layers::slice(size_t s, int64_t tokens) {
  const auto& firsts = arguments_.first_tokens;
  Slice slice{.begin = firsts[s], .end = s + 1 < firsts.size() ? firsts[s + 1] : tokens};
  TORCH_CHECK_VALUE((s > 0 || slice.begin == 0) && slice.begin <= slice.end && slice.end <= tokens,
                    "forward_layers: the slices of the strategies must cover all ", tokens, " tokens, in order");
  slice.locations.resize(layers_.size());
  std::map<int64_t, std::vector<size_t>> layers_by_location;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const int64_t number = arguments_.locations[s * layers_.size() + i];
    TORCH_CHECK_VALUE(number < std::ssize(arguments_.planes), "forward_layers: there is no location ", number);
    if (number >= 0) layers_by_location[number].push_back(i);
  }
  for (const auto& [number, layers] : layers_by_location) {
    const Location* const at = location(number, layers, slice.end - slice.begin);
    for (const size_t i : layers) slice.locations[i] = at;
  }
  if (!arguments_.taps.empty()) add_taps(s, slice);
  return slice;
}

// Sets where queries of slice number s are copied to, if its strategy requests copies (a tap).
void Layers::add_taps(size_t s, Slice& slice) const {
  const auto* taps = &arguments_.taps[s * (1 + layers_.size())];
  if (!taps[0]) return;
  const int64_t tokens = slice.end - slice.begin, copied = taps[0]->numel();
  expect("forward_layers", "tokens of a tap", *taps[0], only(at::kLong), {ANY});
  expect_indices("forward_layers", "tokens of a tap", *taps[0], tokens);
  slice.tap_of.resize(tokens, -1);
  for (int64_t i = 0; i < copied; ++i) slice.tap_of[taps[0]->const_data_ptr<int64_t>()[i]] = i;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto& to = taps[1 + i];
    if (to) {
      expect("forward_layers", "queries of a tap", *to, only(type_), {copied, layers_[i].q_heads, layers_[i].head_dim});
      TORCH_CHECK_VALUE(to->is_contiguous(), "forward_layers: queries of a tap must be dense");
    }
    slice.taps.push_back(to ? static_cast<char*>(to->mutable_data_ptr()) : nullptr);
  }
}

std::tuple<Tensor, int64_t> Layers::run(const Tensor& x, const Tensor& positions,
                                        const std::vector<c10::intrusive_ptr<StorePlanes>>& planes,
                                        const OptionalTensors& addresses, const std::vector<int64_t>& numbers,
                                        const std::vector<int64_t>& first_tokens, const std::vector<int64_t>& locations,
                                        const OptionalTensors& taps) {
  step_.reset();
  expect("forward_layers", "x", x, only(type_), {ANY, layers_.at(0).width()});
  expect("forward_layers", "positions", positions, only(at::kLong), {x.size(0)});
  expect_indices("forward_layers", "positions", positions, positions_);
  const size_t num_slices = first_tokens.size(), num_locations = planes.size();
  TORCH_CHECK(addresses.size() == TENSORS * num_locations && numbers.size() == NUMBERS * num_locations &&
                  locations.size() == num_slices * layers_.size() &&
                  (taps.empty() || taps.size() == num_slices * (1 + layers_.size())),
              "forward_layers: the arguments of ", num_slices, " slices and ", num_locations, " locations do not fit");
  out_ = x.clone(at::MemoryFormat::Contiguous);
  seconds_ = {};
  if (x.size(0) == 0) return {out_, -1};
  TORCH_CHECK_VALUE(num_slices > 0, "forward_layers: nothing says where keys lie");
  arguments_ = {planes, addresses.vec(), numbers, first_tokens, locations, taps.vec()};
  positions_of_step_ = positions.contiguous();
  locations_.clear();
  slices_.clear();
  for (size_t s = 0; s < num_slices; ++s) slices_.push_back(slice(s, x.size(0)));
  space_.clear();
  with_type(type_, [&](auto number) {
    using X = decltype(number);
    step_ = std::make_unique<DecoderForward<X>>(layers_, slices_, out_.data_ptr<X>(), out_.size(0),
                                                positions_of_step_.const_data_ptr<int64_t>(), space_, seconds_);
  });
  const Tensor out = out_;
  return {out, run_step()};
}

int64_t Layers::run_step() {
  const int64_t hook = step_->run();
  if (hook < 0) {
    step_.reset();
    out_.reset();
  }
  return hook;
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.class_<kvmux::StorePlanes>("Planes").def(
      torch::init<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<int64_t>, bool, bool,
                  kvmux::OptionalTensors>());
  library.class_<kvmux::Layers>("Layers")
      .def(torch::init<const at::Tensor&>())
      .def("add", &kvmux::Layers::add)
      .def("run", &kvmux::Layers::run)
      .def("hook_tensors", &kvmux::Layers::hook_tensors)
      .def("resume", &kvmux::Layers::resume)
      .def("seconds", &kvmux::Layers::seconds);
}
