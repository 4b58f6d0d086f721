// Products with packed weights of bfloat16 in AMX's tiles, for one row as for many.
//
// A tile of sums is added to in the order of k, whatever stands beside it, so a number of y does not depend on how many
// rows are computed with it. Knows neither tensors nor threads.
#pragma once

#include "amx.h"
#include "packed.h"
#include "vector.h"

#ifdef __AMX_TILE__

namespace kvmux {

class Bf16AmxGemm {
 public:
  using Weight = at::BFloat16;
  using Number = at::BFloat16;  // what rows of x are kept in: tiles [rows / 16][k / 32][16][32]
  struct Session {
    explicit Session(const Bf16AmxGemm&) {}
    Tiles tiles;
  };

  static int64_t numbers(int64_t rows, int64_t k) { return padded_rows(rows) * P::tiles(k) * P::DEPTH; }

  Bf16AmxGemm(const Weight* w, Number* x, int64_t rows, int64_t k)
      : w_(w), x_(x), rows_(padded_rows(rows)), k_(k), tiles_(P::tiles(k)) {}

  int64_t tiles() const { return tiles_; }

  int64_t height() const { return rows_; }  // rows that sums are kept for

  // Tiles that are added at a time: all rows meet them in the first cache. Few rows take the whole depth at once.
  int64_t chunk() const { return rows_ == TILE_ROWS ? tiles_ : CHUNK; }

  // Columns begin .. begin + count - 1 of a row, from a whole tile on. Numbers behind the last row are whatever was
  // there: nobody reads their sums.
  template <typename X>
  void enter(const X* from, int64_t row, int64_t begin, int64_t count) const {
    const int64_t tile = row / TILE_ROWS * tiles_ + begin / P::DEPTH;
    Number* to = x_ + (tile * TILE_ROWS + row % TILE_ROWS) * P::DEPTH;
    const int64_t whole = count / P::DEPTH * P::DEPTH;
    for (int64_t i = 0; i < whole; i += P::DEPTH, to += P::TILE) convert(from + i, to, P::DEPTH);
    if (whole == count) return;
    convert(from + whole, to, count - whole);
    std::fill(to + count - whole, to + P::DEPTH, Number(0.f));
  }

  // sums [panels][height][PANEL] of 2 or 4 panels of a block plus their tiles begin .. end - 1; they begin with the
  // first.
  void add(Session&, int64_t first, int64_t panels, int64_t begin, int64_t end, float* sums) const {
    const Weight* w = w_ + P::panel(first, k_);
    if (rows_ == TILE_ROWS) return panels == PANELS ? few<PANELS>(w, begin, end, sums) : few<PAIR>(w, begin, end, sums);
    for (int64_t pair = 0; pair < panels; pair += 2, w += 2 * P::TILE, sums += 2 * rows_ * PANEL) {
      const Weight* next = w + (pair == 0 ? 2 : (tiles_ - 1) * PANELS + 2) * P::TILE;
      for (int64_t row = 0; row < rows_; row += 2 * TILE_ROWS) square(row, w, next, begin, end, sums + row * PANEL);
    }
  }

 private:
  using P = Packing<Weight>;
  static constexpr int64_t STRIDE = 64;  // bytes: rows of a tile lie behind each other, wherever it is
  template <int N>  // numbers between what is multiplied and what is fetched: whole blocks lie without gaps
  static constexpr int64_t AHEAD = (N == PANELS ? 2 : PANELS) * P::TILE;
  static constexpr int64_t CHUNK = 10;  // two panels' then stay in the first cache, while rows and sums pass through it

  // Up to 16 rows, or twice 16 for some.
  static int64_t padded_rows(int64_t rows) {
    const int64_t whole = rows <= TILE_ROWS ? TILE_ROWS : 2 * TILE_ROWS;
    return (rows + whole - 1) / whole * whole;
  }

  // A tile that is wanted soon. Tiles are loaded line by line, and the machine by itself asks for too few at a time.
  static void fetch(const Weight* tile) {
    const auto* line = reinterpret_cast<const char*>(tile);
    for (int64_t row = 0; row < TILE_ROWS; ++row, line += STRIDE) _mm_prefetch(line, _MM_HINT_T0);
  }

  // 16 rows of x and N panels. Sums are tiles 0 to 3.
  template <int N>
  void few(const Weight* w, int64_t begin, int64_t end, float* sums) const {
    unroll<N>([&](auto n) { begin_sum<n>(begin == 0, sums + n * TILE_ROWS * PANEL); });
    for (int64_t tile = begin; tile < end; ++tile) {
      const Weight* weights = w + tile * PANELS * P::TILE;
      tile_load<4>(x_ + tile * P::TILE, STRIDE);
      unroll<N>([&](auto n) {
        fetch(weights + n * P::TILE + AHEAD<N>);
        tile_load<6 + n % 2>(weights + n * P::TILE, STRIDE);
        tile_dot<n, 4, 6 + n % 2>();
      });
    }
    unroll<N>([&](auto n) { tile_store<n>(sums + n * TILE_ROWS * PANEL, STRIDE); });
  }

  // 32 rows of x and 2 panels. A part of the next panels comes into the second cache with each 32 rows.
  void square(int64_t row, const Weight* w, const Weight* next, int64_t begin, int64_t end, float* sums) const {
    constexpr int64_t LINE = 64 / sizeof(Weight), LINES = 2 * P::TILE / LINE;
    const int64_t soon = LINES * row / rows_ * LINE, then = LINES * (row + 2 * TILE_ROWS) / rows_ * LINE;
    const auto at = [&](int i) { return sums + (i % 2 * rows_ + i / 2 * TILE_ROWS) * PANEL; };
    unroll<4>([&](auto i) { begin_sum<i>(begin == 0, at(i)); });
    const Number* first = x_ + row * tiles_ * P::DEPTH;
    const Number* second = first + TILE_ROWS * tiles_ * P::DEPTH;
    for (int64_t tile = begin; tile < end; ++tile) {
      const Weight* weights = w + tile * PANELS * P::TILE;
      tile_load<6>(weights, STRIDE);
      tile_pass<4>(first + tile * P::TILE, STRIDE);
      tile_load<7>(weights + P::TILE, STRIDE);
      tile_pass<5>(second + tile * P::TILE, STRIDE);
      for (int64_t i = soon; i < then; i += LINE)
        _mm_prefetch(reinterpret_cast<const char*>(next + tile * PANELS * P::TILE + i), _MM_HINT_T1);
      tile_dot<0, 4, 6>();
      tile_dot<1, 4, 7>();
      tile_dot<2, 5, 6>();
      tile_dot<3, 5, 7>();
    }
    unroll<4>([&](auto i) { tile_store<i>(at(i), STRIDE); });
  }

  template <int N>
  static void begin_sum(bool first, const float* sum) {
    if (first)
      tile_zero<N>();
    else
      tile_pass<N>(sum, STRIDE);
  }

  const Weight* w_;
  Number* x_;
  int64_t rows_, k_, tiles_;
};

}  // namespace kvmux

#endif
