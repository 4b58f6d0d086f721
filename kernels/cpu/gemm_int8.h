// Products with packed weights in integers of 8 or 4 bits: value = scale * number + offset, per group of columns.
//
// A row of x is quantized to 8 bits, too, with a scale for each group. So the products of a group are summed in 32 bits
// without rounding, and a number of y is one chain of multiply-adds over the groups. Its bits are the same on every
// instruction set and for any number of rows. Knows neither tensors nor threads.
#pragma once

#include <cmath>
#include <limits>

#include "dot_int8.h"
#include "packed.h"
#include "vector.h"

namespace kvmux {

// A packed weight of integers. Numbers of 4 bits are halves of bytes: of 8 columns, the first 4 are the lower halves.
// Without offsets, value = scale * (number - 2^(bits - 1)), and numbers of 8 bits are stored as signed bytes, with 128
// already subtracted.
template <typename S>
struct IntWeight {
  const uint8_t* numbers;
  const S* scale;   // [panels][groups][PANEL]
  const S* offset;  // the same, or null
  int64_t groups, group;
};

// Rows of x, quantized. Padding rows after the last one are multiplied, too, and their results are not read.
struct Int8Rows {
  int8_t* numbers;  // [height][pitch]
  float* scale;     // [groups][height]
  int32_t* sum;     // [groups][height]: sum of the numbers; if the weight has no offsets, times -2^(bits - 1)
};

template <int BITS, bool OFFSETS, typename S>
class Int8AmxTiles;

template <int BITS, bool OFFSETS, typename S>
class Int8Gemm {
 public:
  using Session = Int8AmxTiles<BITS, OFFSETS, S>;

  // Returns the bytes from row to row of quantized x: never a multiple of a page, as the rows would then share cache
  // sets.
  static int64_t pitch(int64_t k) { return (P::tiles(k) + 1) * P::DEPTH; }
  static int64_t height_of(int64_t rows) { return (rows + TOGETHER - 1) / TOGETHER * TOGETHER; }

  Int8Gemm(const IntWeight<S>& w, const Int8Rows& x, int64_t rows, int64_t k) : w_(w), x_(x), rows_(rows), k_(k) {}

  int64_t tiles() const { return P::tiles(k_); }
  int64_t chunk() const { return tiles(); }  // tiles of the depth added at a time: all of them
  int64_t height() const { return height_of(rows_); }

  // Quantizes a row of x [k] to 8 bits.
  template <typename X>
  void pack_row(const X* from, int64_t row) const {
    int8_t* to = x_.numbers + row * pitch(k_);
    for (int64_t g = 0; g < w_.groups; ++g) {
      const int64_t begin = g * w_.group, n = std::min(k_ - begin, w_.group);
      const float most = largest_magnitude(from + begin, n);
      const bool finite = std::isfinite(most);
      const int32_t sum = round_to_int8(from + begin, finite && most > TINY ? LARGEST / most : 0.f, to + begin, n);
      x_.scale[g * height() + row] = finite ? most / LARGEST : std::numeric_limits<float>::quiet_NaN();
      x_.sum[g * height() + row] = OFFSETS ? sum : -ZERO * sum;
    }
    std::fill(to + k_, to + tiles() * P::DEPTH, int8_t{0});
  }

  // Computes the sums [panels][height][PANEL] of 2 or 4 panels of a block, over the whole depth.
  void add(Session& session, int64_t first, int64_t panels, int64_t, int64_t, float* sums) const {
    if (rows_ > (w_.groups == 1 ? ROWS : MOST_ROWS) && Session::USABLE) return session.add(first, panels, sums);
    if (rows_ > ROWS) {
      for (int64_t i = 0; i < panels; ++i) multiply_rows<MOST_ROWS, 1>(0, first + i, sums + i * height() * PANEL);
      return;
    }
    if (WIDE == PANELS && panels == PANELS) return multiply_rows<ROWS, WIDE>(0, first, sums);
    for (int64_t i = 0; i < panels; i += PAIR) multiply_rows<ROWS, PAIR>(0, first + i, sums + i * height() * PANEL);
  }

 private:
  friend Session;
  using P = Packing<uint8_t>;
  static constexpr float LARGEST = 127.f;
  // A group of a row counts as 0 if its largest magnitude is below this: LARGEST divided by it could be infinite.
  static constexpr float TINY = 1e-36f;
  static constexpr int WIDE = REGISTERS == 32 ? PANELS : PAIR;  // panels computed together for at most ROWS rows
  static constexpr int ROWS = REGISTERS == 32 ? 4 : 1;          // rows that vector instructions compute together
  static constexpr int MOST_ROWS = 2 * ROWS;  // rows that vector instructions compute together for one panel
  static constexpr int64_t TOGETHER = 32;     // rows that AMX computes together; rows are padded to it
  static constexpr int V = PANEL / W;
  static constexpr int64_t BYTES = P::TILE * BITS / 8;  // of a tile
  static constexpr int64_t QUADS = P::DEPTH / 4;        // of a tile
  static constexpr int PER_BYTE = 8 / BITS;
  static constexpr int32_t ZERO = OFFSETS ? 0 : 1 << (BITS - 1);  // what is subtracted from each number

  // Returns the prefetch distance in bytes, for N panels that are multiplied together: the next depth; for whole
  // blocks, which are read in order, 2 KiB.
  template <int N>
  static constexpr int64_t ahead() {
    constexpr int64_t DEPTH = PANELS * BYTES, NEAR = 2048;
    return N == PANELS ? NEAR : N == 1 ? 4 * DEPTH : DEPTH;
  }

