// The interface between kernels and the runtime. Kernels include it, so it is C++14 without the standard library.
//
// Kernels call what a GPU has and a CPU does not: waiting for other threads, exchanging values between lanes, and
// threadgroup memory. The runtime (../../runtime) implements it, and knows only the entry points of kernels.
#pragma once

#define EMULATOR_API extern "C" __attribute__((visibility("default")))
#define EMULATOR_INLINE inline __attribute__((always_inline))
// Attributes for functions that access the runtime's own memory in a checked build: their accesses are not checked, and
// kernels must not be inlined into them.
#if !defined(EMULATOR_CHECKED)
#define EMULATOR_UNCHECKED inline
#define EMULATOR_KERNEL
#elif defined(__clang__)
#define EMULATOR_UNCHECKED __attribute__((noinline, no_sanitize("thread")))
#define EMULATOR_KERNEL __attribute__((noinline))
#else
#define EMULATOR_UNCHECKED __attribute__((noinline, no_sanitize_thread))
#define EMULATOR_KERNEL __attribute__((noinline))
#endif
#if defined(__clang__)
#define EMULATOR_ENTRY EMULATOR_API __attribute__((no_sanitize("thread")))
#else
#define EMULATOR_ENTRY EMULATOR_API __attribute__((no_sanitize_thread))
#endif

namespace emulator {

constexpr unsigned LANES = 32;        // of a simdgroup
constexpr unsigned MAX_THREADS = 1024;  // of a threadgroup
constexpr unsigned MAX_BUFFERS = 31;
constexpr unsigned MAX_VALUE = 16;  // most bytes that a lane passes to other lanes

enum MemoryFlags { MEM_NONE = 0, MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

struct Thread {
  unsigned index;        // in its threadgroup
  unsigned position[3];  // in its threadgroup
};

// Describes the running threadgroup and the launch. Sizes are in threads, except for `groups`.
struct Context {
  void* buffers[MAX_BUFFERS];
  unsigned grid[3];
  unsigned groups[3];
  unsigned nominal[3];   // size of threadgroups, as the launch requests it
  unsigned size[3];      // size of this threadgroup: smaller at the edge of the grid
  unsigned position[3];  // of this threadgroup
};

typedef void (*Entry)(const Context&, const Thread&);

// The place in the source where a kernel waits for other threads. The translator writes it into each call as an
// argument; its default is the line of the outermost call. A return address is not enough, as compilers merge identical
// calls and duplicate others.
struct Where {
  const char* file;
  unsigned line, column;  // column 0: not known
  constexpr Where(const char* file_ = __builtin_FILE(), unsigned line_ = __builtin_LINE(), unsigned column_ = 0)
      : file(file_), line(line_), column(column_) {}
};

// The values that the lanes of a simdgroup pass in a simd operation, and the result that is computed from them.
struct Exchange {
  alignas(16) unsigned char slot[LANES][MAX_VALUE];  // all bits are set (a NaN) for a lane that does not exist
  alignas(16) unsigned char result[MAX_VALUE];
  unsigned lanes;  // that exist
};

// A function that computes `result` from the values of all lanes; called once, when all lanes have arrived. Null if the
// operation has no common result.
typedef void (*Combine)(Exchange&);

}  // namespace emulator

// Wait until all threads of the threadgroup (or of the simdgroup) have arrived.
EMULATOR_API void emulator_threadgroup_barrier(int flags, emulator::Where where);
EMULATOR_API void emulator_simdgroup_barrier(int flags, emulator::Where where);
EMULATOR_API const emulator::Exchange* emulator_exchange(
    const void* value, unsigned size, emulator::Combine combine, const char* operation, emulator::Where where);
EMULATOR_API unsigned emulator_lane();
// End the launch with a failure: a thread requests the value of a lane that does not exist, or broadcasts from another
// lane than the lane `other` does.
EMULATOR_API void emulator_no_lane(unsigned lane, unsigned lanes, const char* operation, emulator::Where where);
EMULATOR_API void emulator_other_lane(unsigned other, const char* operation, emulator::Where where);
// Returns the memory of the kernel's threadgroup variable number `key`; it is filled with NaNs when a threadgroup
// begins.
EMULATOR_API void* emulator_threadgroup_memory(unsigned key, unsigned long bytes);
// Tells the checker that the calling line makes an atomic access; only in checked builds.
EMULATOR_API void emulator_atomic(const volatile void* address, unsigned size, bool writes);
