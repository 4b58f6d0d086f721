// Functions of floating point numbers: computed in float, rounded to their type. Those of the namespaces fast and
// precise are the same here.
#pragma once
#include "vectors.h"

namespace metal {

// Applies a function to vectors component by component; a scalar argument is used for all components.
#define EMULATED_VECTOR_1(name)                                    \
  template <class T, int N>                                        \
  EMULATOR_INLINE vec<T, N> name(const vec<T, N>& a) {             \
    vec<T, N> r;                                                   \
    for (int i = 0; i < N; ++i) r.e[i] = name(a.e[i]);             \
    return r;                                                      \
  }
#define EMULATED_VECTOR_2(name)                                              \
  template <class T, int N>                                                  \
  EMULATOR_INLINE vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b) {   \
    vec<T, N> r;                                                             \
    for (int i = 0; i < N; ++i) r.e[i] = name(a.e[i], b.e[i]);               \
    return r;                                                                \
  }                                                                          \
  template <class T, int N>                                                  \
  EMULATOR_INLINE vec<T, N> name(const vec<T, N>& a, T b) {                  \
    return name(a, vec<T, N>(b));                                            \
  }
#define EMULATED_VECTOR_3(name)                                                                  \
  template <class T, int N>                                                                      \
  EMULATOR_INLINE vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {   \
    vec<T, N> r;                                                                                 \
    for (int i = 0; i < N; ++i) r.e[i] = name(a.e[i], b.e[i], c.e[i]);                           \
    return r;                                                                                    \
  }                                                                                              \
  template <class T, int N>                                                                      \
  EMULATOR_INLINE vec<T, N> name(const vec<T, N>& a, T b, T c) {                                 \
    return name(a, vec<T, N>(b), vec<T, N>(c));                                                  \
  }

#define EMULATED_1(name, value)                                                  \
  EMULATOR_INLINE float name(float x) { return value; }                          \
  EMULATOR_INLINE half name(half a) { return half(name(float(a))); }             \
  EMULATOR_INLINE bfloat name(bfloat a) { return bfloat(name(float(a))); }       \
  EMULATED_VECTOR_1(name)
#define EMULATED_2(name, value)                                                                   \
  EMULATOR_INLINE float name(float x, float y) { return value; }                                  \
  EMULATOR_INLINE half name(half a, half b) { return half(name(float(a), float(b))); }            \
  EMULATOR_INLINE bfloat name(bfloat a, bfloat b) { return bfloat(name(float(a), float(b))); }    \
  EMULATED_VECTOR_2(name)
#define EMULATED_3(name, value)                                                                          \
  EMULATOR_INLINE float name(float x, float y, float z) { return value; }                                \
  EMULATOR_INLINE half name(half a, half b, half c) { return half(name(float(a), float(b), float(c))); } \
  EMULATOR_INLINE bfloat name(bfloat a, bfloat b, bfloat c) {                                            \
    return bfloat(name(float(a), float(b), float(c)));                                                   \
  }                                                                                                      \
  EMULATED_VECTOR_3(name)

// Functions that the namespaces fast and precise have as well.
#define EMULATED_TRANSCENDENTAL(F1, F2)          \
  F1(acos, __builtin_acosf(x))                   \
  F1(acosh, __builtin_acoshf(x))                 \
  F1(asin, __builtin_asinf(x))                   \
  F1(asinh, __builtin_asinhf(x))                 \
  F1(atan, __builtin_atanf(x))                   \
  F1(atanh, __builtin_atanhf(x))                 \
  F1(cos, __builtin_cosf(x))                     \
  F1(cosh, __builtin_coshf(x))                   \
  F1(cospi, __builtin_cosf(M_PI_F * x))          \
  F1(exp, __builtin_expf(x))                     \
  F1(exp2, __builtin_exp2f(x))                   \
  F1(exp10, __builtin_powf(10.0f, x))            \
  F1(log, __builtin_logf(x))                     \
  F1(log2, __builtin_log2f(x))                   \
  F1(log10, __builtin_log10f(x))                 \
  F1(rsqrt, 1.0f / __builtin_sqrtf(x))           \
  F1(sin, __builtin_sinf(x))                     \
  F1(sinh, __builtin_sinhf(x))                   \
  F1(sinpi, __builtin_sinf(M_PI_F * x))          \
  F1(sqrt, __builtin_sqrtf(x))                   \
  F1(tan, __builtin_tanf(x))                     \
  F1(tanh, __builtin_tanhf(x))                   \
  F1(tanpi, __builtin_tanf(M_PI_F * x))          \
  F1(fabs, __builtin_fabsf(x))                   \
  F1(ceil, __builtin_ceilf(x))                   \
  F1(floor, __builtin_floorf(x))                 \
  F1(rint, __builtin_rintf(x))                   \
  F1(round, __builtin_roundf(x))                 \
  F1(trunc, __builtin_truncf(x))                 \
  F1(fract, __builtin_fminf(x - __builtin_floorf(x), 0.999999940395355224609375f)) \
  F2(atan2, __builtin_atan2f(x, y))              \
  F2(fmax, __builtin_fmaxf(x, y))                \
  F2(fmin, __builtin_fminf(x, y))                \
  F2(fmod, __builtin_fmodf(x, y))                \
  F2(pow, __builtin_powf(x, y))                  \
  F2(powr, __builtin_powf(x, y))
EMULATED_TRANSCENDENTAL(EMULATED_1, EMULATED_2)

