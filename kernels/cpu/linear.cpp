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
#include "with_int_format.h"

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

// The panels of a weight in one format, multiplied by a `Product`.
template <typename Product>
class PanelsOf : public PanelProduct {
 public:
  explicit PanelsOf(const Product& product) : product_(product), session_(product_) {}

  void compute(int64_t begin, int64_t end, float* sums) override {
    const int64_t tiles = product_.tiles(), chunk = product_.chunk(), size = product_.height() * PANEL;
    for (int64_t tile = 0; tile < tiles; tile += chunk)
      for (int64_t panel = begin, next; panel < end; panel = next) {
        next = std::min(end, panel / PANELS * PANELS + PANELS);
        product_.add(session_, panel, next - panel, tile, std::min(tiles, tile + chunk), sums + (panel - begin) * size);
      }
  }

 private:
  const Product product_;
  typename Product::Session session_;
};

// ---------------------------------------------------------------- weights of floats
template <typename T, typename X>
class FloatGemm : public Gemm {
 public:
  explicit FloatGemm(const PackedPart& weight) : Gemm(weight.outputs, weight.width), numbers_(weight.numbers) {}

  int64_t input_bytes(int64_t rows) const override { return Product::numbers(rows, width) * sizeof(Number); }
  void pack(char* input, int64_t rows, const void* x, int64_t row, int64_t first, int64_t count) const override {
    product(input, rows).pack_row(static_cast<const X*>(x), row, first, count);
  }

 private:
  using Product = ProductOf<T>;
  using Number = typename Product::Number;

  Product product(char* input, int64_t rows) const {
    return {numbers_.template const_data_ptr<T>(), reinterpret_cast<Number*>(input), rows, width};
  }
  int64_t height(int64_t rows) const override { return product(nullptr, rows).height(); }
  bool takes_whole_depth(int64_t rows) const override {
    const Product packed = product(nullptr, rows);
    return packed.chunk() == packed.tiles();
  }
  std::unique_ptr<PanelProduct> start(char* input, int64_t rows) const override {
    return std::make_unique<PanelsOf<Product>>(product(input, rows));
  }

  const Tensor numbers_;
};

// ---------------------------------------------------------------- weights of integers
// Multiplies by parts in several formats as if they were one: they read the same packed rows.
class IntGemm : public Gemm {
 public:
  IntGemm(const PackedWeight& weight, at::ScalarType x_type)
      : Gemm(weight.outputs, weight.width), weight_(weight), x_type_(x_type) {}

  int64_t input_bytes(int64_t rows) const override { return Int8Rows::bytes(rows, width); }
  void pack(char* input, int64_t rows, const void* x, int64_t row, int64_t first, int64_t count) const override {
    with_type(x_type_, [&](auto number) {
      Int8Rows(input, rows, width).pack(static_cast<const decltype(number)*>(x), row, first, count);
    });
  }

 private:
  // The parts, each with the panel that it begins with.
  class Parts : public PanelProduct {
   public:
    explicit Parts(int64_t height) : size_(height * PANEL) {}

    void add(int64_t begin, std::unique_ptr<PanelProduct> part) { parts_.emplace_back(begin, std::move(part)); }
    void compute(int64_t begin, int64_t end, float* sums) override {
      for (size_t i = 0; i < parts_.size() && begin < end; ++i) {
        const int64_t last = i + 1 < parts_.size() ? std::min(end, parts_[i + 1].first) : end;
        if (begin >= last) continue;
        parts_[i].second->compute(begin - parts_[i].first, last - parts_[i].first, sums);
        sums += (last - begin) * size_;
        begin = last;
      }
    }

   private:
    const int64_t size_;
    std::vector<std::pair<int64_t, std::unique_ptr<PanelProduct>>> parts_;
  };

  int64_t height(int64_t rows) const override { return Int8Rows::height(rows); }
  bool takes_whole_depth(int64_t) const override { return true; }
  std::unique_ptr<PanelProduct> start(char* input, int64_t rows) const override {
    auto parts = std::make_unique<Parts>(height(rows));
    int64_t panel = 0;
    for (const PackedPart& part : weight_.parts) {
      with_int_format(part, [&](auto format) {
        using F = decltype(format);
        const Int8Gemm<F> product(as_int_weight<F>(part), {input, rows, width}, rows, width);
        parts->add(panel, std::make_unique<PanelsOf<Int8Gemm<F>>>(product));
      });
      panel += part.outputs / PANEL;
    }
    return parts;
  }

  const PackedWeight weight_;
  const at::ScalarType x_type_;
};

}  // namespace

// ---------------------------------------------------------------- how threads share a product
namespace {

// Returns the most panels that are computed before the epilogue takes their sums: as many as stay in the L2 cache.
int64_t max_panels(int64_t height) {
  constexpr int64_t CACHED = 512 << 10;  // bytes
  const int64_t panels = CACHED / (height * PANEL * static_cast<int64_t>(sizeof(float)));
  // Round down to whole blocks of panels and as many twin blocks.
  return std::max<int64_t>(1, panels / (2 * PANELS)) * 2 * PANELS;
}

}  // namespace

int64_t Gemm::sums_size(int64_t rows) const { return max_panels(height(rows)) * height(rows) * PANEL; }

void Gemm::multiply(Team& team, Member member, char* input, int64_t rows, float* sums, int64_t twin,
                    const Epilogue& epilogue) const {
  const auto product = start(input, rows);
  const int64_t panels = twin == 0 ? blocks_of(outputs) * PANELS : twin, size = height(rows) * PANEL;
  const int64_t most = max_panels(height(rows)) / (twin == 0 ? 1 : 2), blocks = panels / PANELS, threads = team.size();
  // If only reading memory takes time, there are as few pieces of work as keep all threads busy.
  int64_t pieces;
  if (takes_whole_depth(rows))
    pieces = blocks < MANY_BLOCKS * threads && blocks % threads != 0 ? panels / PAIR : blocks;
  else
    pieces = std::min(panels / PAIR, (panels + most * threads - 1) / (most * threads) * threads);
  team.share(member, pieces, [&](int64_t i) {
    const int64_t first = panels / PAIR * i / pieces * PAIR, last = panels / PAIR * (i + 1) / pieces * PAIR;
    product->compute(first, last, sums);
    if (twin != 0) product->compute(first + twin, last + twin, sums + (last - first) * size);
    epilogue(first, last, sums, size);
  });
}

std::unique_ptr<Gemm> make_gemm(const PackedWeight& weight, at::ScalarType x_type) {
  std::unique_ptr<Gemm> made;
  const PackedPart& first = weight.parts[0];
  if (first.bits > 0) return std::make_unique<IntGemm>(weight, x_type);
  with_type(first.numbers.scalar_type(), [&](auto number) {
    with_type(x_type, [&](auto of_x) { made = std::make_unique<FloatGemm<decltype(number), decltype(of_x)>>(first); });
  });
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
  expect("linear", name, bias, FLOATS, {weight.outputs});
  if (!bias) return {};
  const Tensor padded = at::zeros({blocks_of(weight.outputs) * BLOCK}, at::kFloat);
  padded.narrow(0, 0, weight.outputs).copy_(*bias);
  return padded;
}

}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def(
      "linear(Tensor x, Tensor[] weight, int[] layout, Tensor? bias) -> Tensor",
      [](const at::Tensor& x, at::TensorList weight, at::IntArrayRef layout, const std::optional<at::Tensor>& bias) {
        return kvmux::linear(x, kvmux::PackedWeight(weight, layout), bias);
      });
}
