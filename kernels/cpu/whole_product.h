// Products with packed weights in whole numbers of 8 or 4 bits, value = scale * number + offset by groups of columns.
//
// A row of x becomes whole numbers of 8 bits, too, with a scale for each group: so a group's products are summed in 32 bits
// without rounding, and a number of y is one chain of multiply-adds over the groups. It has the same bits whatever computes
// it, for one row as for many. Knows neither tensors nor threads.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "packed.h"
#include "quads.h"
#include "tiles.h"
#include "vector.h"

namespace kvmux {

// A packed weight; numbers of 4 bits lie in halves of bytes: of 8 columns, the first 4 in the lower ones. Where there are no
// offsets, value = scale * (number - half of all numbers), and those of 8 bits are kept as what they stand for, signed.
template <typename S>
struct WholeWeight {
  const uint8_t* numbers;
  const S* scale;   // [panels][groups][PANEL]
  const S* offset;  // the same, or null
  int64_t groups, group;
};

// Room for rows of x in whole numbers. What lies behind the last row is multiplied, and nobody reads the result.
struct WholeRows {
  int8_t* numbers;  // [height][pitch]
  float* scale;     // [groups][height]
  int32_t* sum;     // the same: of the numbers; or, without offsets, what the weight's zero takes from products
};

template <int BITS, bool OFFSETS, typename S>
class WholeProduct {
 public:
  class Session;

  static int64_t pitch(int64_t k) { return (P::tiles(k) + 1) * P::DEPTH; }  // of rows: never a multiple of a page
  static int64_t height_of(int64_t rows) { return (rows + SOME - 1) / SOME * SOME; }

  WholeProduct(const WholeWeight<S>& w, const WholeRows& x, int64_t rows, int64_t k) : w_(w), x_(x), rows_(rows), k_(k) {}

  int64_t tiles() const { return P::tiles(k_); }
  int64_t chunk() const { return tiles(); }               // all are added at once
  int64_t height() const { return height_of(rows_); }

  template <typename X>
  void enter(const X* from, int64_t row) const {
    int8_t* to = x_.numbers + row * pitch(k_);
    for (int64_t g = 0; g < w_.groups; ++g) {
      const int64_t begin = g * w_.group, n = std::min(k_ - begin, w_.group);
      const float most = largest(from + begin, n);
      const bool sound = std::isfinite(most);
      const int32_t sum = rounded(from + begin, sound && most > 0.f ? MOST / most : 0.f, to + begin, n);
      x_.scale[g * height() + row] = sound ? most / MOST : std::numeric_limits<float>::quiet_NaN();
      x_.sum[g * height() + row] = OFFSETS ? sum : -ZERO * sum;
    }
    std::fill(to + k_, to + tiles() * P::DEPTH, int8_t{0});
  }

  // sums [panels][height][PANEL] of 2 or 4 panels of a block, of all their tiles.
  void add(Session& session, int64_t first, int64_t panels, int64_t, int64_t, float* sums) const {
    if (session.by_tiles(*this)) return session.add(*this, first, panels, sums);
    if (rows_ > ROWS) {
      for (int64_t i = 0; i < panels; ++i) over_rows<MOST_ROWS, 1>(0, first + i, sums + i * height() * PANEL);
      return;
    }
    if (WIDE == PANELS && panels == PANELS) return over_rows<ROWS, WIDE>(0, first, sums);
    for (int64_t i = 0; i < panels; i += 2) over_rows<ROWS, 2>(0, first + i, sums + i * height() * PANEL);
  }

 private:
  using P = Packing<uint8_t>;
  static constexpr float MOST = 127.f;
  static constexpr int WIDE = REGISTERS == 32 ? PANELS : 2;  // panels that few rows are added to together
  static constexpr int64_t AHEAD = 2048;                     // bytes between what is multiplied and what is fetched
  static constexpr int ROWS = REGISTERS == 32 ? 4 : 1;       // rows, in vectors
  static constexpr int MOST_ROWS = 2 * ROWS;                 // the same, of one panel
  static constexpr int64_t SOME = 32;                        // rows, in tiles
  static constexpr int V = PANEL / W;
  static constexpr int64_t BYTES = P::TILE * BITS / 8;       // of a tile
  static constexpr int64_t QUADS = P::DEPTH / 4;             // of a tile
  static constexpr int PER_BYTE = 8 / BITS;

