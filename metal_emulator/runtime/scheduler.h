// Schedules GPU threads: all threads of a threadgroup take turns on one CPU thread.
//
// A thread runs until it waits: for the lanes of its simdgroup, or for all of its threadgroup. Then another one runs,
// on a fiber (a stack) of its own. A thread that returns without ever waiting leaves its fiber to the next one, so a
// kernel that never waits costs a call per thread and no switch at all.
//
// Masks record which lanes wait. A wait that can never end, as another lane has returned or waits elsewhere, is
// detected as soon as both lanes have stopped. Knows nothing of memory.
#pragma once

#include <cstring>

#include "failure.h"
#include "fiber.h"

namespace emulator {

enum Order : int { FORWARD, REVERSED, RANDOM };

struct Wait {
  const char* operation;
  Where where;
  int flags;        // of a barrier
  unsigned thread;  // the first to arrive

  bool same(const char* other, Where there, int others) const {
    return where.line == there.line && where.column == there.column && flags == others && same(operation, other) &&
           same(where.file, there.file);
  }
  static bool same(const char* a, const char* b) {
    return a == b || !std::strcmp(a, b);  // equal names in two template instances may have two addresses
  }
};

struct Simdgroup {
  unsigned present;   // lanes that exist
  unsigned runnable;  // lanes that have not begun, or can go on running
  unsigned waiting;   // lanes that wait in the simd operation `wait`
  unsigned returned;  // lanes that have returned; all others wait for the threadgroup
  Wait wait;
  unsigned turn;
  // The values of the current simd operation and of the one before, whose result some lanes may not have read yet.
  Exchange exchange[2];
  unsigned passed[3];  // number of simdgroup barriers passed that order device memory [1] and threadgroup memory [2]

  unsigned at_barrier() const { return present & ~runnable & ~waiting & ~returned; }
};

class Scheduler {
 public:
  // Starts a launch. `main` is the function that fibers run, which has to call `live`.
  void begin_launch(void (*main)(), Entry entry, Order order, unsigned long seed) {
    entry_ = entry;
    order_ = order;
    random_ = seed * 0x9E3779B97F4A7C15ul + 0x1234567;
    switches = 0;
    std::memset(shape_, 0, sizeof shape_);
    if (!ready_) fibers_.reset(main);  // makes new fibers in the first launch, and after a failed one
    ready_ = false;
    failure = Failure();
  }

  void end_launch() { ready_ = failure.fault == NO_FAULT; }

  // Runs all threads of a threadgroup, until they have returned or one has failed.
  void run(const Context& threadgroup, unsigned number) {
    context_ = &threadgroup;
    group = number;
    count_ = threadgroup.size[0] * threadgroup.size[1] * threadgroup.size[2];
    begin_simdgroups();
    if (std::memcmp(shape_, threadgroup.size, sizeof shape_)) place_threads();
    returned_ = at_barrier_ = 0;
    std::memset(passed, 0, sizeof passed);
    current_ = nullptr;
    resume(pick(), main_);
    current_ = nullptr;
  }

  // Runs one thread after the other; every fiber executes this.
  void live() {
    for (;;) {
      entry_(*context_, current_->thread);
      finish();
    }
  }

  void threadgroup_barrier(int flags, Where where) {
    static const char NAME[] = "threadgroup_barrier";
    Simdgroup& mine = simdgroup();
    if (mine.waiting) fail_waiting(mine.wait, party(NAME, where, flags));
    if (at_barrier_ && !barrier_.same(NAME, where, flags)) fail_waiting(barrier_, party(NAME, where, flags));
    if (returned_) fail(party(NAME, where, flags), party(RETURNED, first_returned_));
    if (!at_barrier_) barrier_ = Wait{NAME, where, flags, index()};
    if (++at_barrier_ < count_) {
      mine.runnable &= ~bit();
      if (!mine.runnable) runnable_ &= ~(1u << index() / LANES);
      return yield();
    }
    at_barrier_ = 0;
    for (unsigned i = 0; i < simdgroups_; ++i) simdgroups[i].runnable = simdgroups[i].present;
    runnable_ = all(simdgroups_);
    for (int memory : {MEM_DEVICE, MEM_THREADGROUP}) passed[memory] += (flags & memory) != 0;
    if (order_ == RANDOM) yield();
  }

