// Products with packed weights: how threads share the work, and the operation `linear` for torch. Knows no layers.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "dispatch.h"
#include "epilogue.h"
#include "gemm.h"
#include "gemm_bf16_amx.h"
#include "gemm_int8_amx.h"
#include "gemm_vec.h"

namespace kvmux {
namespace {

using at::Tensor;

#ifdef __AMX_TILE__
template <typename T>
using ProductOf = std::conditional_t<std::is_same_v<T, at::BFloat16>, Bf16AmxGemm, VectorGemm<T>>;
#else
template <typename T>
using ProductOf = VectorGemm<T>;
#endif

// If each thread has at least this many blocks, it costs less to give some threads one block more than to cut blocks in
// half.
constexpr int64_t MANY_BLOCKS = 3;

// Computes the sums of panels begin .. end - 1 of a weight, for all rows of x.
template <typename Product>
void add_panels(const Product& product, typename Product::Session& session, int64_t begin, int64_t end, float* sums) {
  const int64_t tiles = product.tiles(), chunk = product.chunk(), size = product.height() * PANEL;
  for (int64_t tile = 0; tile < tiles; tile += chunk)
    for (int64_t panel = begin, next; panel < end; panel = next) {
      next = std::min(end, panel / PANELS * PANELS + PANELS);
      product.add(session, panel, next - panel, tile, std::min(tiles, tile + chunk), sums + (panel - begin) * size);
    }
}

// Returns the most panels that are computed before the epilogue takes their sums: as many as stay in the L2 cache.
int64_t max_panels(int64_t height) {
  constexpr int64_t CACHED = 512 << 10;  // bytes
  const int64_t panels = CACHED / (height * PANEL * static_cast<int64_t>(sizeof(float)));
  // Round down to whole blocks of panels and as many twin blocks.
  return std::max<int64_t>(1, panels / (2 * PANELS)) * 2 * PANELS;
}

int64_t sums_size_for(int64_t height) { return max_panels(height) * height * PANEL; }

// Returns the number of pieces of work into which panels are cut. If the product takes the whole depth at once (few
// rows), only reading memory takes time, and there are as few pieces as keep all threads busy.
template <typename Product>
int64_t pieces(const Product& product, int64_t panels, int64_t most, int64_t threads) {
  const int64_t blocks = panels / PANELS;
  if (product.chunk() == product.tiles())
    return blocks < MANY_BLOCKS * threads && blocks % threads != 0 ? panels / PAIR : blocks;
  const int64_t rounds = (panels + most * threads - 1) / (most * threads);
  return std::min(panels / PAIR, rounds * threads);
}

template <typename Product>
void multiply_panels(Team& team, Member member, const Product& product, int64_t panels, float* sums, int64_t twin,
                     const Epilogue& epilogue) {
  typename Product::Session session(product);
  const int64_t size = product.height() * PANEL, all = twin == 0 ? panels : twin;
  const int64_t n = pieces(product, all, max_panels(product.height()) / (twin == 0 ? 1 : 2), team.size());
  team.share(member, n, [&](int64_t i) {
    const int64_t first = all / PAIR * i / n * PAIR, last = all / PAIR * (i + 1) / n * PAIR;
    add_panels(product, session, first, last, sums);
    if (twin != 0) add_panels(product, session, first + twin, last + twin, sums + (last - first) * size);
    epilogue(first, last, sums, size);
  });
}

// ---------------------------------------------------------------- weights of floats
template <typename T, typename X>
class FloatGemm : public Gemm {
 public:
  explicit FloatGemm(const PackedWeight& weight) : Gemm(weight), w_(weight.numbers.const_data_ptr<T>()) {}

  int64_t input_bytes(int64_t rows) const override { return Product::numbers(rows, width) * sizeof(Number); }
  int64_t sums_size(int64_t rows) const override { return sums_size_for(product(nullptr, rows).height()); }
  void pack_row(char* input, int64_t rows, const void* x, int64_t row) const override {
    product(input, rows).pack_row(static_cast<const X*>(x), row, 0, width);
  }
  bool packs_columns() const override { return true; }
  void pack_columns(char* input, int64_t rows, const void* x, int64_t first, int64_t last,
                    int64_t column) const override {
    const X* from = static_cast<const X*>(x);
    const Product packed = product(input, rows);
    for (int64_t row = first; row < last; ++row, from += PART) packed.pack_row(from, row, column, PART);
  }
  void multiply(Team& team, Member member, char* input, int64_t rows, float* sums, int64_t twin,
                const Epilogue& epilogue) const override {
    multiply_panels(team, member, product(input, rows), blocks_of(outputs) * PANELS, sums, twin, epilogue);
  }

 private:
  using Product = ProductOf<T>;
  using Number = typename Product::Number;

  Product product(char* input, int64_t rows) const { return {w_, reinterpret_cast<Number*>(input), rows, width}; }

  const T* w_;
};

// ---------------------------------------------------------------- weights of integers
template <int BITS, bool OFFSETS, typename S, typename X>
class IntGemm : public Gemm {
 public:
  explicit IntGemm(const PackedWeight& weight)
      : Gemm(weight), w_{weight.numbers.const_data_ptr<uint8_t>(), weight.scale.const_data_ptr<S>(),
                         OFFSETS ? weight.offset.const_data_ptr<S>() : nullptr, weight.scale.size(1), weight.group} {}

