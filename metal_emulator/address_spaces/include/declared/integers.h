// Functions of integers.
#pragma once
#include "vectors.h"

namespace metal {

#define DECLARED_INTEGER(T, U)          \
  T max(T, T);                          \
  T min(T, T);                          \
  T clamp(T, T, T);                     \
  T abs(T);                             \
  U absdiff(T, T);                      \
  T popcount(T);                        \
  T clz(T);                             \
  T ctz(T);                             \
  T rotate(T, T);                       \
  T addsat(T, T);                       \
  T subsat(T, T);                       \
  T mulhi(T, T);                        \
  T extract_bits(T, uint, uint);        \
  T insert_bits(T, T, uint, uint);      \
  T reverse_bits(T);
DECLARED_INTEGER(char, uchar)
DECLARED_INTEGER(uchar, uchar)
DECLARED_INTEGER(short, ushort)
DECLARED_INTEGER(ushort, ushort)
DECLARED_INTEGER(int, uint)
DECLARED_INTEGER(uint, uint)
DECLARED_INTEGER(long, ulong)
DECLARED_INTEGER(ulong, ulong)
#undef DECLARED_INTEGER

template <class T, int N>
vec<T, N> popcount(vec<T, N>);
template <class T, int N>
vec<T, N> clz(vec<T, N>);
template <class T, int N>
vec<T, N> ctz(vec<T, N>);
template <class T, int N>
vec<T, N> absdiff(vec<T, N>, vec<T, N>);

int mul24(int, int);
uint mul24(uint, uint);
int mad24(int, int, int);
uint mad24(uint, uint, uint);

}  // namespace metal