  // Returns the largest magnitude of n numbers; NaN if one of them is NaN.
  template <typename X>
  static float largest_magnitude(const X* from, int64_t n) {
    const auto larger = [](Vec a, Vec b) { return at::vec::maximum(a, b); };
    Vec most(0.f);
    int64_t i = 0;
    for (; i + W <= n; i += W) most = larger(most, load(from + i).abs());
    for (; i < n; ++i) most = larger(most, Vec(std::abs(static_cast<float>(from[i]))));
    return reduce(most, larger);
  }

  // Stores n numbers times `factor`, rounded to integers; returns their sum.
  template <typename X>
  static int32_t round_to_int8(const X* from, float factor, int8_t* to, int64_t n) {
    using Integers = int32_t __attribute__((vector_size(sizeof(Raw))));
    using Small = int8_t __attribute__((vector_size(W)));
    const Vec factors(factor);
    Integers sums{};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      const Integers numbers = __builtin_convertvector(Raw((load(from + i) * factors).round()), Integers);
      const Small small = __builtin_convertvector(numbers, Small);
      std::memcpy(to + i, &small, sizeof(small));
      sums += numbers;
    }
    int32_t sum = 0;
    for (int64_t lane = 0; lane < W; ++lane) sum += sums[lane];
    for (; i < n; ++i) {
      to[i] = static_cast<int8_t>(std::nearbyint(static_cast<float>(from[i]) * factor));
      sum += to[i];
    }
    return sum;
  }

  const uint8_t* tiles_of(int64_t panel) const { return w_.numbers + P::panel(panel, k_) / P::TILE * BYTES; }
  const int8_t* row(int64_t n) const { return x_.numbers + n * pitch(k_); }

  // Multiplies the rows from `row` on by N panels of the weight, R rows at a time, then those that are left.
  template <int R, int N>
  void multiply_rows(int64_t row, int64_t panel, float* sums) const {
    for (; row + R <= rows_; row += R) multiply_block<R, N>(row, panel, sums + row * PANEL);
    if constexpr (R > 1)
      if (row < rows_) multiply_rows<R / 2, N>(row, panel, sums);
  }

  // Multiplies R rows of x by N panels of the weight, with vector instructions.
  template <int R, int N>
  void multiply_block(int64_t first, int64_t panel, float* sums) const {
    const uint8_t* w = tiles_of(panel);
    Raw total[R][N][V];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { unroll<V>([&](auto v) { total[r][n][v] = Vec(0.f); }); }); });
    for (int64_t g = 0; g < w_.groups; ++g) {
      Dot4 dots[R][N];
      unroll<R>([&](auto r) {
        const int32_t begin = OFFSETS ? 0 : x_.sum[g * height() + first + r];
        unroll<N>([&](auto n) { dots[r][n] = quads(begin); });
      });
      const int64_t end = (std::min(k_, (g + 1) * w_.group) + 3) / 4;
      for (int64_t quad = g * w_.group / 4; quad < end; quad += PER_BYTE) {
        const uint8_t* at = w + quad / QUADS * PANELS * BYTES + quad % QUADS * 4 * PANEL / PER_BYTE;
        unroll<N>([&](auto n) {
          __builtin_prefetch(at + n * BYTES + ahead<N>());
          const Bytes bytes = load_bytes(at + n * BYTES) ^ static_cast<uint8_t>(BITS == 8 ? ZERO : 0);
          unroll<PER_BYTE>([&](auto half) {
            const Bytes numbers = BITS == 8 ? bytes : half == 0 ? bytes & 15 : bytes >> 4;
            unroll<R>([&](auto r) { add_products(dots[r][n], numbers, row(first + r) + (quad + half) * 4); });
          });
        });
      }
      unroll<N>([&](auto n) {
        const Group group(*this, panel + n, g, first);
        unroll<R>([&](auto r) { group.add(r, dots[r][n], total[r][n]); });
      });
    }
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) {
        unroll<V>([&](auto v) { Vec(total[r][n][v]).store(sums + (n * height() + r) * PANEL + v * W); });
      });
    });
  }

  // The scales of one group of columns of a panel; add() adds the group to sums: scale of x * (scale of w * dot +
  // offset of w * sum of x).
  struct Group {
    Group(const Int8Gemm& product, int64_t panel, int64_t g, int64_t first)
        : scale_of_x(product.x_.scale + g * product.height() + first),
          sum_of_x(product.x_.sum + g * product.height() + first) {
      const int64_t at = (panel * product.w_.groups + g) * PANEL;
      unroll<V>([&](auto v) { scale[v] = load(product.w_.scale + at + v * W); });
      if constexpr (OFFSETS) unroll<V>([&](auto v) { offset[v] = load(product.w_.offset + at + v * W); });
    }

    inline __attribute__((always_inline)) void add(int64_t row, const Dot4& dots, Raw (&total)[V]) const {
      const auto numbers = __builtin_convertvector(dots, float __attribute__((vector_size(64))));
      const Vec of_x(scale_of_x[row]);
      unroll<V>([&](auto v) {
        Raw dot;
        std::memcpy(&dot, reinterpret_cast<const char*>(&numbers) + v * sizeof(dot), sizeof(dot));
        Vec sum = at::vec::fmadd(Vec(scale[v]) * of_x, Vec(dot), Vec(total[v]));
        if constexpr (OFFSETS) sum = at::vec::fmadd(Vec(offset[v]) * of_x, Vec(static_cast<float>(sum_of_x[row])), sum);
        total[v] = sum;
      });
    }

    const float* scale_of_x;
    const int32_t* sum_of_x;
    Raw scale[V], offset[V];
  };

  const IntWeight<S> w_;
  const Int8Rows x_;
  int64_t rows_, k_;
};

}  // namespace kvmux