EMULATED_2(max, __builtin_fmaxf(x, y))
EMULATED_2(min, __builtin_fminf(x, y))
EMULATED_3(clamp, __builtin_fminf(__builtin_fmaxf(x, y), z))

#define EMULATED_USING_1(name, value) using metal::name;
namespace fast {
EMULATED_TRANSCENDENTAL(EMULATED_USING_1, EMULATED_USING_1)
using metal::clamp;
using metal::max;
using metal::min;
}  // namespace fast
namespace precise {
using namespace fast;
EMULATED_TRANSCENDENTAL(EMULATED_USING_1, EMULATED_USING_1)
using metal::clamp;
using metal::max;
using metal::min;
}  // namespace precise
#undef EMULATED_USING_1
#undef EMULATED_TRANSCENDENTAL

EMULATED_1(abs, __builtin_fabsf(x))
EMULATED_1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
EMULATED_1(sign, __builtin_isnan(x) || x == 0.0f ? 0.0f : __builtin_copysignf(1.0f, x))
EMULATED_2(copysign, __builtin_copysignf(x, y))
EMULATED_2(fdim, __builtin_fdimf(x, y))
EMULATED_2(nextafter, __builtin_nextafterf(x, y))
EMULATED_2(step, y < x ? 0.0f : 1.0f)
EMULATED_3(fma, __builtin_fmaf(x, y, z))
EMULATED_3(mix, x + (y - x) * z)
EMULATED_3(max3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))
EMULATED_3(min3, __builtin_fminf(x, __builtin_fminf(y, z)))
EMULATOR_INLINE float smoothstep(float low, float high, float x) {
  const float t = saturate((x - low) / (high - low));
  return t * t * (3.0f - 2.0f * t);
}
template <class T, int N>
EMULATOR_INLINE vec<T, N> mix(const vec<T, N>& a, const vec<T, N>& b, T t) {
  return mix(a, b, vec<T, N>(t));
}
EMULATOR_INLINE float ldexp(float x, int power) { return __builtin_ldexpf(x, power); }
EMULATOR_INLINE float frexp(float x, int& power) { return __builtin_frexpf(x, &power); }
EMULATOR_INLINE float modf(float x, float& whole) { return __builtin_modff(x, &whole); }
EMULATOR_INLINE float sincos(float x, float& cosine) {
  cosine = cos(x);
  return sin(x);
}
namespace fast {
using metal::sincos;
}
namespace precise {
using metal::sincos;
}

// ---- geometric functions (dot, length, ...); they sum in the order of the components, in the components' type
template <class T, int N>
EMULATOR_INLINE T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T sum = T(a.e[0] * b.e[0]);
  for (int i = 1; i < N; ++i) sum = T(sum + a.e[i] * b.e[i]);
  return sum;
}
template <class T, int N>
EMULATOR_INLINE T length_squared(const vec<T, N>& a) {
  return dot(a, a);
}
template <class T, int N>
EMULATOR_INLINE T length(const vec<T, N>& a) {
  return sqrt(dot(a, a));
}
template <class T, int N>
EMULATOR_INLINE T distance(const vec<T, N>& a, const vec<T, N>& b) {
  return length(a - b);
}
template <class T, int N>
EMULATOR_INLINE vec<T, N> normalize(const vec<T, N>& a) {
  return a * rsqrt(dot(a, a));
}

// ---- predicates
#define EMULATED_IS(name, value)                                              \
  EMULATOR_INLINE bool name(float x) { return value; }                        \
  EMULATOR_INLINE bool name(half x) { return name(float(x)); }                \
  EMULATOR_INLINE bool name(bfloat x) { return name(float(x)); }              \
  template <class T, int N>                                                   \
  EMULATOR_INLINE vec<bool, N> name(const vec<T, N>& a) {                     \
    vec<bool, N> r;                                                           \
    for (int i = 0; i < N; ++i) r.e[i] = name(a.e[i]);                        \
    return r;                                                                 \
  }
EMULATED_IS(isfinite, __builtin_isfinite(x))
EMULATED_IS(isinf, __builtin_isinf(x))
EMULATED_IS(isnan, __builtin_isnan(x))
EMULATED_IS(isnormal, __builtin_isnormal(x))
EMULATED_IS(signbit, __builtin_signbit(x))
#undef EMULATED_IS
template <class T>
EMULATOR_INLINE enable_if_t<is_floating_point<T>::value, bool> isunordered(T a, T b) {
  return isnan(a) || isnan(b);
}
template <class T>
EMULATOR_INLINE enable_if_t<is_floating_point<T>::value, bool> isordered(T a, T b) {
  return !isunordered(a, b);
}

EMULATOR_INLINE bool all(bool x) { return x; }
EMULATOR_INLINE bool any(bool x) { return x; }
template <int N>
EMULATOR_INLINE bool all(const vec<bool, N>& x) {
  bool r = true;
  for (int i = 0; i < N; ++i) r &= x.e[i];
  return r;
}
template <int N>
EMULATOR_INLINE bool any(const vec<bool, N>& x) {
  bool r = false;
  for (int i = 0; i < N; ++i) r |= x.e[i];
  return r;
}
template <class T>
EMULATOR_INLINE T select(T a, T b, bool second) {
  return second ? b : a;
}
template <class T, int N>
EMULATOR_INLINE vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<bool, N>& second) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.e[i] = second.e[i] ? b.e[i] : a.e[i];
  return r;
}

}  // namespace metal
