// Products with packed weights in integers of 2 to 8 bits: value = scale * number + offset, per group of columns.
//
// A row of x is quantized to 8 bits, too, with a scale for each unit of 32 columns. So the products of a unit are
// summed in 32 bits without rounding, and a number of y is one chain of multiply-adds over the units. Its bits are the
// same on every instruction set and for any number of rows. Knows neither tensors nor threads.
#pragma once

#include "int8_rows.h"
#include "int_formats.h"

namespace kvmux {

template <typename F>
class Int8AmxTiles;

template <typename F>
class Int8Gemm {
 public:
  using Session = Int8AmxTiles<F>;

  Int8Gemm(const IntWeight<F>& w, const Int8Rows& x, int64_t rows, int64_t k) : w_(w), x_(x), rows_(rows), k_(k) {}

  int64_t tiles() const { return P::tiles(k_); }
  int64_t chunk() const { return tiles(); }  // tiles of the depth added at a time: all of them
  int64_t height() const { return Int8Rows::height(rows_); }

  // Computes the sums [panels][height][PANEL] of 2 or 4 panels of a block, over the whole depth.
  void add(Session& session, int64_t first, int64_t panels, int64_t, int64_t, float* sums) const {
    if (rows_ > FEW && rows_ >= Session::MIN_ROWS) return session.add(first, panels, sums);
    if (rows_ > FEW) {
      for (int64_t i = 0; i < panels; ++i) multiply_many(first + i, sums + i * height() * PANEL);
      return;
    }
    if (panels == PANELS) return multiply_few<FEW, PANELS>(0, first, sums);
    for (int64_t i = 0; i < panels; i += PAIR) multiply_few<FEW, PAIR>(0, first + i, sums + i * height() * PANEL);
  }

 private:
  friend Session;
  using P = Packing<uint8_t>;
  static constexpr int FEW = REGISTERS == 32 ? 4 : 1;   // rows that are multiplied while the weight is unpacked
  static constexpr int MANY = REGISTERS == 32 ? 8 : 4;  // rows that are multiplied together once it has been unpacked
  static constexpr int V = PANEL / W;
  static constexpr int PARTS = F::PARTS, PART_QUADS = QUADS / PARTS;
  static constexpr int64_t BYTES = P::TILE * F::BITS / 8;  // of a tile
  static constexpr int64_t UNIT_BYTES = unit_bytes(F::BITS);
  static constexpr int64_t LINE = 64;  // bytes that are prefetched together
  static constexpr int L2 = 2;         // the cache, as __builtin_prefetch numbers it: it can wait for the most lines

  // How many bytes after a unit is prefetched while N panels are multiplied together: the next depth, or for whole
  // blocks, which are read in order, some KiB on. (In loops, as GCC removes calls of lambdas and functions that do
  // nothing but prefetch.)
  template <int N>
  static constexpr int64_t AHEAD = N == PANELS ? 8192 : (N == 1 ? 4 : 1) * PANELS * BYTES;

  const uint8_t* tiles_of(int64_t panel) const { return w_.numbers + P::panel(panel, k_) / P::TILE * BYTES; }

  // Offset of a unit of a panel in bytes, from the panel's first tile.
  static constexpr int64_t unit_at(int64_t u) { return u / 2 * PANELS * BYTES + u % 2 * UNIT_BYTES; }

  // The scales of a group of columns, for the outputs of a panel.
  struct Scales {
    Raw scale[V], offset[V];
  };

  // Returns the scales of a part of a unit.
  inline __attribute__((always_inline)) Scales scales(int64_t panel, int64_t u, int64_t part) const {
    const int64_t at = w_.place(panel, u);
    Scales found;
    unroll<V>([&](auto v) { found.scale[v] = load(w_.scale + at + v * W); });
    if constexpr (F::OFFSETS) unroll<V>([&](auto v) { found.offset[v] = load(w_.offset + at + v * W); });
    if constexpr (F::TWO_LEVELS) {
      const int64_t small = w_.small_place(panel, u, part);
      unroll<V>([&](auto v) { found.scale[v] *= Raw(load(w_.small + small + v * W)); });
      if constexpr (F::OFFSETS)
        unroll<V>([&](auto v) { found.offset[v] *= Raw(load(w_.small_offset + small + v * W)); });
    }
    return found;
  }

