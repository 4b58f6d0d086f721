// Binds the arguments of a kernel: buffers, and the values of MSL's attributes (thread_position_in_grid, ...).
// The translator writes, for each kernel, a call of call<bindings...>(kernel, ...) and one of describe<bindings...>().
#pragma once
#include "atomics.h"

namespace emulator {

// ---- the description of a kernel's parameter for Python; Parameter in arguments.py has the same fields
struct Parameter {
  int buffer;     // index of the buffer; -1: the parameter is no buffer
  int reference;  // 1: a reference to one element; 0: a pointer to several
  int element;    // code of the scalar type, an index of SCALARS in scalars.py; 0: none of them
  int size;       // bytes of the type that the parameter points to
  int alignment;
  int writable;
};

template <class T>
struct ElementCode {
  enum { code = 0 };
};
#define EMULATED_CODE(T, number) \
  template <>                    \
  struct ElementCode<T> {        \
    enum { code = number };      \
  };
EMULATED_CODE(float, 1)
EMULATED_CODE(half, 2)
EMULATED_CODE(bfloat, 3)
EMULATED_CODE(char, 4)
EMULATED_CODE(uchar, 5)
EMULATED_CODE(short, 6)
EMULATED_CODE(ushort, 7)
EMULATED_CODE(int, 8)
EMULATED_CODE(uint, 9)
EMULATED_CODE(long, 10)
EMULATED_CODE(ulong, 11)
EMULATED_CODE(bool, 12)
#undef EMULATED_CODE
template <class T, int N>
struct ElementCode<metal::vec<T, N>> : ElementCode<T> {};
template <class T, int N>
struct ElementCode<metal::packed_vec<T, N>> : ElementCode<T> {};
template <class T>
struct ElementCode<metal::atomic<T>> : ElementCode<T> {};
template <class T>
struct ElementCode<const T> : ElementCode<T> {};
template <class T>
struct ElementCode<volatile T> : ElementCode<T> {};

template <class T>
struct Described {
  static constexpr int size = sizeof(T), alignment = alignof(T);
};
template <>
struct Described<void> {
  static constexpr int size = 1, alignment = 1;
};
template <>
struct Described<const void> : Described<void> {};

template <class T>
struct IsConst : metal::false_type {};
template <class T>
struct IsConst<const T> : metal::true_type {};

// ---- bindings
template <class P>
struct Bound;  // P: the type of the parameter as the kernel declares it
template <class T>
struct Bound<T*> {
  static T* get(void* buffer) { return static_cast<T*>(buffer); }
  static Parameter describe(int index) {
    return {index, 0, ElementCode<T>::code, Described<T>::size, Described<T>::alignment, !IsConst<T>::value};
  }
};
template <class T>
struct Bound<T&> {
  static T& get(void* buffer) { return *static_cast<T*>(buffer); }
  static Parameter describe(int index) {
    return {index, 1, ElementCode<T>::code, Described<T>::size, Described<T>::alignment, !IsConst<T>::value};
  }
};

template <int index>
struct buffer {
  template <class P>
  static EMULATOR_INLINE P get(const Context& context, const Thread&) {
    return Bound<P>::get(context.buffers[index]);
  }
  template <class P>
  static Parameter describe() {
    return Bound<P>::describe(index);
  }
};

// Converts a position or size of three numbers to a parameter's type: a number, or a vector of as many components as it
// has.
template <class P>
struct Components {
  static EMULATOR_INLINE P of(const unsigned* v) { return P(v[0]); }
};
template <class T, int N>
struct Components<metal::vec<T, N>> {
  static EMULATOR_INLINE metal::vec<T, N> of(const unsigned* v) {
    metal::vec<T, N> r;
    for (int i = 0; i < N; ++i) r.e[i] = T(v[i]);
    return r;
  }
};

#define EMULATED_ATTRIBUTE(name, ...)                                                        \
  struct name {                                                                              \
    template <class P>                                                                       \
    static EMULATOR_INLINE P get(const Context& c, const Thread& t) {                        \
      (void)c, (void)t;                                                                      \
      const unsigned v[3] = {__VA_ARGS__};                                                   \
      return Components<P>::of(v);                                                           \
    }                                                                                        \
    template <class P>                                                                       \
    static Parameter describe() {                                                            \
      return {-1, 0, 0, 0, 0, 0};                                                            \
    }                                                                                        \
  };
#define EMULATED_EACH(field) field[0], field[1], field[2]
#define EMULATED_IN_GRID(d) c.position[d] * c.nominal[d] + t.position[d]
EMULATED_ATTRIBUTE(thread_position_in_grid, EMULATED_IN_GRID(0), EMULATED_IN_GRID(1), EMULATED_IN_GRID(2))
EMULATED_ATTRIBUTE(thread_position_in_threadgroup, EMULATED_EACH(t.position))
EMULATED_ATTRIBUTE(thread_index_in_threadgroup, t.index)
EMULATED_ATTRIBUTE(thread_index_in_simdgroup, t.index % LANES)
EMULATED_ATTRIBUTE(simdgroup_index_in_threadgroup, t.index / LANES)
EMULATED_ATTRIBUTE(simdgroups_per_threadgroup, (c.size[0] * c.size[1] * c.size[2] + LANES - 1) / LANES)
EMULATED_ATTRIBUTE(dispatch_simdgroups_per_threadgroup,
                   (c.nominal[0] * c.nominal[1] * c.nominal[2] + LANES - 1) / LANES)
EMULATED_ATTRIBUTE(threads_per_simdgroup, LANES)
EMULATED_ATTRIBUTE(thread_execution_width, LANES)
EMULATED_ATTRIBUTE(threadgroup_position_in_grid, EMULATED_EACH(c.position))
EMULATED_ATTRIBUTE(threadgroups_per_grid, EMULATED_EACH(c.groups))
EMULATED_ATTRIBUTE(threads_per_threadgroup, EMULATED_EACH(c.size))
EMULATED_ATTRIBUTE(dispatch_threads_per_threadgroup, EMULATED_EACH(c.nominal))
EMULATED_ATTRIBUTE(threads_per_grid, EMULATED_EACH(c.grid))
#undef EMULATED_IN_GRID
#undef EMULATED_EACH
#undef EMULATED_ATTRIBUTE

template <class... Bindings, class... P>
EMULATOR_INLINE void call(void (*kernel)(P...), const Context& context, const Thread& thread_) {
  kernel(Bindings::template get<P>(context, thread_)...);
}
template <class... Bindings, class... P>
int describe(void (*)(P...), Parameter* to) {
  const Parameter found[] = {Bindings::template describe<P>()..., Parameter()};
  for (unsigned i = 0; i < sizeof...(P); ++i) to[i] = found[i];
  return int(sizeof...(P));
}

// Returns a reference to a threadgroup variable, whose type `T` may be an array.
template <class T>
EMULATOR_INLINE T& variable(unsigned key) {
  return *static_cast<T*>(emulator_threadgroup_memory(key, sizeof(T)));
}

}  // namespace emulator
