// Products with packed weights as torch sees them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "operations.h"
#include "sharing.h"
#include "tile_product.h"
#include "vector_product.h"
#include "whole_product.h"

namespace kvmux {
namespace {

using at::Tensor;

#ifdef __AMX_TILE__
template <typename T>
using ProductOf = std::conditional_t<std::is_same_v<T, at::BFloat16>, TileProduct, VectorProduct<T>>;
#else
template <typename T>
using ProductOf = VectorProduct<T>;
#endif

constexpr int64_t PAIR = 2;              // panels: what work is divided into
constexpr int64_t TOGETHER = 16;         // panels whose sums wait in the second cache while many rows go through them
constexpr int64_t WORTH_WAKING = 65536;  // numbers multiplied by one row

// y [rows, outputs] of panels begin .. end - 1.
template <typename Product, typename Put>
void multiply(const Product& product, typename Product::Session& session, int64_t begin, int64_t end, float* sums, const Put& put) {
  const int64_t tiles = product.tiles(), chunk = product.chunk(), size = product.height() * PANEL;
  const int64_t together = chunk == tiles ? PANELS : TOGETHER;
  for (int64_t first = begin, last; first < end; first = last) {
    last = std::min(end, first / together * together + together);
    for (int64_t tile = 0; tile < tiles; tile += chunk)
      for (int64_t panel = first, next; panel < last; panel = next) {
        next = std::min(last, panel / PANELS * PANELS + PANELS);
        product.add(session, panel, next - panel, tile, std::min(tiles, tile + chunk), sums + (panel - first) * size);
      }
    put(first, last, sums);
  }
}

// Up to two panels of a row of y, whose sums lie `apart`.
template <typename X>
void put_pair(const float* sums, int64_t apart, const float* added, X* to, int64_t count) {
  if (count == PAIR * PANEL)
    for (int64_t i = 0; i < PAIR * PANEL; i += 2 * W) {
      const auto sum = [&](int64_t j) { return load(sums + j / PANEL * apart + j % PANEL) + load(added + j); };
      store(sum(i), sum(i + W), to + i);
    }
  else
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<X>(sums[i / PANEL * apart + i % PANEL] + added[i]);
}

// y [rows, outputs] of a product whose rows have been entered.
template <typename Product, typename X>
void put_product(const Product& product, const Tensor& y, int64_t k, const std::optional<Tensor>& bias) {
  const int64_t rows = y.size(0), outputs = y.size(1), panels = blocks_of(outputs) * PANELS;
  const float* const biases = bias ? bias->const_data_ptr<float>() : nullptr;
  X* const to = y.data_ptr<X>();
  const auto put = [&](int64_t first, int64_t last, const float* sums) {
    const int64_t apart = product.height() * PANEL;  // numbers from one panel's sums to the next's
    float added[TOGETHER * PANEL] = {};
    const int64_t real = std::min(outputs, last * PANEL) - first * PANEL;  // none, if only padding is left
    if (biases != nullptr && real > 0) std::copy_n(biases + first * PANEL, real, added);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t panel = first; panel < last; panel += PAIR) {
        const int64_t at = panel * PANEL, count = std::min(PAIR * PANEL, outputs - at);
        put_pair(sums + (panel - first) * apart + row * PANEL, apart, added + at - first * PANEL, to + row * outputs + at,
                 count);
      }
  };
  const int64_t alone = std::max<int64_t>(1, WORTH_WAKING / (PAIR * PANEL * std::max<int64_t>(1, k)));
  at::parallel_for(0, rows == 0 ? 0 : panels / PAIR, alone, [&](int64_t begin, int64_t end) {
    typename Product::Session session(product);
    const int64_t together = std::min(TOGETHER, (end - begin) * PAIR);
    const Tensor sums = at::empty({together * product.height() * PANEL}, at::kFloat);
    multiply(product, session, begin * PAIR, end * PAIR, sums.data_ptr<float>(), put);
  });
}

template <typename Product, typename X>
void enter(const Product& product, const Tensor& x) {
  over_rows(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) product.enter(x.const_data_ptr<X>() + row * x.stride(0), row);
  });
}

template <typename T, typename X>
void multiply_floats(const Tensor& x, const Factor& weight, const Tensor& y, const std::optional<Tensor>& bias) {
  using Product = ProductOf<T>;
  using Number = typename Product::Number;
  const int64_t rows = x.size(0);
  const Tensor entered = at::empty({Product::numbers(rows, weight.width)}, c10::CppTypeToScalarType<Number>::value);
  const Product product(weight.numbers.const_data_ptr<T>(), entered.data_ptr<Number>(), rows, weight.width);
  enter<Product, X>(product, x);
  put_product<Product, X>(product, y, weight.width, bias);
}

template <int BITS, bool OFFSETS, typename S, typename X>
void multiply_whole(const Tensor& x, const Factor& weight, const Tensor& y, const std::optional<Tensor>& bias) {
  using Product = WholeProduct<BITS, OFFSETS, S>;
  const int64_t rows = x.size(0), height = Product::height_of(rows), groups = weight.scale.size(1);
  const Tensor numbers = at::empty({height * Product::pitch(weight.width)}, at::kChar);
  const Tensor scales = at::empty({height * groups}, at::kFloat), totals = at::empty({height * groups}, at::kInt);
  const WholeWeight<S> packed{weight.numbers.const_data_ptr<uint8_t>(), weight.scale.const_data_ptr<S>(),
                              OFFSETS ? weight.offset.const_data_ptr<S>() : nullptr, groups, weight.group};
  const WholeRows entered{numbers.data_ptr<int8_t>(), scales.data_ptr<float>(), totals.data_ptr<int32_t>()};
  const Product product(packed, entered, rows, weight.width);
  enter<Product, X>(product, x);
  put_product<Product, X>(product, y, weight.width, bias);
}

template <typename X>
void multiply_as(const Tensor& x, const Factor& weight, const Tensor& y, const std::optional<Tensor>& bias) {
  if (weight.bits == 0)
    return with_type(weight.numbers.scalar_type(),
                     [&](auto number) { multiply_floats<decltype(number), X>(x, weight, y, bias); });
  with_type(weight.scale.scalar_type(), [&](auto of_scale) {
    using S = decltype(of_scale);
    const bool offsets = weight.offset.defined();
    const auto run = weight.bits == 4 ? (offsets ? multiply_whole<4, true, S, X> : multiply_whole<4, false, S, X>)
                                      : (offsets ? multiply_whole<8, true, S, X> : multiply_whole<8, false, S, X>);
    run(x, weight, y, bias);
  });
}

}  // namespace

Tensor linear(const Tensor& x, const Factor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == weight.width, "x ", x.sizes(), " and a weight [", weight.outputs, ", ",
              weight.width, "] cannot be multiplied");
  TORCH_CHECK(dense(x), "the last dimension has to be dense");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.outputs), "one bias for each output");
  const auto added = bias ? std::optional(bias->to(at::kFloat).contiguous()) : std::nullopt;
  const Tensor y = at::empty({x.size(0), weight.outputs}, x.options());
  with_type(x.scalar_type(), [&](auto of_x) { multiply_as<decltype(of_x)>(x, weight, y, added); });
  return y;
}

}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def("linear(Tensor x, Tensor[] weight, int[] format, Tensor? bias) -> Tensor",
              [](const at::Tensor& x, at::TensorList weight, at::IntArrayRef format, const std::optional<at::Tensor>& bias) {
                return kvmux::linear(x, kvmux::Factor(weight, format), bias);
              });
}
