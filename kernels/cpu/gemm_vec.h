// Products with packed weights of floats in vectors of float32 sums: for float32 and float16, and for bfloat16 on
// processors without AMX, pair by pair where they have an instruction for that.
//
// Each number of y is one chain of fused multiply-adds, or of dot products of pairs, in the order of k, so it does not
// depend on how many rows are computed beside it. Knows neither tensors nor threads.
#pragma once

#include "packed.h"
#include "vector.h"

namespace kvmux {

template <typename T>
class VectorGemm {
 public:
  using Weight = T;
  // Whether one instruction multiplies pairs of numbers and adds both products to sums of float32.
#ifdef __AVX512BF16__
  static constexpr bool PAIRS = std::is_same_v<T, at::BFloat16>;
#else
  static constexpr bool PAIRS = false;
#endif
  using Number = std::conditional_t<PAIRS, T, float>;  // of packed rows of x, [rows][k, padded to whole tiles]
  struct Session {                                     // what a thread keeps between calls: nothing here
    explicit Session(const VectorGemm&) {}
  };

  static int64_t numbers(int64_t rows, int64_t k) { return rows * P::tiles(k) * P::DEPTH; }

  VectorGemm(const T* w, Number* x, int64_t rows, int64_t k)
      : w_(w), x_(x), rows_(rows), k_(k), pitch_(P::tiles(k) * P::DEPTH) {}

  int64_t tiles() const { return P::tiles(k_); }

  int64_t height() const { return rows_; }  // rows for which sums are computed

  // Returns how many tiles of the depth (k) are added at a time, so that all rows find them in the cache. For few rows
  // it is the whole depth.
  int64_t chunk() const { return rows_ <= ROWS ? tiles() : std::min(tiles(), CHUNK / P::DEPTH); }

  // Packs columns begin .. begin + count - 1 of a row of x: rounds them to the weight's type and stores them as
  // Numbers.
  template <typename X>
  void pack_row(const X* from, int64_t row, int64_t begin, int64_t count) const {
    Number* to = x_ + row * pitch_ + begin;
    if constexpr (PAIRS || std::is_same_v<T, X> || std::is_same_v<T, float>) {
      convert(from, to, count);
    } else {
      T rounded[2 * W];
      for (int64_t i = 0; i < count; i += 2 * W) {
        const int64_t n = std::min(2 * W, count - i);
        convert(from + i, rounded, n);
        to_float(rounded, to + i, n);
      }
    }
    if (begin + count == k_) std::fill(to + count, to + pitch_ - begin, Number(0.f));
  }

  // Adds to sums [panels][height][PANEL] the products of x with tiles begin .. end - 1 of the depth, for 2 or 4 panels
  // of a block; if begin is 0, the sums start at 0.
  void add(Session&, int64_t first, int64_t panels, int64_t begin, int64_t end, float* sums) const {
    const int64_t step = WIDE || rows_ == 1 || rows_ > FEW ? end - begin : 1;
    for (int64_t tile = begin; tile < end; tile += step)
      multiply_rows<ROWS, false>(0, first, panels, tile, std::min(end, tile + step), sums);
  }

 private:
  using P = Packing<T>;
  static constexpr int V = PANEL / W;   // vectors of a panel
  static constexpr int64_t AHEAD = 8;   // tiles, from those that are multiplied to those that are prefetched
  static constexpr int L1 = 3, L2 = 2;  // caches, as __builtin_prefetch numbers them
  // Whether rows are multiplied by several panels at a time. If their sums do not fit into registers, it is one panel,
  // and for a FEW rows one tile of each panel after the other, so that memory is read in order.
  static constexpr bool WIDE = W == PANEL;
  static constexpr int ROWS = WIDE ? 12 : 6;
  // Columns that are multiplied at a time for many rows. Wide vectors find 256 KiB of weights in the L2 cache fast
  // enough, and each chunk costs reading the sums again.
  static constexpr int64_t CHUNK = WIDE ? (256 << 10) / (BLOCK * sizeof(T)) : 128;
  static constexpr int64_t FEW = 2 * ROWS;

  // Returns the number of panels that are computed together, so that the sums of R rows fill most of the registers.
  // From memory, narrow vectors read one panel after the other faster than several at once.
  template <int R, bool CACHED>
  static constexpr int panels_together() {
    if (WIDE) return R <= ROWS / 2 ? PANELS : PAIR;
    return CACHED && R <= 2 ? PANELS / R : 1;
  }

