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
    const int64_t step = WIDE || rows_ == 1 || rows_ > FEW ? end - begin : 1;
    for (int64_t tile = begin; tile < end; tile += step)
      over_rows<ROWS, false>(0, first, panels, tile, std::min(end, tile + step), sums);
  }

 private:
  using P = Packing<T>;
  static constexpr int ROWS = 6;
  static constexpr int V = PANEL / W;    // vectors of a panel
  static constexpr int64_t CHUNK = 128;  // columns
  // Whether the sums of ROWS rows for all panels of a block fit into registers. If not, rows are multiplied by one
  // panel at a time, and a FEW rows by one tile of each panel after the other, so that memory is read in order.
  static constexpr bool WIDE = W == PANEL;
  static constexpr int64_t FEW = 2 * ROWS;

  // Returns the number of panels that are computed together, so that the sums of R rows fill most of the registers.
  // From memory, narrow vectors read one panel after the other faster than several at once.
  template <int R, bool CACHED>
  static constexpr int together() {
    if (WIDE) return PANELS;
    return CACHED && R <= 2 ? PANELS / R : 1;
  }

  // Multiplies the rows from `row` on, R at a time, then those that are left. CACHED: rows before them have brought the
  // tiles into the cache.
  template <int R, bool CACHED>
  void over_rows(int64_t row, int64_t first, int64_t panels, int64_t begin, int64_t end, float* sums) const {
    constexpr int N = together<R, CACHED>();
    while (row + R <= rows_) {
      for (int64_t panel = 0; panel < panels; panel += N) {
        const T* const w = w_ + P::panel(first + panel, k_);
        float* const to = sums + panel * rows_ * PANEL + row * PANEL;
        if (panels >= N)
          block<R, N>(row, w, begin, end, to);
        else
          block<R, std::min(N, 2)>(row, w, begin, end, to);
      }
      row += R;
      if constexpr (!CACHED) return over_rows<R, true>(row, first, panels, begin, end, sums);
    }
    if constexpr (R > 1)
      if (row < rows_) over_rows<(R > 4 ? 4 : R / 2), CACHED>(row, first, panels, begin, end, sums);
  }

  // Everything is inlined (`flatten`), so that the sums stay in registers.
  template <int R, int N>
  __attribute__((flatten)) void block(int64_t row, const T* w, int64_t begin, int64_t end, float* sums) const {
    Raw sum[R][N * V];
    const auto at = [&](int r, int v) { return sums + v / V * rows_ * PANEL + r * PANEL + v % V * W; };
    unroll<R>([&](auto r) { unroll<N * V>([&](auto v) { sum[r][v] = begin == 0 ? Vec(0.f) : load(at(r, v)); }); });
    for (int64_t tile = begin; tile < end; ++tile) {
      const T* weights = w + tile * PANELS * P::TILE;
      const float* x = x_ + row * pitch_ + tile * P::DEPTH;
      for (int64_t i = 0; i < P::DEPTH; i += P::S, weights += PANEL * P::S, x += P::S) {
        // The same place in the tile that a panel has next: vectors that take a panel in parts do not read memory in an
        // order that the processor foresees.
        if constexpr (!WIDE) unroll<N>([&](auto n) { __builtin_prefetch(weights + n * P::TILE + PANELS * P::TILE); });
        unroll<P::S>([&](auto s) {
          Raw columns[N * V];
          unroll<N * V>([&](auto v) { columns[v] = load_column<s>(weights + v / V * P::TILE + v % V * W * P::S); });
          unroll<R>([&](auto r) {
            const Vec factor(x[r * pitch_ + s]);
            unroll<N * V>([&](auto v) { sum[r][v] = at::vec::fmadd(factor, Vec(columns[v]), Vec(sum[r][v])); });
          });
        });
      }
    }
    unroll<R>([&](auto r) { unroll<N * V>([&](auto v) { Vec(sum[r][v]).store(at(r, v)); }); });
  }

  // Loads column number s of S adjacent columns of W outputs of the weight, as float32.
  template <int s>
  static Vec load_column(const T* from) {
    if constexpr (P::S == 1)
      return load(from);
    else if constexpr (s == 0)
      return widened(load(reinterpret_cast<const float*>(from))).first;
    else
      return widened(load(reinterpret_cast<const float*>(from))).second;
  }

  const T* w_;
  Number* x_;
  int64_t rows_, k_, pitch_;
};

}  // namespace kvmux
