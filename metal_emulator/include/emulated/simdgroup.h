// Barriers and simd operations: every lane passes a value, waits for the others, and reads the result.
#pragma once
#include "integers.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
EMULATOR_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

EMULATOR_INLINE void threadgroup_barrier(mem_flags flags, emulator::Where where = emulator::Where()) {
  emulator_threadgroup_barrier(int(flags), where);
}
EMULATOR_INLINE void simdgroup_barrier(mem_flags flags, emulator::Where where = emulator::Where()) {
  emulator_simdgroup_barrier(int(flags), where);
}

namespace emulated {

using emulator::Combine;
using emulator::Exchange;
using emulator::LANES;
using emulator::Where;

template <class T>
struct Element {
  typedef T type;
};
template <class T, int N>
struct Element<vec<T, N>> {
  typedef T type;
};

// Returns the value that one lane passed in a simd operation.
template <class T>
EMULATOR_INLINE T at(const Exchange& lanes, uint lane) {
  T value;
  __builtin_memcpy(&value, lanes.slot[lane % LANES], sizeof value);
  return value;
}

template <class T>
EMULATOR_INLINE const Exchange& exchange(T value, Combine combine, const char* operation, Where where) {
  typedef typename Element<T>::type E;
  static_assert(!is_same<E, bfloat>::value, "simd operations take no bfloat: convert it to float");
  static_assert(sizeof(E) <= 4 && !is_same<E, bool>::value, "simd operations take numbers of up to 32 bits");
  static_assert(sizeof(T) <= emulator::MAX_VALUE, "simd operations take scalars and vectors");
  return *emulator_exchange(&value, sizeof value, combine, operation, where);
}

// Reduces the values of all existing lanes to one, in the order of lanes; called once per operation.
template <class T, class Op>
EMULATOR_UNCHECKED void combine(Exchange& lanes) {
  T sum = at<T>(lanes, uint(__builtin_ctz(lanes.lanes)));
  for (uint lane = uint(__builtin_ctz(lanes.lanes)) + 1; lane < LANES; ++lane)
    if (lanes.lanes >> lane & 1) sum = Op::of(sum, at<T>(lanes, lane));
  __builtin_memcpy(lanes.result, &sum, sizeof sum);
}
template <class Op, class T>
EMULATOR_UNCHECKED T reduce(T value, const char* operation, Where where) {
  const Exchange& lanes = exchange(value, &combine<T, Op>, operation, where);
  T result;
  __builtin_memcpy(&result, lanes.result, sizeof result);
  return result;
}

// Reduces the values of the lanes before this one (with `inclusive`, also this lane's own value), beginning with
// `none`, the identity of the operation.
template <class Op, class T>
EMULATOR_UNCHECKED T scan(T value, T none, bool inclusive, const char* operation, Where where) {
  const Exchange& lanes = exchange(value, nullptr, operation, where);
  T sum = none;
  for (uint lane = 0; lane < emulator_lane() + inclusive; ++lane) sum = Op::of(sum, at<T>(lanes, lane));
  return sum;
}

// Returns the value of another lane if `wanted`, otherwise `fallback`. The lane must exist; checked builds end the
// launch if it does not.
template <class T>
EMULATOR_UNCHECKED T shuffle(T value, int lane, bool wanted, T fallback, const char* operation, Where where) {
  const Exchange& lanes = exchange(value, nullptr, operation, where);
  if (!wanted) return fallback;
#ifdef EMULATOR_CHECKED
  if (lane < 0 || lane >= int(LANES) || !(lanes.lanes >> lane & 1))
    emulator_no_lane(uint(lane), uint(__builtin_popcount(lanes.lanes)), operation, where);
#endif
  return at<T>(lanes, uint(lane));
}
// In checked builds: ends the launch unless all lanes broadcast from the same lane.
EMULATOR_UNCHECKED void check_broadcast(uint lane, const char* operation, Where where) {
#ifdef EMULATOR_CHECKED
  const Exchange& lanes = exchange(lane, nullptr, operation, where);
  for (uint other = 0; other < LANES; ++other)
    if (lanes.lanes >> other & 1 && at<uint>(lanes, other) != lane) emulator_other_lane(other, operation, where);
#endif
}
EMULATOR_INLINE int lane() { return int(emulator_lane()); }

#define EMULATED_OP(name, value) \
  struct name {                  \
    template <class T>           \
    static T of(T a, T b) {      \
      return T(value);           \
    }                            \
  };
EMULATED_OP(Sum, a + b)
EMULATED_OP(Product, a* b)
EMULATED_OP(Max, max(a, b))
EMULATED_OP(Min, min(a, b))
EMULATED_OP(And, a& b)
EMULATED_OP(Or, a | b)
EMULATED_OP(Xor, a ^ b)
#undef EMULATED_OP

}  // namespace emulated

