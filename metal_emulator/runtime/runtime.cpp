// The runtime of the emulator: the functions that kernels and the compiler's instrumentation call, and the launch.
//
// A checked build is compiled with -fsanitize=thread, which calls a function before every access; these functions are
// implemented here instead of by ThreadSanitizer. The runtime is a library of its own, whose stacks all kernels share.
// There is one launch at a time, and all state belongs to it.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <mutex>

#include "memory.h"

namespace emulator {

// As in library.py.
struct Launch {
  Entry entry;
  void* buffers[MAX_BUFFERS];
  std::uint64_t bytes[MAX_BUFFERS];
  std::uint8_t writable[MAX_BUFFERS];
  unsigned arguments;
  unsigned grid[3], group[3];  // threads
  int order, checked;
  std::uint64_t seed;
};

struct Report {
  std::uint64_t switches, threadgroup_bytes, accesses;
  Failure failure;
};

static std::mutex one_launch;
static Scheduler scheduler;
static ThreadgroupMemory threadgroup;
static Checker checker(scheduler, threadgroup);

static void live() { scheduler.live(); }

static Context begin(const Launch& launch) {
  Context context{};
  std::memcpy(context.buffers, launch.buffers, sizeof context.buffers);
  std::memcpy(context.grid, launch.grid, sizeof context.grid);
  std::memcpy(context.nominal, launch.group, sizeof context.nominal);
  for (int d = 0; d < 3; ++d) context.groups[d] = (launch.grid[d] + launch.group[d] - 1) / launch.group[d];
  return context;
}

static void place(Context& context, unsigned number) {
  const unsigned* groups = context.groups;
  const unsigned position[3] = {number % groups[0], number / groups[0] % groups[1], number / (groups[0] * groups[1])};
  for (int d = 0; d < 3; ++d) {
    const unsigned left = context.grid[d] - position[d] * context.nominal[d];
    context.position[d] = position[d];
    context.size[d] = left < context.nominal[d] ? left : context.nominal[d];
  }
}

// Returns the number of the threadgroup that runs as the i-th, in the order of the launch.
static unsigned turn(const Launch& launch, unsigned i, unsigned groups) {
  if (launch.order == FORWARD) return i;
  if (launch.order == REVERSED) return groups - 1 - i;
  // The step is a prime that does not divide `groups`, so that every threadgroup is run once.
  const std::uint64_t step = groups % 1000003 ? 1000003 : 999983;
  return unsigned((launch.seed % groups + i * step) % groups);
}

static void run(const Launch& launch) {
  Context context = begin(launch);
  const unsigned groups = context.groups[0] * context.groups[1] * context.groups[2];
  for (unsigned i = 0; i < groups && scheduler.failure.fault == NO_FAULT; ++i) {
    const unsigned number = turn(launch, i, groups);
    place(context, number);
    threadgroup.begin_threadgroup();
    if (launch.checked && threadgroup.bytes) checker.begin_threadgroup();
    scheduler.run(context, number);
  }
}

// While it lives, a signal that a kernel raises ends the launch with a failure, not the process: an invalid division of
// integers (a GPU has some result for it; processors that do not trap, such as ARM, do not detect it), an access to
// memory that the process does not have, an invalid instruction, an abort.
class Signals {
 public:
  Signals() {
    thread_ = pthread_self();
    struct sigaction ours {};
    ours.sa_sigaction = fail;
    // NODEFER, as the signal handler does not return; ONSTACK, as the kernel's stack may be at its end
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int i = 0; i < COUNT; ++i) sigaction(NUMBERS[i], &ours, &before_[i]);
  }
  ~Signals() {
    for (int i = 0; i < COUNT; ++i) sigaction(NUMBERS[i], &before_[i], nullptr);
  }

 private:
  static constexpr int COUNT = 6;
  static constexpr int NUMBERS[COUNT] = {SIGFPE, SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGABRT};

  static void fail(int number, siginfo_t* signal, void*) {
    const bool sent = signal->si_code <= 0;  // by a process or by abort(), not by an instruction
    if (!scheduler.running() || !pthread_equal(thread_, pthread_self()) || (sent && signal->si_pid != getpid()))
      return pass_on(number, sent);
    Party mine = scheduler.party(number == SIGFPE ? DIVIDES : CRASHES, scheduler.index());
    if (number == SIGFPE) mine.code = checker.code(signal->si_addr);
    scheduler.failure.memory = Memory{DEVICE, number, sent ? 0 : long(signal->si_addr), 0, 0};
    scheduler.fail(mine, mine, number == SIGFPE ? DIVISION : CRASH);
  }

  // Restores the signal handler of before. An instruction raises its signal again, a signal that was sent is sent again.
  static void pass_on(int number, bool sent) {
    for (int i = 0; i < COUNT; ++i)
      if (NUMBERS[i] == number) sigaction(number, &before_[i], nullptr);
    if (sent) raise(number);
  }