  // Multiplies the rows from `row` on, R at a time, then those that are left. CACHED: rows before them have brought the
  // tiles into the cache.
  template <int R, bool CACHED>
  void multiply_rows(int64_t row, int64_t first, int64_t panels, int64_t begin, int64_t end, float* sums) const {
    constexpr int N = panels_together<R, CACHED>();
    while (row + R <= rows_) {
      for (int64_t panel = 0; panel < panels; panel += N) {
        const T* const w = w_ + P::panel(first + panel, k_);
        float* const to = sums + panel * rows_ * PANEL + row * PANEL;
        if (panels >= N)
          multiply_block<R, N, CACHED>(row, w, begin, end, to);
        else
          multiply_block<R, std::min<int>(N, PAIR), CACHED>(row, w, begin, end, to);
      }
      row += R;
      if constexpr (!CACHED) return multiply_rows<R, true>(row, first, panels, begin, end, sums);
    }
    if constexpr (R > 1)
      if (row < rows_)
        multiply_rows<(R > 8 ? 8 : R > 6 ? 6 : R > 4 ? 4 : R / 2), CACHED>(row, first, panels, begin, end, sums);
  }

  // Everything is inlined (`flatten`), so that the sums stay in registers.
  template <int R, int N, bool CACHED>
  __attribute__((flatten)) void multiply_block(int64_t row, const T* w, int64_t begin, int64_t end, float* sums) const {
    Raw sum[R][N * V];
    const auto at = [&](int r, int v) { return sums + v / V * rows_ * PANEL + r * PANEL + v % V * W; };
    unroll<R>([&](auto r) { unroll<N * V>([&](auto v) { sum[r][v] = begin == 0 ? Vec(0.f) : load(at(r, v)); }); });
    for (int64_t tile = begin; tile < end; ++tile) {
      const T* weights = w + tile * PANELS * P::TILE;
      [[maybe_unused]] const T* const soon = weights + AHEAD * PANELS * P::TILE;
      const Number* x = x_ + row * pitch_ + tile * P::DEPTH;
      for (int64_t i = 0; i < P::DEPTH; i += P::S, weights += PANEL * P::S, x += P::S) {
        // What the processor does not foresee, as the loads take turns between panels: the next N cache lines in the
        // order of memory, and for narrow vectors the same place in the next tile of a panel. With few rows even the L2
        // cache answers too late. (A loop, as GCC removes calls of lambdas that do nothing but prefetch.)
        for (int n = 0; n < N; ++n) {
          if constexpr (!WIDE)
            __builtin_prefetch(weights + n * P::TILE + PANELS * P::TILE);
          else if constexpr (!CACHED)
            __builtin_prefetch(soon + (i / P::S * N + n) * PANEL * P::S, 0, R <= 2 ? L1 : L2);
        }
        if constexpr (PAIRS)
          add_pairs<R, N>(weights, x, sum);
        else
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

  // Adds the products of R rows of x, which begin at `x`, with the pairs of columns of N panels that begin at
  // `weights`.
  template <int R, int N>
  void add_pairs(const T* weights, const Number* x, Raw (&sum)[R][N * V]) const {
#ifdef __AVX512BF16__
    Raw columns[N];
    unroll<N>([&](auto n) { columns[n] = load(reinterpret_cast<const float*>(weights + n * P::TILE)); });
    unroll<R>([&](auto r) {
      float pair;
      std::memcpy(&pair, x + r * pitch_, sizeof(pair));
      const auto factors = reinterpret_cast<__m512bh>(_mm512_set1_ps(pair));
      unroll<N>(
          [&](auto n) { sum[r][n] = _mm512_dpbf16_ps(sum[r][n], reinterpret_cast<__m512bh>(columns[n]), factors); });
    });
#endif
  }

  // Loads column number s of S adjacent columns of W outputs of the weight, as float32.
  template <int s>
  static Vec load_column(const T* from) {
    if constexpr (P::S == 1)
      return load(from);
    else if constexpr (s == 0)
      return widen(load(reinterpret_cast<const float*>(from))).first;
    else
      return widen(load(reinterpret_cast<const float*>(from))).second;
  }

  const T* w_;
  Number* x_;
  int64_t rows_, k_, pitch_;
};

}  // namespace kvmux
