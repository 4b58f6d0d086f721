// Atomic variables. The emulator switches threads only at barriers and simd operations, so plain instructions are
// atomic.
#pragma once
#include "simdgroup.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomic: int, uint, float, bool and ulong alone");
  T value;
};
template <>
struct atomic<bool> {
  bool value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

namespace emulated {

template <class T>
EMULATOR_INLINE void tell(const volatile atomic<T>* p, bool writes) {
#ifdef EMULATOR_CHECKED
  emulator_atomic(p, sizeof(T), writes);
#endif
}
template <class T>
EMULATOR_UNCHECKED T load(const volatile atomic<T>* p) {
  return p->value;
}
template <class T>
EMULATOR_UNCHECKED T swap(volatile atomic<T>* p, T value) {
  const T old = p->value;
  p->value = value;
  return old;
}
// Keeps the compiler from deducing T from an argument of this type, so that an int may be added to an atomic_uint.
template <class T>
using Same = typename remove_cv<T>::type;

}  // namespace emulated

template <class T>
EMULATOR_INLINE T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  emulated::tell(p, false);
  return emulated::load(p);
}
template <class T>
EMULATOR_INLINE void atomic_store_explicit(volatile atomic<T>* p, emulated::Same<T> value, memory_order) {
  emulated::tell(p, true);
  emulated::swap(p, value);
}
template <class T>
EMULATOR_INLINE T atomic_exchange_explicit(volatile atomic<T>* p, emulated::Same<T> value, memory_order) {
  emulated::tell(p, true);
  return emulated::swap(p, value);
}
template <class T>
EMULATOR_INLINE bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected,
                                                           emulated::Same<T> wanted, memory_order, memory_order) {
  emulated::tell(p, true);
  const T old = emulated::load(p);
  const bool same = old == *expected;
  if (same) emulated::swap(p, wanted);
  else *expected = old;
  return same;
}

#define EMULATED_FETCH(name, result)                                                                \
  template <class T>                                                                                \
  EMULATOR_INLINE T name(volatile atomic<T>* p, emulated::Same<T> value, memory_order) {            \
    emulated::tell(p, true);                                                                        \
    const T old = emulated::load(p);                                                                \
    return emulated::swap(p, T(result));                                                            \
  }
EMULATED_FETCH(atomic_fetch_add_explicit, old + value)
EMULATED_FETCH(atomic_fetch_sub_explicit, old - value)
EMULATED_FETCH(atomic_fetch_max_explicit, max(old, value))
EMULATED_FETCH(atomic_fetch_min_explicit, min(old, value))
EMULATED_FETCH(atomic_fetch_and_explicit, old& value)
EMULATED_FETCH(atomic_fetch_or_explicit, old | value)
EMULATED_FETCH(atomic_fetch_xor_explicit, old ^ value)
#undef EMULATED_FETCH

}  // namespace metal
