// Products with packed weights of integers in AMX tile registers: for many rows, which vector instructions would
// compute more slowly. Each thread has an object with the tile configuration, and memory in which panels of 4 bits are
// widened to bytes. The results have the same bits as those of gemm_int8.h. Knows neither tensors nor threads.
#pragma once

#include <vector>

#include "amx.h"
#include "gemm_int8.h"

namespace kvmux {

#ifdef __AMX_TILE__

template <typename F>
class Int8AmxTiles {
 public:
  using Product = Int8Gemm<F>;
  static constexpr int64_t MIN_ROWS = Product::MANY + 1;  // for fewer, vector instructions take less time

  explicit Int8AmxTiles(const Product& product)
      : product_(product), tiles_(GROUP), bytes_(F::BITS == 8 ? 0 : PANELS * product.tiles() * P::TILE) {}

  // Computes the sums [panels][height][PANEL] of 2 or 4 panels of a block, over the whole depth, one panel after the
  // other.
  void add(int64_t first, int64_t panels, float* sums) {
    const uint8_t* const w = F::BITS == 8 ? product_.tiles_of(first) : widen_panels(first, panels);
    const int64_t between = F::BITS == 8 ? PANELS : panels;
    for (int64_t n = 0; n < panels; ++n)
      for (int64_t row = 0; row < product_.rows_; row += TILE_ROWS)
        multiply_panel(w + n * P::TILE, between, row, first + n, sums + (n * product_.height() + row) * PANEL);
  }

 private:
  using P = Packing<uint8_t>;
  static_assert(Product::V == 1 && Int8Rows::TOGETHER == TILE_ROWS);  // with AMX, a vector is as wide as a panel
  static constexpr int64_t BYTES = Product::BYTES, GROUP = UNIT / F::PARTS;
  static constexpr int64_t GROUPS = 4;  // groups of columns whose products are computed together
  using Dots = int32_t[TILE_ROWS][PANEL];

  // Multiplies 16 rows of x by one panel, whose tiles of one depth and the next are `between` apart. While the sums of
  // some groups of columns are scaled, the next groups are multiplied.
  void multiply_panel(const uint8_t* w, int64_t between, int64_t row, int64_t panel, float* sums) {
    alignas(64) Dots dots[2][GROUPS];
    Raw total[TILE_ROWS];
    unroll<TILE_ROWS>([&](auto r) { total[r] = Vec(0.f); });
    const int64_t groups = product_.w_.units * F::PARTS;
    dot_groups(w, between, row, 0, dots[0]);
    for (int64_t g = 0; g < groups; g += GROUPS) {
      if (g + GROUPS < groups) dot_groups(w, between, row, g + GROUPS, dots[(g / GROUPS + 1) % 2]);
      for (int64_t i = 0; i < std::min(GROUPS, groups - g); ++i) {
        const int64_t u = (g + i) / F::PARTS, part = (g + i) % F::PARTS;
        const auto scales = product_.scales(panel, u, part);
        unroll<TILE_ROWS>([&](auto r) {
          Integers dot;
          std::memcpy(&dot, dots[g / GROUPS % 2][i][r], sizeof(dot));
          Product::add_dots(scales, 0, product_.x_.units(row + r)[u], part, dot, total[r]);
        });
      }
    }
    unroll<TILE_ROWS>([&](auto r) { Vec(total[r]).store(sums + r * PANEL); });
  }

  // Multiplies 16 rows of x by up to GROUPS groups of columns of a panel, from group number `first` on, as far as it
  // has that many. The sums are in tile registers 0 to 3.
  void dot_groups(const uint8_t* w, int64_t between, int64_t row, int64_t first, Dots (&dots)[GROUPS]) {
    const int64_t count = std::min(GROUPS, product_.w_.units * F::PARTS - first), pitch = product_.x_.pitch();
    unroll<GROUPS>([&](auto i) {
      if (i >= count) return;
      const int64_t k = (first + i) * GROUP;
      tile_zero<i>();
      tile_load<4 + i % 2>(product_.x_.numbers(row) + k, pitch);
      tile_load<6 + i % 2>(w + k / P::DEPTH * between * P::TILE + k % P::DEPTH * PANEL, TILE_BYTES);
      tile_dot_int8<i, 4 + i % 2, 6 + i % 2, F::OFFSETS>();
    });
    unroll<GROUPS>([&](auto i) {
      if (i < count) tile_store<i>(dots[i], TILE_BYTES);
    });
  }

  // Returns panels of the weight as bytes: numbers of fewer bits are widened into this object's memory, minus what the
  // products subtract.
  const uint8_t* widen_panels(int64_t panel, int64_t panels) {
    const uint8_t* from = product_.tiles_of(panel);
    for (int64_t tile = 0; tile < product_.tiles(); ++tile)
      for (int64_t n = 0; n < panels; ++n) {
        const uint8_t* packed = from + (tile * PANELS + n) * BYTES;
        uint8_t* to = bytes_.data() + (tile * panels + n) * P::TILE;
        for (int64_t unit = 0; unit < 2; ++unit, packed += Product::UNIT_BYTES) {
          for (int64_t i = 0; i < Product::UNIT_BYTES; i += Product::LINE)
            __builtin_prefetch(packed + i + Product::template AHEAD<PANELS>, 0, Product::L2);
          unroll<QUADS>([&](auto q) {
            const Bytes numbers = load_quad<F, q>(packed, 0) - static_cast<uint8_t>(F::SHIFT);
            std::memcpy(to, &numbers, sizeof(numbers));
            to += sizeof(numbers);
          });
        }
      }
    return bytes_.data();
  }

  const Product& product_;
  Tiles tiles_;
  std::vector<uint8_t> bytes_;  // of widened panels
};

#else

// Stands in for the tiles where there are none.
template <typename F>
struct Int8AmxTiles {
  static constexpr int64_t MIN_ROWS = std::numeric_limits<int64_t>::max();
  explicit Int8AmxTiles(const Int8Gemm<F>&) {}
  void add(int64_t, int64_t, float*) {}
};

#endif

}  // namespace kvmux