#define EMULATED_REDUCTION(name, Op)                              \
  template <class T>                                              \
  EMULATOR_INLINE T name(T value, emulator::Where where = emulator::Where()) { \
    return emulated::reduce<emulated::Op>(value, #name, where);   \
  }
EMULATED_REDUCTION(simd_sum, Sum)
EMULATED_REDUCTION(simd_product, Product)
EMULATED_REDUCTION(simd_max, Max)
EMULATED_REDUCTION(simd_min, Min)
EMULATED_REDUCTION(simd_and, And)
EMULATED_REDUCTION(simd_or, Or)
EMULATED_REDUCTION(simd_xor, Xor)
#undef EMULATED_REDUCTION

#define EMULATED_SCAN(name, Op, none, inclusive)                                          \
  template <class T>                                                                      \
  EMULATOR_INLINE T name(T value, emulator::Where where = emulator::Where()) {            \
    return emulated::scan<emulated::Op>(value, T(none), inclusive, #name, where);         \
  }
EMULATED_SCAN(simd_prefix_inclusive_sum, Sum, 0, true)
EMULATED_SCAN(simd_prefix_exclusive_sum, Sum, 0, false)
EMULATED_SCAN(simd_prefix_inclusive_product, Product, 1, true)
EMULATED_SCAN(simd_prefix_exclusive_product, Product, 1, false)
#undef EMULATED_SCAN

// Shuffles. In simd_shuffle_up and _down, a lane whose source is outside the simdgroup keeps its own value; in the
// _fill_ versions it takes a lane of `fill`.
#define EMULATED_SHUFFLE(name, argument, from, inside)                                                     \
  template <class T>                                                                                       \
  EMULATOR_INLINE T name(T value, ushort argument, emulator::Where where = emulator::Where()) {            \
    const int lane = emulated::lane(), wanted = from;                                                      \
    (void)lane;                                                                                            \
    return emulated::shuffle(value, wanted, inside, value, #name, where);                                  \
  }
EMULATED_SHUFFLE(simd_shuffle, other, other, true)
EMULATED_SHUFFLE(simd_shuffle_xor, mask, lane ^ mask, true)
EMULATED_SHUFFLE(simd_shuffle_up, delta, lane - delta, wanted >= 0)
EMULATED_SHUFFLE(simd_shuffle_down, delta, lane + delta, wanted < 32)
EMULATED_SHUFFLE(simd_shuffle_rotate_up, delta, (lane - delta) & 31, true)
EMULATED_SHUFFLE(simd_shuffle_rotate_down, delta, (lane + delta) & 31, true)
#undef EMULATED_SHUFFLE

#define EMULATED_FILL(name, from, inside)                                                                          \
  template <class T>                                                                                               \
  EMULATOR_INLINE T name(T value, T fill, ushort delta, emulator::Where where = emulator::Where()) {               \
    const int wanted = from;                                                                                       \
    const T filled = emulated::shuffle(fill, wanted & 31, !(inside), fill, #name " (fill)", where);                \
    return emulated::shuffle(value, wanted, inside, filled, #name, where);                                         \
  }
EMULATED_FILL(simd_shuffle_and_fill_up, emulated::lane() - delta, wanted >= 0)
EMULATED_FILL(simd_shuffle_and_fill_down, emulated::lane() + delta, wanted < 32)
#undef EMULATED_FILL

template <class T>
EMULATOR_INLINE T simd_broadcast(T value, ushort lane, emulator::Where where = emulator::Where()) {
  emulated::check_broadcast(lane, "simd_broadcast", where);
  return emulated::shuffle(value, lane, true, value, "simd_broadcast", where);
}
template <class T>
EMULATOR_INLINE T simd_broadcast_first(T value, emulator::Where where = emulator::Where()) {
  return emulated::shuffle(value, 0, true, value, "simd_broadcast_first", where);
}

// A set of lanes, one bit per lane.
struct simd_vote {
  typedef ulong vote_t;
  vote_t bits;
  explicit constexpr simd_vote(vote_t lanes = 0) : bits(lanes) {}
  explicit constexpr operator vote_t() const { return bits; }
  bool all() const { return bits == 0xFFFFFFFFul; }
  bool any() const { return bits != 0; }
};
EMULATOR_INLINE simd_vote simd_ballot(bool vote, emulator::Where where = emulator::Where()) {
  return simd_vote(emulated::reduce<emulated::Or>(uint(vote) << emulated::lane(), "simd_ballot", where));
}
EMULATOR_INLINE simd_vote simd_active_threads_mask(emulator::Where where = emulator::Where()) {
  return simd_vote(emulated::reduce<emulated::Or>(1u << emulated::lane(), "simd_active_threads_mask", where));
}
EMULATOR_INLINE bool simd_all(bool vote, emulator::Where where = emulator::Where()) {
  return emulated::reduce<emulated::And>(uint(vote), "simd_all", where);
}
EMULATOR_INLINE bool simd_any(bool vote, emulator::Where where = emulator::Where()) {
  return emulated::reduce<emulated::Or>(uint(vote), "simd_any", where);
}
EMULATOR_INLINE bool simd_is_first() { return emulated::lane() == 0; }

}  // namespace metal
