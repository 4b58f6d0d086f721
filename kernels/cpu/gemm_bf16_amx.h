// Products with packed weights of bfloat16 in AMX tiles, for any number of rows.
//
// A tile of sums is accumulated in the order of k, so a number of y does not depend on how many rows are computed with
// it. Knows neither tensors nor threads.
#pragma once

#include "amx.h"
#include "packed.h"
#include "vector.h"

#ifdef __AMX_TILE__

namespace kvmux {

class Bf16AmxGemm {
 public:
  using Weight = at::BFloat16;
  using Number = at::BFloat16;  // type of packed rows of x; they are tiles [rows / 16][k / 32][16][32]
  struct Session {
    explicit Session(const Bf16AmxGemm&) {}
    Tiles tiles;
  };

  static int64_t numbers(int64_t rows, int64_t k) { return padded_rows(rows) * P::tiles(k) * P::DEPTH; }

  Bf16AmxGemm(const Weight* w, Number* x, int64_t rows, int64_t k)
      : w_(w), x_(x), rows_(padded_rows(rows)), k_(k), tiles_(P::tiles(k)) {}

  int64_t tiles() const { return tiles_; }

  int64_t height() const { return rows_; }  // rows for which sums are computed, padding included

  // Returns how many tiles of the depth (k) are added at a time, so that all rows find them in the L1 cache. For few
  // rows it is the whole depth.
  int64_t chunk() const { return rows_ == TILE_ROWS ? tiles_ : CHUNK; }

  // Packs columns begin .. begin + count - 1 of a row of x; `begin` is a multiple of a tile's columns. Padding rows are
  // not initialised, as their sums are not read.
  template <typename X>
  void pack_row(const X* from, int64_t row, int64_t begin, int64_t count) const {
    const int64_t tile = row / TILE_ROWS * tiles_ + begin / P::DEPTH;
    Number* to = x_ + (tile * TILE_ROWS + row % TILE_ROWS) * P::DEPTH;
    const int64_t whole = count / P::DEPTH * P::DEPTH;
    for (int64_t i = 0; i < whole; i += P::DEPTH, to += P::TILE) convert(from + i, to, P::DEPTH);
    if (whole == count) return;
    convert(from + whole, to, count - whole);
    std::fill(to + count - whole, to + P::DEPTH, Number(0.f));
  }

  // Adds to sums [panels][height][PANEL] the products of x with tiles begin .. end - 1 of the depth, for 2 or 4 panels
  // of a block; if begin is 0, the sums start at 0.
  void add(Session&, int64_t first, int64_t panels, int64_t begin, int64_t end, float* sums) const {
    const Weight* w = w_ + P::panel(first, k_);
    if (rows_ == TILE_ROWS)
      return panels == PANELS ? multiply_few<PANELS>(w, begin, end, sums) : multiply_few<PAIR>(w, begin, end, sums);
    for (int64_t pair = 0; pair < panels; pair += 2, w += 2 * P::TILE, sums += 2 * rows_ * PANEL) {
      const Weight* next = w + (pair == 0 ? 2 : (tiles_ - 1) * PANELS + 2) * P::TILE;
      for (int64_t row = 0; row < rows_; row += 2 * TILE_ROWS)
        multiply_many(row, w, next, begin, end, sums + row * PANEL);
    }
  }

 private:
  using P = Packing<Weight>;
  static constexpr int64_t STRIDE = 64;  // bytes from row to row of a tile: rows are adjacent in x, weight and sums
  template <int N>                       // prefetch distance from the tile being multiplied, in numbers
  static constexpr int64_t AHEAD = (N == PANELS ? 2 : PANELS) * P::TILE;
  // Tiles added at a time for many rows: those of two panels stay in the L1 cache while rows and sums pass through it.
  static constexpr int64_t CHUNK = 10;

  // Returns the number of rows with padding: 16 for up to 16 rows, otherwise the next multiple of 32.
  static int64_t padded_rows(int64_t rows) {
    const int64_t whole = rows <= TILE_ROWS ? TILE_ROWS : 2 * TILE_ROWS;
    return (rows + whole - 1) / whole * whole;
  }

  // Prefetches a tile of the weight. A tile is loaded line by line, and the hardware prefetcher alone keeps too few
  // loads in flight.
  static void prefetch(const Weight* tile) {
    const auto* line = reinterpret_cast<const char*>(tile);
    for (int64_t row = 0; row < TILE_ROWS; ++row, line += STRIDE) _mm_prefetch(line, _MM_HINT_T0);
  }

  // Multiplies 16 rows of x by N panels of the weight. The sums are in tile registers 0 to 3.
  template <int N>
  void multiply_few(const Weight* w, int64_t begin, int64_t end, float* sums) const {
    unroll<N>([&](auto n) { begin_sum<n>(begin == 0, sums + n * TILE_ROWS * PANEL); });
    for (int64_t tile = begin; tile < end; ++tile) {
      const Weight* weights = w + tile * PANELS * P::TILE;
      tile_load<4>(x_ + tile * P::TILE, STRIDE);
      unroll<N>([&](auto n) {
        prefetch(weights + n * P::TILE + AHEAD<N>);
        tile_load<6 + n % 2>(weights + n * P::TILE, STRIDE);
        tile_dot<n, 4, 6 + n % 2>();
      });
    }
    unroll<N>([&](auto n) { tile_store<n>(sums + n * TILE_ROWS * PANEL, STRIDE); });
  }

  // Multiplies the 32 rows of x from `row` on by 2 panels of the weight. Each call prefetches a part of the next panels
  // into the L2 cache.
  void multiply_many(int64_t row, const Weight* w, const Weight* next, int64_t begin, int64_t end, float* sums) const {
    constexpr int64_t LINE = 64 / sizeof(Weight), LINES = 2 * P::TILE / LINE;
    const int64_t soon = LINES * row / rows_ * LINE, then = LINES * (row + 2 * TILE_ROWS) / rows_ * LINE;
    const auto at = [&](int i) { return sums + (i % 2 * rows_ + i / 2 * TILE_ROWS) * PANEL; };
    unroll<4>([&](auto i) { begin_sum<i>(begin == 0, at(i)); });
    const Number* first = x_ + row * tiles_ * P::DEPTH;
    const Number* second = first + TILE_ROWS * tiles_ * P::DEPTH;
    for (int64_t tile = begin; tile < end; ++tile) {
      const Weight* weights = w + tile * PANELS * P::TILE;
      tile_load<6>(weights, STRIDE);
      tile_stream<4>(first + tile * P::TILE, STRIDE);
      tile_load<7>(weights + P::TILE, STRIDE);
      tile_stream<5>(second + tile * P::TILE, STRIDE);
      for (int64_t i = soon; i < then; i += LINE)
        _mm_prefetch(reinterpret_cast<const char*>(next + tile * PANELS * P::TILE + i), _MM_HINT_T1);
      tile_dot<0, 4, 6>();
      tile_dot<1, 4, 7>();
      tile_dot<2, 5, 6>();
      tile_dot<3, 5, 7>();
    }
    unroll<4>([&](auto i) { tile_store<i>(at(i), STRIDE); });
  }

  // Sets tile register N to a sum so far, or to zeros for the first one.
  template <int N>
  static void begin_sum(bool first, const float* sum) {
    if (first)
      tile_zero<N>();
    else
      tile_stream<N>(sum, STRIDE);
  }

  const Weight* w_;
  Number* x_;
  int64_t rows_, k_, tiles_;
};

}  // namespace kvmux

#endif
