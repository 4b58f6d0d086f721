// Rows of x as products with weights of integers read them: quantized to 8 bits, in units of 32 columns with a scale
// each, as llama.cpp does (Q8_0). Knows no weight.
#pragma once

#include <cmath>
#include <limits>

#include "dot_int8.h"
#include "packed.h"

namespace kvmux {

constexpr int64_t UNIT = 32;  // columns

class Int8Rows {
 public:
  // What a row has beside the 32 numbers of a unit.
  struct Unit {
    float scale;
    int32_t sums[2];  // of the numbers of the first 16 columns, and of the others
  };

#ifdef __AMX_TILE__
  static constexpr int64_t TOGETHER = 16;  // rows are padded to a multiple of it; results of padding are not read
#else
  static constexpr int64_t TOGETHER = 1;
#endif
  static int64_t height(int64_t rows) { return (rows + TOGETHER - 1) / TOGETHER * TOGETHER; }
  static int64_t bytes(int64_t rows, int64_t k) {
    return height(rows) * (pitch_of(k) + units_of(k) * static_cast<int64_t>(sizeof(Unit)));
  }

  // `memory`: bytes(rows, k) bytes.
  Int8Rows(char* memory, int64_t rows, int64_t k)
      : k_(k), pitch_(pitch_of(k)), count_(units_of(k)), numbers_(reinterpret_cast<int8_t*>(memory)),
        units_(reinterpret_cast<Unit*>(memory + height(rows) * pitch_)) {}

  int64_t pitch() const { return pitch_; }  // bytes from the numbers of a row to those of the next
  const int8_t* numbers(int64_t row) const { return numbers_ + row * pitch_; }
  const Unit* units(int64_t row) const { return units_ + row * count_; }

  // Packs columns begin .. begin + count - 1 of a row; `begin` is a multiple of UNIT, and so is `count` but for the
  // last columns.
  template <typename X>
  void pack(const X* from, int64_t row, int64_t begin, int64_t count) const {
    int8_t* to = numbers_ + row * pitch_ + begin;
    Unit* unit = units_ + row * count_ + begin / UNIT;
    for (int64_t i = 0; i < count; i += UNIT) pack_unit(from + i, to + i, std::min(UNIT, count - i), *unit++);
    if (begin + count == k_) std::fill(to + count, to + pitch_ - begin, int8_t{0});
  }

 private:
  static constexpr float LARGEST = 127.f;
  // A unit counts as 0 if its largest magnitude is below this: LARGEST divided by it could be infinite.
  static constexpr float TINY = 1e-36f;

  // Never a multiple of a page, as the rows would then share cache sets.
  static int64_t pitch_of(int64_t k) { return (Packing<uint8_t>::tiles(k) + 1) * Packing<uint8_t>::DEPTH; }
  static int64_t units_of(int64_t k) { return (k + UNIT - 1) / UNIT; }

  template <typename X>
  static void pack_unit(const X* from, int8_t* to, int64_t n, Unit& unit) {
    const float most = largest_magnitude(from, n);
    const bool finite = std::isfinite(most);
    const float factor = finite && most > TINY ? LARGEST / most : 0.f;
    const int64_t half = std::min(n, UNIT / 2);
    unit.scale = finite ? most / LARGEST : std::numeric_limits<float>::quiet_NaN();
    unit.sums[0] = round(from, factor, to, half);
    unit.sums[1] = round(from + half, factor, to + half, n - half);
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
  static int32_t round(const X* from, float factor, int8_t* to, int64_t n) {
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

  int64_t k_, pitch_, count_;
  int8_t* numbers_;  // [height][pitch]
  Unit* units_;      // [height][units]
};

}  // namespace kvmux
