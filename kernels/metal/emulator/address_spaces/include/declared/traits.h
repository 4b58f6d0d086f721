// Type traits and limits.
#pragma once
#include "words.h"

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr const T value = v;
  typedef T value_type;
  constexpr operator T() const { return v; }
};
template <bool v>
using bool_constant = integral_constant<bool, v>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool condition, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool condition, class A, class B>
struct conditional {
  typedef A type;
};
template <class A, class B>
struct conditional<false, A, B> {
  typedef B type;
};
template <class T>
struct remove_reference {
  typedef __remove_reference_t(T) type;
};
template <class T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <class T>
T declval();

template <class T>
struct is_floating_point : bool_constant<__is_floating_point(T)> {};
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
struct is_signed : bool_constant<__is_signed(T)> {};
template <class T>
struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <class T>
struct is_scalar : bool_constant<__is_arithmetic(T)> {};

template <bool condition, class T = void>
using enable_if_t = typename enable_if<condition, T>::type;
template <bool condition, class A, class B>
using conditional_t = typename conditional<condition, A, B>::type;
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class A, class B>
constexpr const bool is_same_v = is_same<A, B>::value;
template <class T>
constexpr const bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
constexpr const bool is_integral_v = is_integral<T>::value;
template <class T>
constexpr const bool is_signed_v = is_signed<T>::value;
template <class T>
constexpr const bool is_unsigned_v = is_unsigned<T>::value;
template <class T>
constexpr const bool is_scalar_v = is_scalar<T>::value;

template <class T>
struct numeric_limits {
  static constexpr T min() { return T(); }
  static constexpr T max() { return T(); }
  static constexpr T lowest() { return T(); }
  static constexpr T epsilon() { return T(); }
  static constexpr T infinity() { return T(); }
  static constexpr T quiet_NaN() { return T(); }
};

}  // namespace metal

template <class To, class From>
To as_type(From) {
  static_assert(sizeof(To) == sizeof(From), "as_type: both types must have the same size");
  return To();
}