  void simdgroup_barrier(int flags, Where where) {
    if (!arrive("simdgroup_barrier", where, flags)) return;
    for (int memory : {MEM_DEVICE, MEM_THREADGROUP}) simdgroup().passed[memory] += (flags & memory) != 0;
    complete();
  }

  const Exchange* exchange(const void* value, unsigned size, Combine combine, const char* operation, Where where) {
    Simdgroup& mine = simdgroup();
    Exchange& lanes = mine.exchange[mine.turn & 1];
    std::memcpy(lanes.slot[index() % LANES], value, size);
    if (!arrive(operation, where, 0)) return &lanes;
    lanes.lanes = mine.present;
    if (combine) combine(lanes);
    complete();
    return &lanes;
  }

  // Ends the launch with a failure: never returns to the running thread.
  [[noreturn]] void fail(const Party& first, const Party& second, Fault fault = DIVERGENCE) {
    failure.fault = fault;
    failure.first = first;
    failure.second = second;
    abandon();
  }

  [[noreturn]] void abandon() {
    switch_to(current_->fiber->registers, main_);
    __builtin_unreachable();
  }

  Party party(Act act, unsigned thread) const { return Party{act, thread, group, 0, nullptr, nullptr, 0, 0, 0}; }
  Party party(const char* operation, Where where, int flags) const { return party(operation, where, flags, index()); }
  Party party(const char* operation, Where where, int flags, unsigned thread) const {
    return Party{WAITS, thread, group, 0, operation, where.file, where.line, where.column, flags};
  }

  bool running() const { return current_; }
  unsigned index() const { return current_->thread.index; }
  const char* stack() const { return current_->fiber->stack; }

  Simdgroup simdgroups[MAX_THREADS / LANES];
  unsigned group;      // index of the threadgroup
  unsigned passed[3];  // number of threadgroup barriers passed that order device memory [1] and threadgroup memory [2]
  unsigned long switches;
  Failure failure;

 private:
  struct Task {
    Thread thread;
    Fiber* fiber;  // null if the thread has not begun
  };

  static unsigned all(unsigned lanes) { return lanes == LANES ? ~0u : (1u << lanes) - 1; }
  unsigned bit() const { return 1u << index() % LANES; }
  Simdgroup& simdgroup() { return simdgroups[index() / LANES]; }

  void begin_simdgroups() {
    simdgroups_ = (count_ + LANES - 1) / LANES;
    runnable_ = all(simdgroups_);
    for (unsigned i = 0; i < simdgroups_; ++i) {
      Simdgroup& each = simdgroups[i];
      const unsigned lanes = count_ - i * LANES < LANES ? count_ - i * LANES : LANES;
      if (lanes < LANES) std::memset(each.exchange, 0xFF, sizeof each.exchange);
      each.present = each.runnable = all(lanes);
      each.waiting = each.returned = each.turn = 0;
      std::memset(each.passed, 0, sizeof each.passed);
    }
  }

  void place_threads() {
    std::memcpy(shape_, context_->size, sizeof shape_);
    for (unsigned i = 0; i < count_; ++i)
      tasks_[i] = Task{{i, {i % shape_[0], i / shape_[0] % shape_[1], i / (shape_[0] * shape_[1])}}, nullptr};
  }

  // ---- simd operations

  // Waits until all lanes of the simdgroup have arrived. Returns true to the last lane, which must complete the
  // operation, and false to the others, after that.
  bool arrive(const char* operation, Where where, int flags) {
    Simdgroup& mine = simdgroup();
    const bool waiting = mine.waiting;
    if (waiting && !mine.wait.same(operation, where, flags)) fail_waiting(mine.wait, party(operation, where, flags));
    if (mine.returned)
      fail(party(operation, where, flags), party(RETURNED, index() / LANES * LANES + lowest(mine.returned)));
    if (mine.at_barrier()) fail_waiting(barrier_, party(operation, where, flags));
    if (!waiting) mine.wait = Wait{operation, where, flags, index()};
    mine.waiting |= bit();
    mine.runnable &= ~bit();
    if (mine.waiting == mine.present) return true;
    if (!mine.runnable) runnable_ &= ~(1u << index() / LANES);
    yield();
    return false;
  }

