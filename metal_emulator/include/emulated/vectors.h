// Vectors of 2, 3 and 4 components in MSL's layout: a vector of 3 takes as much memory as one of 4, unless packed.
// The translator turns v.zyx into v.swizzled<2, 1, 0>(), which is const, so that an assignment to it does not compile,
// and v.zyx = ... into v.swizzled_to<2, 1, 0>() = ...
#pragma once
#include "types.h"

namespace metal {

template <class T, int N>
struct vec;

namespace emulated {

template <class T>
struct components {
  enum { count = 1 };
};
template <class T, int N>
struct components<vec<T, N>> {
  enum { count = N };
};
template <class... A>
struct total {
  enum { count = 0 };
};
template <class A, class... B>
struct total<A, B...> {
  enum { count = int(components<A>::count) + int(total<B...>::count) };
};

// Lists the components of scalars and vectors, one after the other.
template <class T, class A>
EMULATOR_INLINE T* append(T* to, const A& scalar) {
  *to = T(scalar);
  return to + 1;
}
template <class T, class A, int N>
EMULATOR_INLINE T* append(T* to, const vec<A, N>& v) {
  for (int i = 0; i < N; ++i) to[i] = T(v.e[i]);
  return to + N;
}

// A swizzle on the left side of an assignment: references to some components.
template <class T, int... I>
struct Swizzle {
  T* e;
  typedef vec<T, int(sizeof...(I))> V;

  EMULATOR_INLINE V value() const { return V(e[I]...); }
  EMULATOR_INLINE void operator=(const V& v) {
    int i = 0;
    const int done[] = {(e[I] = v.e[i++], 0)...};
    (void)done;
  }
  EMULATOR_INLINE void operator+=(const V& v) { *this = value() + v; }
  EMULATOR_INLINE void operator-=(const V& v) { *this = value() - v; }
  EMULATOR_INLINE void operator*=(const V& v) { *this = value() * v; }
  EMULATOR_INLINE void operator/=(const V& v) { *this = value() / v; }
  EMULATOR_INLINE void operator%=(const V& v) { *this = value() % v; }
  EMULATOR_INLINE void operator&=(const V& v) { *this = value() & v; }
  EMULATOR_INLINE void operator|=(const V& v) { *this = value() | v; }
  EMULATOR_INLINE void operator^=(const V& v) { *this = value() ^ v; }
  EMULATOR_INLINE void operator<<=(const V& v) { *this = value() << v; }
  EMULATOR_INLINE void operator>>=(const V& v) { *this = value() >> v; }
  EMULATOR_INLINE void operator++(int) { *this = value() + V(1); }
  EMULATOR_INLINE void operator--(int) { *this = value() - V(1); }
};

}  // namespace emulated

#define EMULATED_EACH(type, expression)               \
  vec<type, N> r;                                     \
  for (int i = 0; i < N; ++i) r.e[i] = type(expression); \
  return r;
#define EMULATED_BINARY(type, op)                                                                          \
  friend EMULATOR_INLINE vec<type, N> operator op(const vec& a, const vec& b) { EMULATED_EACH(type, a.e[i] op b.e[i]) } \
  friend EMULATOR_INLINE vec<type, N> operator op(const vec& a, T b) { EMULATED_EACH(type, a.e[i] op b) }  \
  friend EMULATOR_INLINE vec<type, N> operator op(T a, const vec& b) { EMULATED_EACH(type, a op b.e[i]) }
#define EMULATED_ARITHMETIC(op)                                                  \
  EMULATED_BINARY(T, op)                                                         \
  EMULATOR_INLINE vec& operator op##=(const vec& b) { return *this = *this op b; } \
  EMULATOR_INLINE vec& operator op##=(T b) { return *this = *this op b; }
// Operators that are templates, so that they exist for vectors of integers only.
#define EMULATED_BITWISE(op)                                                                                         \
  template <class U>                                                                                                 \
  friend EMULATOR_INLINE vec operator op(const vec& a, const vec<U, N>& b) { EMULATED_EACH(T, a.e[i] op b.e[i]) }    \
  template <class U, class = enable_if_t<is_integral<U>::value>>                                                     \
  friend EMULATOR_INLINE vec operator op(const vec& a, U b) { EMULATED_EACH(T, a.e[i] op T(b)) }                     \
  template <class U>                                                                                                 \
  EMULATOR_INLINE vec& operator op##=(const U& b) { return *this = *this op b; }

// The members that vectors of all sizes have. T(...) rounds each result, as the result of two chars is an int in C++.
#define EMULATED_VECTOR(N_)                                                                            \
  enum { N = N_ };                                                                                     \
  vec() = default;                                                                                     \
  EMULATOR_INLINE vec(T all) {                                                                         \
    for (int i = 0; i < N; ++i) e[i] = all;                                                            \
  }                                                                                                    \
  template <class U, class = enable_if_t<is_scalar<U>::value && !is_same<U, T>::value>>                \
  EMULATOR_INLINE explicit vec(U all) : vec(T(all)) {}                                                 \
  template <class U>                                                                                   \
  EMULATOR_INLINE explicit vec(const vec<U, N_>& other) {                                              \
    for (int i = 0; i < N; ++i) e[i] = T(other.e[i]);                                                  \
  }                                                                                                    \
  template <class A, class B, class... C>                                                              \
  EMULATOR_INLINE vec(const A& a, const B& b, const C&... c) {                                         \
    static_assert(int(emulated::total<A, B, C...>::count) == N, "a vector has another number of components"); \
    T* to = emulated::append(emulated::append(e, a), b);                                               \
    const int done[] = {0, (to = emulated::append(to, c), 0)...};                                      \
    (void)done;                                                                                        \
  }                                                                                                    \
  EMULATOR_INLINE T& operator[](ulong i) { return e[i]; }                                              \
  EMULATOR_INLINE const T& operator[](ulong i) const { return e[i]; }                                  \
  template <int... I>                                                                                  \
  EMULATOR_INLINE const vec<T, int(sizeof...(I))> swizzled() const {                                   \
    return vec<T, int(sizeof...(I))>(e[I]...);                                                         \
  }                                                                                                    \
  template <int... I>                                                                                  \
  EMULATOR_INLINE emulated::Swizzle<T, I...> swizzled_to() {                                           \
    return {e};                                                                                        \
  }                                                                                                    \
  EMULATOR_INLINE vec& operator++() { return *this = *this + T(1); }                                   \
  EMULATOR_INLINE vec& operator--() { return *this = *this - T(1); }                                   \
  EMULATOR_INLINE vec operator++(int) {                                                                \
    const vec before = *this;                                                                          \
    ++*this;                                                                                           \
    return before;                                                                                     \
  }                                                                                                    \
  EMULATOR_INLINE vec operator--(int) {                                                                \
    const vec before = *this;                                                                          \
    --*this;                                                                                           \
    return before;                                                                                     \
  }                                                                                                    \
  EMULATOR_INLINE vec operator+() const { return *this; }                                              \
  EMULATOR_INLINE vec operator-() const { EMULATED_EACH(T, -e[i]) }                                    \
  EMULATOR_INLINE vec operator~() const { EMULATED_EACH(T, ~e[i]) }                                    \
  EMULATOR_INLINE vec<bool, N_> operator!() const { EMULATED_EACH(bool, !e[i]) }                       \
  EMULATED_ARITHMETIC(+)                                                                               \
  EMULATED_ARITHMETIC(-)                                                                               \
  EMULATED_ARITHMETIC(*)                                                                               \
  EMULATED_ARITHMETIC(/)                                                                               \
  EMULATED_BITWISE(%)                                                                                  \
  EMULATED_BITWISE(&)                                                                                  \
  EMULATED_BITWISE(|)                                                                                  \
  EMULATED_BITWISE(^)                                                                                  \
  EMULATED_BITWISE(<<)                                                                                 \
  EMULATED_BITWISE(>>)                                                                                 \
  EMULATED_BINARY(bool, ==)                                                                            \
  EMULATED_BINARY(bool, !=)                                                                            \
  EMULATED_BINARY(bool, <)                                                                             \
  EMULATED_BINARY(bool, <=)                                                                            \
  EMULATED_BINARY(bool, >)                                                                             \
  EMULATED_BINARY(bool, >=)                                                                            \
  EMULATED_BINARY(bool, &&)                                                                            \
  EMULATED_BINARY(bool, ||)

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    struct { T x, y; };
    struct { T r, g; };
    T e[2];
  };
  EMULATED_VECTOR(2)
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    struct { T x, y, z; };
    struct { T r, g, b; };
    T e[4];
  };
  EMULATED_VECTOR(3)
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    T e[4];
  };
  EMULATED_VECTOR(4)
};
#undef EMULATED_VECTOR
#undef EMULATED_BITWISE
#undef EMULATED_ARITHMETIC
#undef EMULATED_BINARY
#undef EMULATED_EACH

