// Declarations of atomic variables in device and in threadgroup memory, for clang to check.
#pragma once
#include "vectors.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

namespace spaces {
// Keeps the compiler from deducing T from an argument of this type, so that an int may be added to an atomic_uint.
template <class T>
using Same = typename remove_cv<T>::type;
}  // namespace spaces

#define DECLARED_FETCH(space, name) \
  template <class T>                \
  T name(volatile space atomic<T>*, spaces::Same<T>, memory_order);
#define DECLARED_ATOMIC(space)                                                                                     \
  template <class T>                                                                                               \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                                           \
  template <class T>                                                                                               \
  void atomic_store_explicit(volatile space atomic<T>*, spaces::Same<T>, memory_order);                            \
  template <class T>                                                                                               \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, thread T*, spaces::Same<T>, memory_order,  \
                                             memory_order);                                                        \
  DECLARED_FETCH(space, atomic_exchange_explicit)                                                                  \
  DECLARED_FETCH(space, atomic_fetch_add_explicit)                                                                 \
  DECLARED_FETCH(space, atomic_fetch_sub_explicit)                                                                 \
  DECLARED_FETCH(space, atomic_fetch_max_explicit)                                                                 \
  DECLARED_FETCH(space, atomic_fetch_min_explicit)                                                                 \
  DECLARED_FETCH(space, atomic_fetch_and_explicit)                                                                 \
  DECLARED_FETCH(space, atomic_fetch_or_explicit)                                                                  \
  DECLARED_FETCH(space, atomic_fetch_xor_explicit)
DECLARED_ATOMIC(device)
DECLARED_ATOMIC(threadgroup)
#undef DECLARED_ATOMIC
#undef DECLARED_FETCH

}  // namespace metal
