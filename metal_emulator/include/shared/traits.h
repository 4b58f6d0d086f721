// Type traits, shared by the headers of the emulator (include/emulated) and those for clang's checks (address_spaces).
#pragma once

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

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
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

// Queries about types, which the including headers specialise.
template <class T>
struct remove_reference;
template <class T>
struct remove_cv;
template <class T>
struct is_floating_point;
template <class T>
struct is_integral;
template <class T>
struct is_signed;
template <class T>
struct is_unsigned;
template <class T>
struct is_scalar;

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

}  // namespace metal