// A packed vector: only stored in memory, and converted to a vec to compute with.
template <class T, int N>
struct packed_vec {
  T e[N];
  packed_vec() = default;
  EMULATOR_INLINE packed_vec(const vec<T, N>& v) {
    for (int i = 0; i < N; ++i) e[i] = v.e[i];
  }
  EMULATOR_INLINE operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; ++i) v.e[i] = e[i];
    return v;
  }
  EMULATOR_INLINE T& operator[](ulong i) { return e[i]; }
  EMULATOR_INLINE const T& operator[](ulong i) const { return e[i]; }
};

template <class T, size_t N>
struct array {
  T e[N];
  EMULATOR_INLINE T& operator[](size_t i) { return e[i]; }
  EMULATOR_INLINE constexpr const T& operator[](size_t i) const { return e[i]; }
  EMULATOR_INLINE constexpr size_t size() const { return N; }
};

}  // namespace metal

#define EMULATED_NAMES(T)             \
  typedef metal::vec<T, 2> T##2;      \
  typedef metal::vec<T, 3> T##3;      \
  typedef metal::vec<T, 4> T##4;      \
  typedef metal::packed_vec<T, 2> packed_##T##2; \
  typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4;
EMULATED_NAMES(bool)
EMULATED_NAMES(char)
EMULATED_NAMES(uchar)
EMULATED_NAMES(short)
EMULATED_NAMES(ushort)
EMULATED_NAMES(int)
EMULATED_NAMES(uint)
EMULATED_NAMES(long)
EMULATED_NAMES(ulong)
EMULATED_NAMES(half)
EMULATED_NAMES(bfloat)
EMULATED_NAMES(float)
#undef EMULATED_NAMES