  void complete() {
    Simdgroup& mine = simdgroup();
    mine.waiting = 0;
    mine.runnable = mine.present;
    runnable_ |= 1u << index() / LANES;
    ++mine.turn;
    if (order_ == RANDOM) yield();
  }

  // ---- turns

  void yield() {
    Task* me = current_;
    Task* next = pick();
    if (next != me) resume(next, me->fiber->registers);
  }

  void finish() {
    Simdgroup& mine = simdgroup();
    Fiber* fiber = current_->fiber;
    if (mine.waiting) fail_waiting(mine.wait, party(RETURNED, index()));
    if (at_barrier_) fail_waiting(barrier_, party(RETURNED, index()));
    if (!returned_++) first_returned_ = index();
    mine.returned |= bit();
    mine.runnable &= ~bit();
    if (!mine.runnable) runnable_ &= ~(1u << index() / LANES);
    current_->fiber = nullptr;
    Task* next = returned_ == count_ ? nullptr : pick();
    if (next && !next->fiber) {  // on the same fiber
      next->fiber = fiber;
      current_ = next;
      return;
    }
    fibers_.give(fiber);
    if (next) return resume(next, fiber->registers);
    switch_to(fiber->registers, main_);
  }

  // Switches to the thread `next`; returns when another thread switches back to `from`.
  void resume(Task* next, Registers& from) {
    if (!next->fiber) next->fiber = fibers_.take();
    current_ = next;
    ++switches;
    switch_to(from, next->fiber->registers);
  }

  // Returns the thread that runs next: one of the same simdgroup if possible, so that its simd operation is complete
  // soon.
  Task* pick() {
    assert(runnable_);  // some thread can run: deadlocks were detected before
    const unsigned here = current_ ? index() : order_ == REVERSED ? count_ - 1 : 0;
    unsigned which = here / LANES;
    if (order_ == RANDOM) which = any(runnable_);
    else if (!simdgroups[which].runnable) which = after(runnable_, which);
    const unsigned lanes = simdgroups[which].runnable;
    return &tasks_[which * LANES + (order_ == RANDOM ? any(lanes) : after(lanes, here % LANES))];
  }

  // Returns the bit that is set in `mask` and follows `bit` in the order of the launch; after the last one, the first.
  unsigned after(unsigned mask, unsigned bit) const {
    if (order_ == FORWARD) {
      const unsigned later = current_ ? mask & (~0u << bit << 1) : mask;
      return lowest(later ? later : mask);
    }
    const unsigned later = current_ ? mask & ((1u << bit) - 1) : mask;
    return 31 - unsigned(__builtin_clz(later ? later : mask));
  }

  unsigned any(unsigned mask) {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    for (unsigned skip = unsigned(random_ >> 11) % unsigned(__builtin_popcount(mask)); skip; --skip) mask &= mask - 1;
    return lowest(mask);
  }

  static unsigned lowest(unsigned mask) { return unsigned(__builtin_ctz(mask)); }

  // ---- failures

  [[noreturn]] void fail_waiting(const Wait& wait, const Party& other) {
    fail(other, party(wait.operation, wait.where, wait.flags, wait.thread));
  }

  Entry entry_;
  Order order_;
  unsigned long random_;
  const Context* context_;
  unsigned count_, simdgroups_;  // of the threadgroup
  unsigned runnable_;            // simdgroups with at least one runnable lane
  unsigned at_barrier_, returned_, first_returned_;
  Wait barrier_;
  Task* current_;
  Registers main_;  // where the launch began
  bool ready_;  // all fibers are free
  Fibers fibers_;
  unsigned shape_[3];  // threadgroup size for which `tasks_` has positions
  Task tasks_[MAX_THREADS];
};

}  // namespace emulator
