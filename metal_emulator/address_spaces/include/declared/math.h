// Declarations of functions of floating point numbers, with an overload for each type, so that a call with two types is
// ambiguous, as in Metal.
#pragma once
#include "vectors.h"

namespace metal {

#define DECLARED_1(name)          \
  float name(float);              \
  half name(half);                \
  bfloat name(bfloat);            \
  template <class T, int N>       \
  vec<T, N> name(vec<T, N>);
#define DECLARED_2(name)                    \
  float name(float, float);                 \
  half name(half, half);                    \
  bfloat name(bfloat, bfloat);              \
  template <class T, int N>                 \
  vec<T, N> name(vec<T, N>, vec<T, N>);     \
  template <class T, int N>                 \
  vec<T, N> name(vec<T, N>, T);
#define DECLARED_3(name)                               \
  float name(float, float, float);                     \
  half name(half, half, half);                         \
  bfloat name(bfloat, bfloat, bfloat);                 \
  template <class T, int N>                            \
  vec<T, N> name(vec<T, N>, vec<T, N>, vec<T, N>);     \
  template <class T, int N>                            \
  vec<T, N> name(vec<T, N>, T, T);

// Functions that the namespaces fast and precise have as well.
#define DECLARED_TRANSCENDENTAL                                                                                    \
  DECLARED_1(acos) DECLARED_1(acosh) DECLARED_1(asin) DECLARED_1(asinh) DECLARED_1(atan) DECLARED_1(atanh)         \
  DECLARED_1(cos) DECLARED_1(cosh) DECLARED_1(cospi) DECLARED_1(exp) DECLARED_1(exp2) DECLARED_1(exp10)            \
  DECLARED_1(log) DECLARED_1(log2) DECLARED_1(log10) DECLARED_1(rsqrt) DECLARED_1(sin) DECLARED_1(sinh)            \
  DECLARED_1(sinpi) DECLARED_1(sqrt) DECLARED_1(tan) DECLARED_1(tanh) DECLARED_1(tanpi) DECLARED_1(fabs)           \
  DECLARED_1(ceil) DECLARED_1(floor) DECLARED_1(rint) DECLARED_1(round) DECLARED_1(trunc) DECLARED_1(fract)        \
  DECLARED_2(atan2) DECLARED_2(fmax) DECLARED_2(fmin) DECLARED_2(fmod) DECLARED_2(pow) DECLARED_2(powr)            \
  DECLARED_2(max) DECLARED_2(min) DECLARED_3(clamp)                                                                \
  float sincos(float, thread float&);
DECLARED_TRANSCENDENTAL
namespace fast {
DECLARED_TRANSCENDENTAL
}
namespace precise {
DECLARED_TRANSCENDENTAL
}
#undef DECLARED_TRANSCENDENTAL

DECLARED_1(abs) DECLARED_1(saturate) DECLARED_1(sign)
DECLARED_2(copysign) DECLARED_2(fdim) DECLARED_2(nextafter) DECLARED_2(step)
DECLARED_3(fma) DECLARED_3(mix) DECLARED_3(max3) DECLARED_3(min3)
template <class T, int N>
vec<T, N> mix(vec<T, N>, vec<T, N>, T);
float smoothstep(float, float, float);
float ldexp(float, int);
float frexp(float, thread int&);
float modf(float, thread float&);

// ---- geometry
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);
template <class T, int N>
T length_squared(vec<T, N>);
template <class T, int N>
T length(vec<T, N>);
template <class T, int N>
T distance(vec<T, N>, vec<T, N>);
template <class T, int N>
vec<T, N> normalize(vec<T, N>);

// ---- predicates
#define DECLARED_IS(name)      \
  bool name(float);            \
  bool name(half);             \
  bool name(bfloat);           \
  template <class T, int N>    \
  vec<bool, N> name(vec<T, N>);
DECLARED_IS(isfinite)
DECLARED_IS(isinf)
DECLARED_IS(isnan)
DECLARED_IS(isnormal)
DECLARED_IS(signbit)
#undef DECLARED_IS
template <class T>
enable_if_t<is_floating_point<T>::value, bool> isunordered(T, T);
template <class T>
enable_if_t<is_floating_point<T>::value, bool> isordered(T, T);

// With clang's own vectors, a comparison gives a vector of integers of the same size, not of bools.
bool all(bool);
bool any(bool);
template <class T, int N>
bool all(vec<T, N>);
template <class T, int N>
bool any(vec<T, N>);
template <class T>
T select(T, T, bool);
template <class T, class C, int N>
vec<T, N> select(vec<T, N>, vec<T, N>, vec<C, N>);

#undef DECLARED_1
#undef DECLARED_2
#undef DECLARED_3

}  // namespace metal
