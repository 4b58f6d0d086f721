// Products with packed weights of integers in AMX tile registers: for many rows, which vector instructions would
// compute more slowly. Each thread has an object with the tile configuration, and memory in which panels of 4 bits are
// widened to bytes. The results have the same bits as those of gemm_int8.h. Knows neither tensors nor threads.
#pragma once

#include <vector>

#include "amx.h"
#include "gemm_int8.h"

namespace kvmux {

#ifdef __AMX_TILE__

template <int BITS, bool OFFSETS, typename S>
class Int8AmxTiles {
 public:
  using Product = Int8Gemm<BITS, OFFSETS, S>;
  static constexpr bool USABLE = true;

  explicit Int8AmxTiles(const Product& product)
      : product_(product),
        tiles_(product.w_.group % P::DEPTH == 0 || product.w_.groups == 1 ? TILE_BYTES : TILE_BYTES / 2),
        bytes_(BITS == 8 ? 0 : PANELS * product.tiles() * P::TILE) {}

  // Computes the sums [panels][height][PANEL] of 2 or 4 panels of a block, over the whole depth.
  void add(int64_t first, int64_t panels, float* sums) {
    if (product_.w_.groups > 1)
      return panels == PANELS ? multiply_groups<PANELS>(first, sums) : multiply_groups<PAIR>(first, sums);
    // For up to 16 rows all panels of a block are computed at once, as reading memory limits the speed; for more rows
    // the products limit it.
    if (product_.rows_ <= TILE_ROWS && panels == PANELS) return multiply_one_group<1, PANELS>(first, sums);
    for (int64_t i = 0; i < panels; i += PAIR, sums += PAIR * product_.height() * PANEL)
      if (product_.rows_ <= TILE_ROWS)
        multiply_one_group<1, PAIR>(first + i, sums);
      else
        multiply_one_group<2, PAIR>(first + i, sums);
  }

 private:
  using P = Packing<uint8_t>;
  static constexpr int V = Product::V;
  static constexpr int64_t BYTES = Product::BYTES;
  using Group = typename Product::Group;
  using Dots = int32_t[TILE_ROWS][PANEL];
  static constexpr int64_t GROUPS = 4;  // groups of columns whose products are computed together

  // Number of tiles from one depth of the weight to the next, after numbers of 4 bits were widened to bytes.
  template <int N>
  static constexpr int64_t BETWEEN = BITS == 8 ? PANELS : N;

  template <int N>
  static constexpr int64_t AHEAD = Product::template ahead<N>();

  // The float32 sums of 16 rows of x and one panel.
  struct Totals {
    static_assert(V == 1);  // with AMX, a vector is as wide as a panel

    Totals() {
      unroll<TILE_ROWS>([&](auto r) { rows[r][0] = Vec(0.f); });
    }

    inline __attribute__((always_inline)) void add(const Group& group, const Dots& dots) {
      unroll<TILE_ROWS>([&](auto r) {
        Dot4 dot;
        std::memcpy(&dot, dots[r], sizeof(dot));
        group.add(r, dot, rows[r]);
      });
    }

    void store(float* to) const {
      unroll<TILE_ROWS>([&](auto r) { Vec(rows[r][0]).store(to + r * PANEL); });
    }

    Raw rows[TILE_ROWS][V];
  };

  // Multiplies all rows of x, 16 A of them at a time, by N panels of a weight that has one group of columns.
  template <int A, int N>
  void multiply_one_group(int64_t panel, float* sums) {
    const uint8_t* w = widen_panels<N>(panel);
    for (int64_t row = 0; row < product_.rows_; row += A * TILE_ROWS)
      if (A == 1 || product_.rows_ - row <= TILE_ROWS)
        multiply_block<1, N>(w, row, panel, sums + row * PANEL);
      else
        multiply_block<A, N>(w, row, panel, sums + row * PANEL);
  }

  // Multiplies all rows of x by N panels of a weight with several groups of columns, whose sums are scaled one by one:
  // one panel after the other.
  template <int N>
  void multiply_groups(int64_t panel, float* sums) {
    const uint8_t* w = widen_panels<N>(panel);
    for (int64_t n = 0; n < N; ++n)
      for (int64_t row = 0; row < product_.rows_; row += TILE_ROWS)
        multiply_panel<N>(w + n * P::TILE, row, panel + n, sums + (n * product_.height() + row) * PANEL);
  }

  // Multiplies 16 rows of x by one panel. While the sums of some groups of columns are scaled, the next groups are
  // multiplied.
  template <int N>
  void multiply_panel(const uint8_t* w, int64_t row, int64_t panel, float* sums) {
    alignas(64) Dots dots[2][GROUPS];
    Totals total;
    const int64_t groups = product_.w_.groups;
    dot_groups<N>(w, row, 0, dots[0]);
    for (int64_t g = 0; g < groups; g += GROUPS) {
      if (g + GROUPS < groups) dot_groups<N>(w, row, g + GROUPS, dots[(g / GROUPS + 1) % 2]);
      for (int64_t i = 0; i < std::min(GROUPS, groups - g); ++i)
        total.add(Group(product_, panel, g + i, row), dots[g / GROUPS % 2][i]);
    }
    total.store(sums);
  }

