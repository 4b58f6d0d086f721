// Type traits and limits.
#pragma once
#include "shared/traits.h"
#include "words.h"

namespace metal {

template <class T>
struct remove_reference {
  typedef __remove_reference_t(T) type;
};
template <class T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
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