  // Prefetches the scales of a unit: those of the panels that follow, as each panel has only a few lines of them.
  inline __attribute__((always_inline)) void prefetch_scales(int64_t panel, int64_t u) const {
    const int64_t at = w_.place(panel, u), small = w_.small_place(panel, u, 0);
    __builtin_prefetch(w_.scale + at, 0, L2);
    if constexpr (F::OFFSETS) __builtin_prefetch(w_.offset + at, 0, L2);
    if constexpr (F::TWO_LEVELS) __builtin_prefetch(w_.small + small, 0, L2);
    if constexpr (F::TWO_LEVELS && F::OFFSETS) __builtin_prefetch(w_.small_offset + small, 0, L2);
  }

  static int32_t sum_of(const Int8Rows::Unit& x, int64_t part) {
    return PARTS == 2 ? x.sums[part] : x.sums[0] + x.sums[1];
  }

  // Adds W numbers of a part of a unit to those of y, given their dot product: scale of x * (scale of w * dot + offset
  // of w * sum of x).
  static inline __attribute__((always_inline)) void add_dots(const Scales& w, int64_t v, const Int8Rows::Unit& x,
                                                             int64_t part, const Integers& dots, Raw& total) {
    const Vec dot = __builtin_convertvector(dots, Raw);
    Vec sum = at::vec::fmadd(Vec(w.scale[v]) * Vec(x.scale), dot, Vec(total));
    if constexpr (F::OFFSETS)
      sum = at::vec::fmadd(Vec(w.offset[v]), Vec(x.scale * static_cast<float>(sum_of(x, part))), sum);
    total = sum;
  }

  // Adds the products of unit u: R rows of x, and the numbers and scales of a panel, numbers(quad, v) for register v of
  // its outputs and scales_of(part).
  template <int R, typename Numbers, typename ScalesOf>
  inline __attribute__((always_inline)) void add_unit(int64_t first, int64_t u, const Numbers& numbers,
                                                      const ScalesOf& scales_of, Raw (&total)[R][V]) const {
    unroll<PARTS>([&](auto part) {
      typename F::Dots dots[R][V];
      unroll<R>([&](auto r) {
        const int32_t begin = F::SHIFT == 0 ? 0 : -F::SHIFT * sum_of(x_.units(first + r)[u], part);
        unroll<V>([&](auto v) { dots[r][v].start(begin); });
      });
      unroll<PART_QUADS>([&](auto i) {
        constexpr int Q = part * PART_QUADS + i;
        Bytes of_w[V];
        unroll<V>([&](auto v) { of_w[v] = numbers(std::integral_constant<int, Q>{}, v); });
        unroll<R>([&](auto r) {
          const Bytes x = repeat_four(x_.numbers(first + r) + u * UNIT + Q * 4);
          unroll<V>([&](auto v) { dots[r][v].template add<i>(of_w[v], x); });
        });
      });
      const Scales w = scales_of(part);
      unroll<R>([&](auto r) {
        const Int8Rows::Unit& x = x_.units(first + r)[u];
        unroll<V>([&](auto v) { add_dots(w, v, x, part, dots[r][v].total(), total[r][v]); });
      });
    });
  }

  // Multiplies the rows from `first` on by N panels of the weight, R rows at a time, then those that are left.
  template <int R, int N>
  void multiply_few(int64_t first, int64_t panel, float* sums) const {
    for (; first + R <= rows_; first += R) multiply_rows<R, N>(first, panel, sums + first * PANEL);
    if constexpr (R > 1)
      if (first < rows_) multiply_few<R / 2, N>(first, panel, sums);
  }

