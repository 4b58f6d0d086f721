// Dot products of bytes, four at a time: in a register of 32-bit sums, one for each output, each sum += 4 numbers of a
// weight times 4 numbers of x.
//
// They are one instruction where the processor has one. The results are the same integers on all processors. Knows
// neither weights nor rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace kvmux {

// A register with 4 bytes for each of W outputs, and one with an integer for each.
using Bytes = uint8_t __attribute__((vector_size(sizeof(Vec))));
using Integers = int32_t __attribute__((vector_size(sizeof(Vec))));

inline Bytes load_bytes(const void* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

// Returns 4 bytes, repeated.
inline Bytes repeat_four(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof(four));
  return (Bytes)(Integers{} + four);
}

#if defined(CPU_CAPABILITY_AVX2) && !defined(CPU_CAPABILITY_AVX512)
constexpr bool SIGNED_BYTES = true;  // whether numbers that do not fit 7 bits are multiplied as signed ones
#else
constexpr bool SIGNED_BYTES = false;
#endif

// Sums of the products of up to 8 times 4 numbers of x, from -127 to 127, and numbers of a weight whose magnitude is at
// most MOST: unsigned ones below 128 (SMALL), or any as SIGNED_BYTES says.
template <int MOST, bool SMALL>
class DotProducts {
 public:
#ifdef CPU_CAPABILITY_AVX512
  void start(int32_t begin) { sums_ = (__m512i)(Integers{} + begin); }

  template <int I>
  void add(const Bytes& numbers, const Bytes& x) {
    sums_ = _mm512_dpbusd_epi32(sums_, (__m512i)numbers, (__m512i)x);
  }

  Integers total() const { return (Integers)sums_; }

 private:
  __m512i sums_;
#elif defined(CPU_CAPABILITY_AVX2)
  void start(int32_t begin) { sums_ = _mm256_set1_epi32(begin); }

  // Adds number I of the products. Two products are summed in 16 bits, to which some more are added before they are
  // widened.
  template <int I>
  void add(const Bytes& numbers, const Bytes& x) {
    const auto w = (__m256i)numbers, signed_x = (__m256i)x;
    const __m256i pairs = SMALL ? _mm256_maddubs_epi16(w, signed_x)
                                : _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(signed_x, w));
    if constexpr (I > 0 && I % FIT == 0) widen();
    pairs_ = I % FIT == 0 ? pairs : _mm256_add_epi16(pairs_, pairs);
  }

  Integers total() {
    widen();
    return (Integers)sums_;
  }

 private:
  static constexpr int FIT = 32767 / (2 * 127 * MOST);  // sums of two products that fit 16 bits
  static_assert(FIT > 0);

  void widen() { sums_ = _mm256_add_epi32(sums_, _mm256_madd_epi16(pairs_, _mm256_set1_epi16(1))); }

  __m256i sums_, pairs_;
#else
  void start(int32_t begin) { sums_ = Integers{} + begin; }

  template <int I>
  void add(const Bytes& numbers, const Bytes& x) {
    const auto w = (Integers)numbers, signed_x = (Integers)x;
    unroll<4>([&](auto i) { sums_ += (w >> 8 * i & 255) * (signed_x << (24 - 8 * i) >> 24); });
  }

  Integers total() const { return sums_; }

 private:
  Integers sums_;
#endif
};

}  // namespace kvmux
