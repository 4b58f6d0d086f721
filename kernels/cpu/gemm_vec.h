// Products with packed weights of floats in vectors of float32: for float32 and float16, and for bfloat16 on processors
// without AMX.
//
// Each number of y is one chain of fused multiply-adds in the order of k, so it does not depend on how many rows are
// computed beside it. Knows neither tensors nor threads.
#pragma once

#include "packed.h"
#include "vector.h"

namespace kvmux {

template <typename T>
class VectorGemm {
 public:
  using Weight = T;
  using Number = float;  // type of packed rows of x; they are [rows][k, padded to whole tiles]
  struct Session {       // what a thread keeps between calls: nothing here
    explicit Session(const VectorGemm&) {}
  };

  static int64_t numbers(int64_t rows, int64_t k) { return rows * P::tiles(k) * P::DEPTH; }

  VectorGemm(const T* w, Number* x, int64_t rows, int64_t k)
      : w_(w), x_(x), rows_(rows), k_(k), pitch_(P::tiles(k) * P::DEPTH) {}

  int64_t tiles() const { return P::tiles(k_); }

  int64_t height() const { return rows_; }  // rows for which sums are computed

  // Returns how many tiles of the depth (k) are added at a time, so that all rows find them in the L1 cache. For few
  // rows it is the whole depth.
  int64_t chunk() const { return rows_ <= ROWS ? tiles() : CHUNK / P::DEPTH; }

  // Packs columns begin .. begin + count - 1 of a row of x: rounds them to the weight's type and stores them as
  // float32.
  template <typename X>
  void pack_row(const X* from, int64_t row, int64_t begin, int64_t count) const {
    float* to = x_ + row * pitch_ + begin;
    if constexpr (std::is_same_v<T, X> || std::is_same_v<T, float>) {
      to_float(from, to, count);
    } else {
      T rounded[2 * W];
      for (int64_t i = 0; i < count; i += 2 * W) {
        const int64_t n = std::min(2 * W, count - i);
        convert(from + i, rounded, n);
        to_float(rounded, to + i, n);
      }
    }
    if (begin + count == k_) std::fill(to + count, to + pitch_ - begin, 0.f);
  }

  // Adds to sums [panels][height][PANEL] the products of x with tiles begin .. end - 1 of the depth, for 2 or 4 panels
  // of a block; if begin is 0, the sums start at 0.
  void add(Session&, int64_t first, int64_t panels, int64_t begin, int64_t end, float* sums) const {
    for (int64_t panel = 0; panel < panels; panel += TOGETHER) {
      const T* from = w_ + P::panel(first + panel, k_);
      float* to = sums + panel * rows_ * PANEL;
      if (panels == PANELS)
        over_rows<ROWS, TOGETHER>(0, from, begin, end, to);
      else
        over_rows<ROWS, std::min(TOGETHER, 2)>(0, from, begin, end, to);
    }
  }

 private:
  using P = Packing<T>;
  static constexpr int ROWS = 6;
  // Number of panels computed together: with ROWS rows, their sums fill most of the registers.
  static constexpr int TOGETHER = W == PANEL ? 4 : 1;
  static constexpr int V = PANEL / W;    // vectors of a panel
  static constexpr int64_t CHUNK = 128;  // columns

  template <int R, int N>
  void over_rows(int64_t row, const T* w, int64_t begin, int64_t end, float* sums) const {
    for (; row + R <= rows_; row += R) block<R, N>(row, w, begin, end, sums + row * PANEL);
    if constexpr (R > 1)
      if (row < rows_) over_rows<(R > 4 ? 4 : R / 2), N>(row, w, begin, end, sums);
  }

  template <int R, int N>
  void block(int64_t row, const T* w, int64_t begin, int64_t end, float* sums) const {
    Raw sum[R][N * V];
    const auto at = [&](int r, int v) { return sums + v / V * rows_ * PANEL + r * PANEL + v % V * W; };
    unroll<R>([&](auto r) { unroll<N * V>([&](auto v) { sum[r][v] = begin == 0 ? Vec(0.f) : load(at(r, v)); }); });
    for (int64_t tile = begin; tile < end; ++tile) {
      const T* weights = w + tile * PANELS * P::TILE;
      const float* x = x_ + row * pitch_ + tile * P::DEPTH;
      for (int64_t i = 0; i < P::DEPTH; i += P::S, weights += PANEL * P::S, x += P::S)
        unroll<N * V>([&](auto v) {
          Raw columns[P::S];
          load_columns(weights + v / V * P::TILE + v % V * W * P::S, columns);
          unroll<P::S>([&](auto s) {
            unroll<R>(
                [&](auto r) { sum[r][v] = at::vec::fmadd(Vec(x[r * pitch_ + s]), Vec(columns[s]), Vec(sum[r][v])); });
          });
        });
    }
    unroll<R>([&](auto r) { unroll<N * V>([&](auto v) { Vec(sum[r][v]).store(at(r, v)); }); });
  }

  // Loads S adjacent columns of W outputs of the weight, as float32.
  static void load_columns(const T* from, Raw (&to)[P::S]) {
    if constexpr (P::S == 2) {
      const auto [first, second] = widened(load(reinterpret_cast<const float*>(from)));
      to[0] = first;
      to[1] = second;
    } else {
      to[0] = load(from);
    }
  }

  const T* w_;
  Number* x_;
  int64_t rows_, k_, pitch_;
};

}  // namespace kvmux