  // Multiplies 16 rows of x by up to GROUPS groups of columns of a panel, from group number `first` on, as far as it
  // has that many. The sums are in tile registers 0 to 3.
  template <int N>
  void dot_groups(const uint8_t* w, int64_t row, int64_t first, Dots (&dots)[GROUPS]) {
    const int64_t step = tiles_.depth(), group = product_.w_.group, apart = Product::pitch(product_.k_);
    const int64_t count = std::min(GROUPS, product_.w_.groups - first);
    unroll<GROUPS>([&](auto i) {
      if (i >= count) return;
      tile_zero<i>();
      for (int64_t k = (first + i) * group, end = std::min(product_.k_, k + group); k < end; k += step) {
        tile_load<4 + i % 2>(product_.row(row) + k, apart);
        tile_load<6 + i % 2>(w + k / P::DEPTH * BETWEEN<N> * P::TILE + k % P::DEPTH * PANEL, TILE_BYTES);
        tile_dot_int8<i, 4 + i % 2, 6 + i % 2, OFFSETS>();
      }
    });
    unroll<GROUPS>([&](auto i) {
      if (i < count) tile_store<i>(dots[i], TILE_BYTES);
    });
  }

  // Returns N panels of the weight as bytes. Numbers of 4 bits are widened into this object's memory, minus 8 if the
  // weight has no offsets.
  template <int N>
  const uint8_t* widen_panels(int64_t panel) {
    const uint8_t* from = product_.tiles_of(panel);
    if constexpr (BITS == 8) return from;
    constexpr uint8_t zero = Product::ZERO;
    for (int64_t tile = 0; tile < product_.tiles(); ++tile)
      for (int64_t n = 0; n < N; ++n) {
        const uint8_t* packed = from + (tile * PANELS + n) * BYTES;
        uint8_t* to = bytes_.data() + (tile * N + n) * P::TILE;
        for (int64_t i = 0; i < BYTES; i += sizeof(Bytes), to += 2 * sizeof(Bytes)) {
          __builtin_prefetch(packed + i + AHEAD<N>);
          const Bytes both = load_bytes(packed + i), low = (both & 15) - zero, high = (both >> 4) - zero;
          std::memcpy(to, &low, sizeof(low));
          std::memcpy(to + sizeof(low), &high, sizeof(high));
        }
      }
    return bytes_.data();
  }

  // Multiplies 16 A rows of x by N panels of a weight with one group. Tile registers 0 to 3 hold sums, 4 and 5 rows of
  // x, 6 and 7 the weight.
  template <int A, int N>
  void multiply_block(const uint8_t* w, int64_t row, int64_t panel, float* sums) {
    const int64_t step = tiles_.depth(), pitch = Product::pitch(product_.k_);
    alignas(64) Dots dots[A * N];
    unroll<A * N>([&](auto i) { tile_zero<i>(); });
    for (int64_t k = 0; k < product_.k_; k += step) {
      const uint8_t* numbers = w + k / P::DEPTH * BETWEEN<N> * P::TILE;
      unroll<A>([&](auto a) { tile_stream<4 + a>(product_.row(row + a * TILE_ROWS) + k, pitch); });
      unroll<N>([&](auto n) {
        if constexpr (BITS == 8)
          for (int64_t line = 0; line < step / 4; ++line)
            __builtin_prefetch(numbers + n * P::TILE + line * TILE_BYTES + AHEAD<N>);
        tile_load<6 + n % 2>(numbers + n * P::TILE, TILE_BYTES);
        unroll<A>([&](auto a) { tile_dot_int8<a * N + n, 4 + a, 6 + n % 2, OFFSETS>(); });
      });
    }
    unroll<A * N>([&](auto i) { tile_store<i>(dots[i], TILE_BYTES); });
    unroll<A * N>([&](auto i) {
      constexpr int64_t a = i / N * TILE_ROWS, n = i % N;
      Totals total;
      total.add(Group(product_, panel + n, 0, row + a), dots[i]);
      total.store(sums + (n * product_.height() + a) * PANEL);
    });
  }

  const Product& product_;
  Tiles tiles_;
  std::vector<uint8_t> bytes_;  // of widened panels
};

#else

// Stands in for the tiles where there are none.
template <int BITS, bool OFFSETS, typename S>
struct Int8AmxTiles {
  static constexpr bool USABLE = false;
  explicit Int8AmxTiles(const Int8Gemm<BITS, OFFSETS, S>&) {}
  void add(int64_t, int64_t, float*) {}
};

#endif

}  // namespace kvmux