  static pthread_t thread_;
  static struct sigaction before_[COUNT];
};
constexpr int Signals::NUMBERS[];
pthread_t Signals::thread_;
struct sigaction Signals::before_[];

}  // namespace emulator

using namespace emulator;

EMULATOR_API void emulator_launch(const Launch* launch, Report* report) {
  const std::lock_guard<std::mutex> locked(one_launch);
  const Signals watched;
  threadgroup.begin_launch();
  scheduler.begin_launch(live, launch->entry, Order(launch->order), launch->seed);
  if (launch->checked)
    checker.begin_launch(reinterpret_cast<void*>(launch->entry), launch->buffers, launch->bytes, launch->writable,
                         launch->arguments);
  run(*launch);
  scheduler.end_launch();
  if (launch->checked) checker.end_launch();
  report->switches = scheduler.switches;
  report->threadgroup_bytes = std::uint64_t(threadgroup.bytes);
  report->accesses = launch->checked ? checker.accesses : 0;
  report->failure = scheduler.failure;
}

EMULATOR_API void emulator_threadgroup_barrier(int flags, Where where) { scheduler.threadgroup_barrier(flags, where); }
EMULATOR_API void emulator_simdgroup_barrier(int flags, Where where) { scheduler.simdgroup_barrier(flags, where); }
EMULATOR_API const Exchange* emulator_exchange(const void* value, unsigned size, Combine combine, const char* operation,
                                               Where where) {
  return scheduler.exchange(value, size, combine, operation, where);
}
EMULATOR_API unsigned emulator_lane() { return scheduler.index() % LANES; }

EMULATOR_API void emulator_no_lane(unsigned lane, unsigned lanes, const char* operation, Where where) {
  scheduler.failure.memory = Memory{THREADGROUP, 0, long(lane), long(lanes), 0};
  const Party mine = scheduler.party(operation, where, 0);
  scheduler.fail(mine, mine, NO_LANE);
}
EMULATOR_API void emulator_other_lane(unsigned other, const char* operation, Where where) {
  const unsigned simdgroup = scheduler.index() / LANES * LANES;
  scheduler.fail(scheduler.party(operation, where, 0), scheduler.party(WAITS, simdgroup + other), OTHER_LANE);
}

EMULATOR_API void* emulator_threadgroup_memory(unsigned key, unsigned long bytes) {
  void* found = threadgroup.of(key, long(bytes));
  if (found) return found;
  scheduler.failure.fault = TOO_MANY_BYTES;
  scheduler.failure.memory = Memory{THREADGROUP, int(key), threadgroup.bytes, long(bytes), 0};
  scheduler.abandon();
}

// ---- functions that checked builds call before each access to memory

static inline std::uintptr_t number(const volatile void* address) { return reinterpret_cast<std::uintptr_t>(address); }
#define CALLER __builtin_return_address(0)

EMULATOR_API void emulator_atomic(const volatile void* address, unsigned size, bool writes) {
  if (scheduler.running()) checker.check(number(address), size, writes, true, true, CALLER);
}

#define ACCESS(name, size, write, aligned)                                                              \
  EMULATOR_API void name(void* address) {                                                               \
    if (scheduler.running()) checker.check(number(address), size, write, false, aligned, CALLER);       \
  }
#define ACCESSES(size)                                          \
  ACCESS(__tsan_read##size, size, false, true)                  \
  ACCESS(__tsan_write##size, size, true, true)                  \
  ACCESS(__tsan_unaligned_read##size, size, false, false)       \
  ACCESS(__tsan_unaligned_write##size, size, true, false)       \
  ACCESS(__tsan_volatile_read##size, size, false, true)         \
  ACCESS(__tsan_volatile_write##size, size, true, true)         \
  ACCESS(__tsan_unaligned_volatile_read##size, size, false, false) \
  ACCESS(__tsan_unaligned_volatile_write##size, size, true, false)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

// Checks an access to a larger object, over its whole extent.
static void check_range(const void* address, std::size_t size, bool write, void* caller) {
  if (scheduler.running() && size) checker.check(number(address), unsigned(size), write, false, false, caller);
}
EMULATOR_API void __tsan_read_range(void* address, std::size_t size) { check_range(address, size, false, CALLER); }
EMULATOR_API void __tsan_write_range(void* address, std::size_t size) { check_range(address, size, true, CALLER); }
EMULATOR_API void* __tsan_memcpy(void* to, const void* from, std::size_t size) {
  check_range(from, size, false, CALLER);
  check_range(to, size, true, CALLER);
  return std::memcpy(to, from, size);
}
EMULATOR_API void* __tsan_memmove(void* to, const void* from, std::size_t size) {
  check_range(from, size, false, CALLER);
  check_range(to, size, true, CALLER);
  return std::memmove(to, from, size);
}
EMULATOR_API void* __tsan_memset(void* to, int value, std::size_t size) {
  check_range(to, size, true, CALLER);
  return std::memset(to, value, size);
}
EMULATOR_API void __tsan_init() {}
EMULATOR_API void __tsan_func_entry(void*) {}
EMULATOR_API void __tsan_func_exit() {}