  static constexpr int32_t ZERO = OFFSETS ? 0 : 1 << (BITS - 1);

  // The largest of n numbers without their signs; NaN if one of them is none.
  template <typename X>
  static float largest(const X* from, int64_t n) {
    const auto larger = [](Vec a, Vec b) { return at::vec::maximum(a, b); };
    Vec most(0.f);
    int64_t i = 0;
    for (; i + W <= n; i += W) most = larger(most, load(from + i).abs());
    for (; i < n; ++i) most = larger(most, Vec(std::abs(static_cast<float>(from[i]))));
    return reduce(most, larger);
  }

  // n numbers times `factor`, rounded to whole ones; their sum.
  template <typename X>
  static int32_t rounded(const X* from, float factor, int8_t* to, int64_t n) {
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

  template <int R, int N>
  void over_rows(int64_t row, int64_t panel, float* sums) const {
    for (; row + R <= rows_; row += R) block<R, N>(row, panel, sums + row * PANEL);
    if constexpr (R > 1)
      if (row < rows_) over_rows<R / 2, N>(row, panel, sums);
  }

  // R rows and N panels, in vectors.
  template <int R, int N>
  void block(int64_t first, int64_t panel, float* sums) const {
    const uint8_t* w = tiles_of(panel);
    Raw total[R][N][V];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { unroll<V>([&](auto v) { total[r][n][v] = Vec(0.f); }); }); });
    for (int64_t g = 0; g < w_.groups; ++g) {
      Quads dots[R][N];
      unroll<R>([&](auto r) { unroll<N>([&](auto n) { dots[r][n] = quads(OFFSETS ? 0 : x_.sum[g * height() + first + r]); }); });
      const int64_t end = (std::min(k_, (g + 1) * w_.group) + 3) / 4;
      for (int64_t quad = g * w_.group / 4; quad < end; quad += PER_BYTE) {
        const uint8_t* at = w + quad / QUADS * PANELS * BYTES + quad % QUADS * 4 * PANEL / PER_BYTE;
        unroll<N>([&](auto n) {
          __builtin_prefetch(at + n * BYTES + (N == 1 ? PANELS : 1) * AHEAD);
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

  // What a group of a panel's columns adds to sums: scale of x * (scale of w * dot + offset of w * sum of x). Its rows of x
  // are counted from one on.
  struct Group {
    Group(const WholeProduct& product, int64_t panel, int64_t g, int64_t first)
        : scale_of_x(product.x_.scale + g * product.height() + first), sum_of_x(product.x_.sum + g * product.height() + first) {
      const int64_t at = (panel * product.w_.groups + g) * PANEL;
      unroll<V>([&](auto v) { scale[v] = load(product.w_.scale + at + v * W); });
      if constexpr (OFFSETS) unroll<V>([&](auto v) { offset[v] = load(product.w_.offset + at + v * W); });
    }

    inline __attribute__((always_inline)) void add(int64_t row, const Quads& dots, Raw (&total)[V]) const {
      const auto numbers = __builtin_convertvector(dots, float __attribute__((vector_size(64))));
      const Vec of_x(scale_of_x[row]);
      unroll<V>([&](auto v) {
        Raw dot;
        std::memcpy(&dot, reinterpret_cast<const char*>(&numbers) + v * sizeof(dot), sizeof(dot));
        Vec sum = at::vec::fmadd(Vec(scale[v]) * of_x, Vec(dot), Vec(total[v]));
        if constexpr (OFFSETS)
          sum = at::vec::fmadd(Vec(offset[v]) * of_x, Vec(static_cast<float>(sum_of_x[row])), sum);
        total[v] = sum;
      });
    }

    const float* scale_of_x;
    const int32_t* sum_of_x;
    Raw scale[V], offset[V];
  };

  const WholeWeight<S> w_;
  const WholeRows x_;
  int64_t rows_, k_;
};

#ifdef __AMX_TILE__

// What a thread needs beside the product: tiles for many rows, and room for panels' numbers of 4 bits as bytes.
template <int BITS, bool OFFSETS, typename S>
class WholeProduct<BITS, OFFSETS, S>::Session {
 public:
  explicit Session(const WholeProduct& product)
      : tiles_(product.w_.group % P::DEPTH == 0 || product.w_.groups == 1 ? TILE_BYTES : TILE_BYTES / 2),
        bytes_(BITS == 8 ? 0 : PANELS * product.tiles() * P::TILE) {}

  static bool by_tiles(const WholeProduct& product) { return product.rows_ > (product.w_.groups == 1 ? ROWS : MOST_ROWS); }

  void add(const WholeProduct& product, int64_t first, int64_t panels, float* sums) {
    if (product.w_.groups > 1) return panels == PANELS ? by_groups<PANELS>(product, first, sums) : by_groups<2>(product, first, sums);
    // Up to 16 rows meet all panels of a block at once, as they wait for the memory; more wait for products.
    if (product.rows_ <= TILE_ROWS && panels == PANELS) return over_rows<1, PANELS>(product, first, sums);
    for (int64_t i = 0; i < panels; i += 2, sums += 2 * product.height() * PANEL)
      if (product.rows_ <= TILE_ROWS)
        over_rows<1, 2>(product, first + i, sums);
      else
        over_rows<2, 2>(product, first + i, sums);
  }

 private:
  using Dots = int32_t[TILE_ROWS][PANEL];
  static constexpr int64_t SOME = 4;  // groups whose products are under way together

  // Tiles from one depth of the weight's bytes to the next.
  template <int N>
  static constexpr int64_t BETWEEN = BITS == 8 ? PANELS : N;

  // A times 16 rows at a time, and N panels.
  template <int A, int N>
  void over_rows(const WholeProduct& product, int64_t panel, float* sums) {
    const uint8_t* w = bytes<N>(product, panel);
    for (int64_t row = 0; row < product.rows_; row += A * TILE_ROWS)
      if (A == 1 || product.rows_ - row <= TILE_ROWS)
        square<1, N>(product, w, row, panel, sums + row * PANEL);
      else
        square<A, N>(product, w, row, panel, sums + row * PANEL);
  }

  // The same of weights in groups, whose sums are scaled one by one: a panel at a time, which all rows meet.
  template <int N>
  void by_groups(const WholeProduct& product, int64_t panel, float* sums) {
    const uint8_t* w = bytes<N>(product, panel);
    for (int64_t n = 0; n < N; ++n)
      for (int64_t row = 0; row < product.rows_; row += TILE_ROWS)
        scaled<N>(product, w + n * P::TILE, row, panel + n, sums + (n * product.height() + row) * PANEL);
  }

  // 16 rows and a panel. The next groups are multiplied while the sums of some are scaled.
  template <int N>
  void scaled(const WholeProduct& product, const uint8_t* w, int64_t row, int64_t panel, float* sums) {
    alignas(64) Dots dots[2][SOME];
    Raw total[TILE_ROWS][V];
    unroll<TILE_ROWS>([&](auto r) { total[r][0] = Vec(0.f); });
    const int64_t groups = product.w_.groups;
    multiply<N>(product, w, row, 0, dots[0]);
    for (int64_t g = 0; g < groups; g += SOME) {
      if (g + SOME < groups) multiply<N>(product, w, row, g + SOME, dots[(g / SOME + 1) % 2]);
      for (int64_t i = 0; i < std::min(SOME, groups - g); ++i) {
        const typename WholeProduct::Group group(product, panel, g + i, row);
        const Dots& of = dots[g / SOME % 2][i];
        unroll<TILE_ROWS>([&](auto r) {
          Quads dot;
          std::memcpy(&dot, of[r], sizeof(dot));
          group.add(r, dot, total[r]);
        });
      }
    }
    unroll<TILE_ROWS>([&](auto r) { Vec(total[r][0]).store(sums + r * PANEL); });
  }

  // Groups first .. first + SOME - 1 of a panel, those that it has. Sums are tiles 0 to 3.
  template <int N>
  void multiply(const WholeProduct& product, const uint8_t* w, int64_t row, int64_t first, Dots (&dots)[SOME]) {
    const int64_t step = tiles_.depth(), group = product.w_.group, apart = WholeProduct::pitch(product.k_);
    const int64_t count = std::min(SOME, product.w_.groups - first);
    unroll<SOME>([&](auto i) {
      if (i >= count) return;
      tile_zero<i>();
      for (int64_t k = (first + i) * group, end = std::min(product.k_, k + group); k < end; k += step) {
        tile_load<4 + i % 2>(product.row(row) + k, apart);
        tile_load<6 + i % 2>(w + k / P::DEPTH * BETWEEN<N> * P::TILE + k % P::DEPTH * PANEL, TILE_BYTES);
        tile_dot_whole<i, 4 + i % 2, 6 + i % 2, OFFSETS>();
      }
    });
    unroll<SOME>([&](auto i) {
      if (i < count) tile_store<i>(dots[i], TILE_BYTES);
    });
  }

  template <int N>
  const uint8_t* bytes(const WholeProduct& product, int64_t panel) {
    return BITS == 8 ? product.tiles_of(panel) : unpacked<N>(product, panel);
  }

  template <int N>
  const uint8_t* unpacked(const WholeProduct& product, int64_t panel) {
    const uint8_t* from = product.tiles_of(panel);
    for (int64_t tile = 0; tile < product.tiles(); ++tile)
      for (int64_t n = 0; n < N; ++n) {
        constexpr uint8_t zero = ZERO;
        const uint8_t* packed = from + (tile * PANELS + n) * BYTES;
        uint8_t* to = bytes_.data() + (tile * N + n) * P::TILE;
        for (int64_t i = 0; i < BYTES; i += sizeof(Bytes), to += 2 * sizeof(Bytes)) {
          __builtin_prefetch(packed + i + AHEAD);
          const Bytes both = load_bytes(packed + i), low = (both & 15) - zero, high = (both >> 4) - zero;
          std::memcpy(to, &low, sizeof(low));
          std::memcpy(to + sizeof(low), &high, sizeof(high));
        }
      }
    return bytes_.data();
  }

  // A times 16 rows and N panels of a weight in one group. Sums are tiles 0 to 3, rows of x are 4 and 5, numbers of w 6 and 7.
  template <int A, int N>
  void square(const WholeProduct& product, const uint8_t* w, int64_t row, int64_t panel, float* sums) {
    const int64_t step = tiles_.depth(), pitch = WholeProduct::pitch(product.k_);
    alignas(64) int32_t dots[A * N][TILE_ROWS][PANEL];
    unroll<A * N>([&](auto i) { tile_zero<i>(); });
    for (int64_t k = 0; k < product.k_; k += step) {
      const uint8_t* numbers = w + k / P::DEPTH * BETWEEN<N> * P::TILE;
      unroll<A>([&](auto a) { tile_pass<4 + a>(product.row(row + a * TILE_ROWS) + k, pitch); });
      unroll<N>([&](auto n) {
        if constexpr (BITS == 8)
          for (int64_t line = 0; line < step / 4; ++line) __builtin_prefetch(numbers + n * P::TILE + line * 64 + AHEAD);
        tile_load<6 + n % 2>(numbers + n * P::TILE, TILE_BYTES);
        unroll<A>([&](auto a) { tile_dot_whole<a * N + n, 4 + a, 6 + n % 2, OFFSETS>(); });
      });
    }
    unroll<A * N>([&](auto i) { tile_store<i>(dots[i], TILE_BYTES); });
    unroll<A * N>([&](auto i) {
      constexpr int64_t a = i / N * TILE_ROWS, n = i % N;
      const typename WholeProduct::Group group(product, panel + n, 0, row + a);
      for (int64_t r = 0; r < TILE_ROWS; ++r) {
        Quads dot;
        std::memcpy(&dot, dots[i][r], sizeof(dot));
        Raw total[V] = {Vec(0.f)};
        group.add(r, dot, total);
        Vec(total[0]).store(sums + (n * product.height() + a + r) * PANEL);
      }
    });
  }

  Tiles tiles_;
  std::vector<uint8_t> bytes_;
};

#else

template <int BITS, bool OFFSETS, typename S>
class WholeProduct<BITS, OFFSETS, S>::Session {
 public:
  explicit Session(const WholeProduct&) {}
  static bool by_tiles(const WholeProduct&) { return false; }
  void add(const WholeProduct&, int64_t, int64_t, float*) {}
};

#endif

}  // namespace kvmux
