// What a kernel and the runtime tell each other. Kernels include it, so it needs no standard library, and C++14.
//
// A kernel asks for what a GPU has and a CPU has not: other threads to wait for, lanes to exchange values with, memory
// of a threadgroup. The runtime (../../runtime) knows how that is done, and nothing of kernels but their entry points.
#pragma once

#define EMULATOR_API extern "C" __attribute__((visibility("default")))
#define EMULATOR_INLINE inline __attribute__((always_inline))
// Of functions that touch the runtime's own memory, in a checked build; a kernel must not become a part of them.
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
constexpr unsigned MAX_VALUE = 16;    // bytes that one lane gives to the others

enum MemoryFlags { MEM_NONE = 0, MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

struct Thread {
  unsigned index;        // in its threadgroup
  unsigned position[3];  // in its threadgroup
};

// Of the threadgroup that runs, and of the whole launch. Everything is counted in threads, `groups` apart.
struct Context {
  void* buffers[MAX_BUFFERS];
  unsigned grid[3];
  unsigned groups[3];
  unsigned nominal[3];   // of a threadgroup, as the launch has it
  unsigned size[3];      // of this threadgroup: smaller at the edge of the grid
  unsigned position[3];  // of this threadgroup
};

typedef void (*Entry)(const Context&, const Thread&);

// Where a kernel waits. The translator writes it into calls; as a default argument it is the line of the outermost one.
// A return address would not do: compilers merge calls that look alike, and copy one to several places.
struct Where {
  const char* file;
  unsigned line, column;  // column 0: not known
  constexpr Where(const char* file_ = __builtin_FILE(), unsigned line_ = __builtin_LINE(), unsigned column_ = 0)
      : file(file_), line(line_), column(column_) {}
};

// Values that the lanes of a simdgroup gave, and what was made of them.
struct Exchange {
  alignas(16) unsigned char slot[LANES][MAX_VALUE];  // of a lane that does not exist: all bits set, a NaN
  alignas(16) unsigned char result[MAX_VALUE];
  unsigned lanes;  // that exist
};

// Makes `result` of the slots; called once, when all lanes have arrived. Null: nothing is to be made.
typedef void (*Combine)(Exchange&);

}  // namespace emulator

// Each waits until all threads of the threadgroup or simdgroup have arrived.
EMULATOR_API void emulator_threadgroup_barrier(int flags, emulator::Where where);
EMULATOR_API void emulator_simdgroup_barrier(int flags, emulator::Where where);
EMULATOR_API const emulator::Exchange* emulator_exchange(
    const void* value, unsigned size, emulator::Combine combine, const char* operation, emulator::Where where);
EMULATOR_API unsigned emulator_lane();
// The running thread wants the value of a lane that does not exist, or another lane's than `other` does: the launch ends.
EMULATOR_API void emulator_no_lane(unsigned lane, unsigned lanes, const char* operation, emulator::Where where);
EMULATOR_API void emulator_other_lane(unsigned other, const char* operation, emulator::Where where);
// The memory of a threadgroup's variable number `key`; filled with NaNs when its threadgroup begins.
EMULATOR_API void* emulator_threadgroup_memory(unsigned key, unsigned long bytes);
// Tells that the calling line is about to access memory atomically; checked builds alone do.
EMULATOR_API void emulator_atomic(const volatile void* address, unsigned size, bool writes);