  // Multiplies R rows of x by N panels of the weight, whose numbers are unpacked in registers. Everything is inlined
  // (`flatten`), as a compiler stops inlining in large functions, and the sums would not stay in registers.
  template <int R, int N>
  __attribute__((flatten)) void multiply_rows(int64_t first, int64_t panel, float* sums) const {
    Raw total[N][R][V];
    unroll<N>([&](auto n) { unroll<R>([&](auto r) { unroll<V>([&](auto v) { total[n][r][v] = Vec(0.f); }); }); });
    const uint8_t* const w = tiles_of(panel);
    for (int64_t u = 0; u < w_.units; ++u)
      unroll<N>([&](auto n) {
        const uint8_t* const unit = w + unit_at(u) + n * BYTES;
        for (int64_t i = 0; i < UNIT_BYTES; i += LINE) __builtin_prefetch(unit + i + AHEAD<N>, 0, L2);
        prefetch_scales(panel + n + N, u);
        add_unit<R>(
            first, u, [&](auto q, int64_t v) { return load_quad<F, q>(unit, v * W); },
            [&](int64_t part) { return scales(panel + n, u, part); }, total[n]);
      });
    unroll<N>([&](auto n) { unroll<R>([&](auto r) { store_total(total[n][r], sums + (n * height() + r) * PANEL); }); });
  }

  // Some units of a panel, unpacked.
  struct Unpacked {
    static constexpr int64_t UNITS = 8;  // so that they stay in the L1 cache
    Bytes numbers[UNITS][QUADS][V];
    Scales scales[UNITS][PARTS];
  };

  // Multiplies all rows of x by a panel of the weight, of which some units at a time are unpacked for all rows.
  void multiply_many(int64_t panel, float* sums) const {
    Unpacked some;
    const uint8_t* const w = tiles_of(panel);
    for (int64_t u = 0; u < w_.units; u += Unpacked::UNITS) {
      const int64_t count = std::min(Unpacked::UNITS, w_.units - u);
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t* const unit = w + unit_at(u + i);
        for (int64_t line = 0; line < UNIT_BYTES; line += LINE) __builtin_prefetch(unit + line + AHEAD<1>, 0, L2);
        unroll<QUADS>(
            [&](auto q) { unroll<V>([&](auto v) { some.numbers[i][q][v] = load_quad<F, q>(unit, v * W); }); });
        unroll<PARTS>([&](auto part) { some.scales[i][part] = scales(panel, u + i, part); });
      }
      multiply_unpacked<MANY>(some, 0, u, count, sums);
    }
  }

  // Multiplies the rows from `first` on by unpacked units, of which the first is number u; R rows at a time.
  template <int R>
  void multiply_unpacked(const Unpacked& w, int64_t first, int64_t u, int64_t count, float* sums) const {
    for (; first + R <= rows_; first += R) multiply_unpacked_rows<R>(w, first, u, count, sums);
    if constexpr (R > 1)
      if (first < rows_) multiply_unpacked<R / 2>(w, first, u, count, sums);
  }

  template <int R>
  __attribute__((flatten)) void multiply_unpacked_rows(const Unpacked& w, int64_t first, int64_t u, int64_t count,
                                                       float* sums) const {
    Raw total[R][V];
    unroll<R>([&](auto r) {
      unroll<V>([&](auto v) { total[r][v] = u == 0 ? Vec(0.f) : load(sums + (first + r) * PANEL + v * W); });
    });
    for (int64_t i = 0; i < count; ++i)
      add_unit<R>(
          first, u + i, [&](auto q, int64_t v) { return w.numbers[i][q][v]; },
          [&](int64_t part) { return w.scales[i][part]; }, total);
    unroll<R>([&](auto r) { store_total(total[r], sums + (first + r) * PANEL); });
  }

  static inline __attribute__((always_inline)) void store_total(const Raw (&total)[V], float* to) {
    unroll<V>([&](auto v) { Vec(total[v]).store(to + v * W); });
  }

  const IntWeight<F> w_;
  Int8Rows x_;
  int64_t rows_, k_;
};

}  // namespace kvmux
