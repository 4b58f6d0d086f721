// Metal's scalars and their limits, the words of the language, and type traits.
#pragma once
#include "shared/traits.h"
#include "shared/words.h"

// ---- words of the language that mean nothing in C++: only the translator interprets them
#define device
#define constant const
#define threadgroup
#define thread
#define METAL_FUNC inline

// A bfloat: the upper half of a float, rounded to nearest, ties to even. Converts to float implicitly, and from float
// explicitly.
struct bfloat {
  ushort bits;

  bfloat() = default;
  template <class T>
  EMULATOR_INLINE explicit bfloat(T value) {
    const float wide = float(value);
    uint all;
    __builtin_memcpy(&all, &wide, 4);
    const bool nan = (all & 0x7FFFFFFFu) > 0x7F800000u;
    bits = nan ? ushort(all >> 16 | 0x40) : ushort((all + 0x7FFFu + (all >> 16 & 1u)) >> 16);
  }
  EMULATOR_INLINE operator float() const {
    const uint all = uint(bits) << 16;
    float wide;
    __builtin_memcpy(&wide, &all, 4);
    return wide;
  }
  EMULATOR_INLINE bfloat operator-() const { return bfloat(-float(*this)); }
  EMULATOR_INLINE bfloat& operator++() { return *this = bfloat(float(*this) + 1.0f); }
  EMULATOR_INLINE bfloat& operator--() { return *this = bfloat(float(*this) - 1.0f); }
};

namespace metal {

template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
struct remove_cv {
  typedef T type;
};
template <class T>
struct remove_cv<const T> {
  typedef T type;
};
template <class T>
struct remove_cv<volatile T> {
  typedef T type;
};
template <class T>
struct remove_cv<const volatile T> {
  typedef T type;
};
template <class T>
T declval();

template <class T>
struct is_floating_point : bool_constant<is_same<typename remove_cv<T>::type, float>::value ||
                                         is_same<typename remove_cv<T>::type, half>::value ||
                                         is_same<typename remove_cv<T>::type, bfloat>::value> {};
template <class T>
struct is_integral : false_type {};
template <class T>
struct is_signed : bool_constant<is_floating_point<T>::value> {};

#define EMULATED_INTEGER(T, low, high)               \
  template <>                                        \
  struct is_integral<T> : true_type {};              \
  template <>                                        \
  struct is_integral<const T> : true_type {};        \
  template <>                                        \
  struct is_signed<T> : bool_constant<(low < 0)> {}; \
  template <>                                        \
  struct numeric_limits<T> {                         \
    static constexpr T min() { return low; }         \
    static constexpr T lowest() { return low; }      \
    static constexpr T max() { return high; }        \
  };
template <class T>
struct numeric_limits;
EMULATED_INTEGER(bool, false, true)
EMULATED_INTEGER(char, -128, 127)
EMULATED_INTEGER(uchar, 0, 255)
EMULATED_INTEGER(short, -32768, 32767)
EMULATED_INTEGER(ushort, 0, 65535)
EMULATED_INTEGER(int, INT_MIN, INT_MAX)
EMULATED_INTEGER(uint, 0u, UINT_MAX)
EMULATED_INTEGER(long, -9223372036854775807l - 1, 9223372036854775807l)
EMULATED_INTEGER(ulong, 0ul, 18446744073709551615ul)
#undef EMULATED_INTEGER

#define EMULATED_FLOAT(T, smallest, largest, step)           \
  template <>                                                \
  struct numeric_limits<T> {                                 \
    static T min() { return T(smallest); }                   \
    static T max() { return T(largest); }                    \
    static T lowest() { return T(-largest); }                \
    static T epsilon() { return T(step); }                   \
    static T infinity() { return T(__builtin_inff()); }      \
    static T quiet_NaN() { return T(__builtin_nanf("")); }   \
  };
EMULATED_FLOAT(half, 6.103515625e-05f, 65504.0f, 9.765625e-04f)
EMULATED_FLOAT(bfloat, 1.175494351e-38f, 3.38953139e38f, 7.8125e-03f)
#undef EMULATED_FLOAT
template <>
struct numeric_limits<float> {
  static constexpr float min() { return FLT_MIN; }
  static constexpr float max() { return FLT_MAX; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float epsilon() { return FLT_EPSILON; }
  static constexpr float infinity() { return INFINITY; }
  static constexpr float quiet_NaN() { return NAN; }
};

template <class T>
struct is_scalar : bool_constant<is_floating_point<T>::value || is_integral<T>::value> {};
template <class T>
struct is_unsigned : bool_constant<is_integral<T>::value && !is_signed<T>::value> {};

}  // namespace metal

// Arithmetic of bfloats: with a float the result is a float, by the built-in operator; with an integer it is a bfloat.
#define EMULATED_BFLOAT(op)                                                                                     \
  EMULATOR_INLINE bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }               \
  template <class T>                                                                                            \
  EMULATOR_INLINE metal::enable_if_t<metal::is_integral<T>::value, bfloat> operator op(bfloat a, T b) {         \
    return a op bfloat(b);                                                                                      \
  }                                                                                                             \
  template <class T>                                                                                            \
  EMULATOR_INLINE metal::enable_if_t<metal::is_integral<T>::value, bfloat> operator op(T a, bfloat b) {         \
    return bfloat(a) op b;                                                                                      \
  }                                                                                                             \
  EMULATOR_INLINE bfloat& operator op##=(bfloat& a, bfloat b) { return a = a op b; }
EMULATED_BFLOAT(+)
EMULATED_BFLOAT(-)
EMULATED_BFLOAT(*)
EMULATED_BFLOAT(/)
#undef EMULATED_BFLOAT

template <class To, class From>
EMULATOR_INLINE To as_type(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: both types must have the same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
