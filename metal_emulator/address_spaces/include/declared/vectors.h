// Vectors of 2, 3 and 4 components: those of clang, which has swizzles, too.
#pragma once
#include "traits.h"

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// A packed vector: only stored in memory, and converted to a vec to compute with.
template <class T, int N>
struct packed_vec {
  T e[N];
  packed_vec() = default;
  packed_vec(vec<T, N>);
  operator vec<T, N>() const;
  T& operator[](ulong);
  const T& operator[](ulong) const;
};

template <class T, size_t N>
struct array {
  T e[N];
  T& operator[](size_t);
  const T& operator[](size_t) const;
  constexpr size_t size() const { return N; }
};

namespace spaces {

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

// Stands for float4(a, b.xyz), which clang does not have in C++: takes one scalar for all components, or as
// many components, from scalars and vectors, as the result has.
template <class V, class... A>
constexpr V make(A...) {
  static_assert((sizeof...(A) == 1 && int(total<A...>::count) == 1) || int(total<A...>::count) == int(components<V>::count),
                "a vector has another number of components");
  return V();
}

}  // namespace spaces
}  // namespace metal

#define DECLARED_NAMES(T)             \
  typedef metal::vec<T, 2> T##2;      \
  typedef metal::vec<T, 3> T##3;      \
  typedef metal::vec<T, 4> T##4;      \
  typedef metal::packed_vec<T, 2> packed_##T##2; \
  typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4;
DECLARED_NAMES(char)
DECLARED_NAMES(uchar)
DECLARED_NAMES(short)
DECLARED_NAMES(ushort)
DECLARED_NAMES(int)
DECLARED_NAMES(uint)
DECLARED_NAMES(long)
DECLARED_NAMES(ulong)
DECLARED_NAMES(half)
DECLARED_NAMES(bfloat)
DECLARED_NAMES(float)
#undef DECLARED_NAMES
// Vectors of bools are vectors of uchar here, as clang's own vectors of bools have no named components.
typedef uchar2 bool2;
typedef uchar3 bool3;
typedef uchar4 bool4;
