// Functions of integers.
#pragma once
#include "math.h"

namespace metal {

#define EMULATED_INTEGER(T, U)                                                                                   \
  EMULATOR_INLINE T max(T a, T b) { return a > b ? a : b; }                                                      \
  EMULATOR_INLINE T min(T a, T b) { return a < b ? a : b; }                                                      \
  EMULATOR_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }                                 \
  EMULATOR_INLINE T abs(T x) { return x < 0 ? T(-x) : x; }                                                       \
  EMULATOR_INLINE U absdiff(T a, T b) { return a > b ? U(U(a) - U(b)) : U(U(b) - U(a)); }                        \
  EMULATOR_INLINE T popcount(T x) { return T(__builtin_popcountl(ulong(U(x)))); }                                \
  EMULATOR_INLINE T clz(T x) { return T(x ? __builtin_clzl(ulong(U(x))) - (64 - 8 * int(sizeof(T))) : 8 * int(sizeof(T))); } \
  EMULATOR_INLINE T ctz(T x) { return T(x ? __builtin_ctzl(ulong(U(x))) : 8 * int(sizeof(T))); }                 \
  EMULATOR_INLINE T rotate(T x, T by) {                                                                          \
    const uint bits = 8 * sizeof(T), n = uint(by) % bits;                                                        \
    return n ? T(U(x) << n | U(x) >> (bits - n)) : x;                                                            \
  }                                                                                                              \
  EMULATOR_INLINE T addsat(T a, T b) {                                                                           \
    T sum;                                                                                                       \
    if (!__builtin_add_overflow(a, b, &sum)) return sum;                                                         \
    return b < 0 ? numeric_limits<T>::lowest() : numeric_limits<T>::max();                                       \
  }                                                                                                              \
  EMULATOR_INLINE T subsat(T a, T b) {                                                                           \
    T difference;                                                                                                \
    if (!__builtin_sub_overflow(a, b, &difference)) return difference;                                           \
    return b < 0 ? numeric_limits<T>::max() : numeric_limits<T>::lowest();                                       \
  }                                                                                                              \
  EMULATOR_INLINE T mulhi(T a, T b) { return T((__int128(a) * __int128(b)) >> (8 * sizeof(T))); }                \
  EMULATOR_INLINE T extract_bits(T x, uint offset, uint bits) {                                                  \
    const uint size = 8 * sizeof(T);                                                                             \
    return bits ? T(T(U(x) << (size - bits - offset)) >> (size - bits)) : T(0);                                  \
  }                                                                                                              \
  EMULATOR_INLINE T insert_bits(T base, T insert, uint offset, uint bits) {                                      \
    const U mask = bits == 8 * sizeof(T) ? U(~U(0)) : U(((U(1) << bits) - 1) << offset);                         \
    return T((U(base) & U(~mask)) | ((U(insert) << offset) & mask));                                             \
  }                                                                                                              \
  EMULATOR_INLINE T reverse_bits(T x) {                                                                          \
    U r = 0;                                                                                                     \
    for (uint i = 0; i < 8 * sizeof(T); ++i) r = U(r << 1 | (U(x) >> i & 1));                                    \
    return T(r);                                                                                                 \
  }
EMULATED_INTEGER(char, uchar)
EMULATED_INTEGER(uchar, uchar)
EMULATED_INTEGER(short, ushort)
EMULATED_INTEGER(ushort, ushort)
EMULATED_INTEGER(int, uint)
EMULATED_INTEGER(uint, uint)
EMULATED_INTEGER(long, ulong)
EMULATED_INTEGER(ulong, ulong)
#undef EMULATED_INTEGER

EMULATED_VECTOR_1(popcount)
EMULATED_VECTOR_1(clz)
EMULATED_VECTOR_1(ctz)
EMULATED_VECTOR_2(absdiff)

EMULATOR_INLINE int mul24(int a, int b) { return a * b; }
EMULATOR_INLINE uint mul24(uint a, uint b) { return a * b; }
EMULATOR_INLINE int mad24(int a, int b, int c) { return a * b + c; }
EMULATOR_INLINE uint mad24(uint a, uint b, uint c) { return a * b + c; }

#undef EMULATED_1
#undef EMULATED_2
#undef EMULATED_3
#undef EMULATED_VECTOR_1
#undef EMULATED_VECTOR_2
#undef EMULATED_VECTOR_3

}  // namespace metal
