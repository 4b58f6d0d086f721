// Declarations of barriers and simd operations; the emulator's headers, ../../../include, check the types of their
// arguments.
#pragma once
#include "vectors.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define DECLARED_OF_LANES(name) \
  template <class T>            \
  T name(T);
DECLARED_OF_LANES(simd_sum)
DECLARED_OF_LANES(simd_product)
DECLARED_OF_LANES(simd_max)
DECLARED_OF_LANES(simd_min)
DECLARED_OF_LANES(simd_and)
DECLARED_OF_LANES(simd_or)
DECLARED_OF_LANES(simd_xor)
DECLARED_OF_LANES(simd_prefix_inclusive_sum)
DECLARED_OF_LANES(simd_prefix_exclusive_sum)
DECLARED_OF_LANES(simd_prefix_inclusive_product)
DECLARED_OF_LANES(simd_prefix_exclusive_product)
DECLARED_OF_LANES(simd_broadcast_first)
#undef DECLARED_OF_LANES

#define DECLARED_SHUFFLE(name) \
  template <class T>           \
  T name(T, ushort);
DECLARED_SHUFFLE(simd_shuffle)
DECLARED_SHUFFLE(simd_broadcast)
DECLARED_SHUFFLE(simd_shuffle_xor)
DECLARED_SHUFFLE(simd_shuffle_up)
DECLARED_SHUFFLE(simd_shuffle_down)
DECLARED_SHUFFLE(simd_shuffle_rotate_up)
DECLARED_SHUFFLE(simd_shuffle_rotate_down)
#undef DECLARED_SHUFFLE
template <class T>
T simd_shuffle_and_fill_up(T, T, ushort);
template <class T>
T simd_shuffle_and_fill_down(T, T, ushort);

struct simd_vote {
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t = 0) {}
  explicit constexpr operator vote_t() const { return 0; }
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();

}  // namespace metal