  int64_t input_bytes(int64_t rows) const override { return numbers(rows) + 2 * factors(rows); }
  int64_t sums_size(int64_t rows) const override { return sums_size_for(Product::height_of(rows)); }
  void pack_row(char* input, int64_t rows, const void* x, int64_t row) const override {
    product(input, rows).pack_row(static_cast<const X*>(x), row);
  }
  void multiply(Team& team, Member member, char* input, int64_t rows, float* sums, int64_t twin,
                const Epilogue& epilogue) const override {
    multiply_panels(team, member, product(input, rows), blocks_of(outputs) * PANELS, sums, twin, epilogue);
  }

 private:
  using Product = Int8Gemm<BITS, OFFSETS, S>;

  // Bytes of packed rows of x: numbers() of their quantized numbers, factors() of their scales, and as many of their
  // sums.
  int64_t numbers(int64_t rows) const { return Product::height_of(rows) * Product::pitch(width); }
  int64_t factors(int64_t rows) const { return Product::height_of(rows) * w_.groups * sizeof(float); }

  Product product(char* input, int64_t rows) const {
    char* const scales = input + numbers(rows);
    auto* const sums = reinterpret_cast<int32_t*>(scales + factors(rows));
    return {w_, {reinterpret_cast<int8_t*>(input), reinterpret_cast<float*>(scales), sums}, rows, width};
  }

  const IntWeight<S> w_;
};

template <typename X>
std::unique_ptr<Gemm> make_gemm_for(const PackedWeight& weight) {
  std::unique_ptr<Gemm> made;
  if (weight.bits == 0) {
    with_type(weight.numbers.scalar_type(),
              [&](auto number) { made = std::make_unique<FloatGemm<decltype(number), X>>(weight); });
    return made;
  }
  with_type(weight.scale.scalar_type(), [&](auto of_scale) {
    using S = decltype(of_scale);
    const bool offsets = weight.offset.defined();
    if (weight.bits == 4 && offsets) made = std::make_unique<IntGemm<4, true, S, X>>(weight);
    if (weight.bits == 4 && !offsets) made = std::make_unique<IntGemm<4, false, S, X>>(weight);
    if (weight.bits == 8 && offsets) made = std::make_unique<IntGemm<8, true, S, X>>(weight);
    if (weight.bits == 8 && !offsets) made = std::make_unique<IntGemm<8, false, S, X>>(weight);
  });
  return made;
}

}  // namespace

std::unique_ptr<Gemm> make_gemm(const PackedWeight& weight, at::ScalarType x_type) {
  std::unique_ptr<Gemm> made;
  with_type(x_type, [&](auto number) { made = make_gemm_for<decltype(number)>(weight); });
  return made;
}

Tensor linear(const Tensor& x, const PackedWeight& weight, const std::optional<Tensor>& bias) {
  expect("linear", "x", x, FLOATS, {ANY, weight.width});
  const Tensor biases = padded_bias(bias, weight);
  const auto made = make_gemm(weight, x.scalar_type());
  const int64_t rows = x.size(0), outputs = weight.outputs;
  const Tensor y = at::empty({rows, outputs}, x.options());
  if (rows == 0) return y;
  // A thread should have at least this many numbers of the weight: for fewer it is not worth waking it.
  constexpr int64_t WORTH_WAKING = 65536;
  const int64_t threads = std::min(Team::max_threads(), 1 + weight.width * outputs / WORTH_WAKING),
                sums = made->sums_size(rows);
  const Tensor input = at::empty({made->input_bytes(rows)}, at::kByte),
               sums_of_threads = at::empty({threads, sums}, at::kFloat);
  with_type(x.scalar_type(), [&](auto number) {
    using X = decltype(number);
    auto* const packed = reinterpret_cast<char*>(input.data_ptr());
    const X* const from = x.const_data_ptr<X>();
    X* const to = y.data_ptr<X>();
    const float* const added = biases.defined() ? biases.const_data_ptr<float>() : nullptr;
    const auto epilogue = [&](int64_t first, int64_t last, const float* of, int64_t size) {
      store_rows(of, size, first, last, added, to, rows, outputs);
    };
    Team::run(threads, [&](Team& team, Member member) {
      team.share(member, rows, [&](int64_t row) { made->pack_row(packed, rows, from + row * x.stride(0), row); });
      made->multiply(team, member, packed, rows, sums_of_threads.data_ptr<float>() + member * sums, 0, epilogue);
    });
  });
  return y;
}

Tensor padded_bias(const std::optional<Tensor>& bias, const PackedWeight& weight, const char* name) {
  const Types types = weight.bits == 0 ? only(weight.numbers.scalar_type()) : FLOATS;
  expect("linear", name, bias, types, {weight.outputs});
  if (!bias) return {};
  const Tensor padded = at::zeros({blocks_of(weight.outputs) * BLOCK}, at::kFloat);
  padded.narrow(0, 0, weight.outputs).copy_(*bias);
  return padded;
}

}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def(
      "linear(Tensor x, Tensor[] weight, int[] format, Tensor? bias) -> Tensor",
      [](const at::Tensor& x, at::TensorList weight, at::IntArrayRef format, const std::optional<at::Tensor>& bias) {
        return kvmux::linear(x, kvmux::PackedWeight(weight, format), bias);
      });
}
