// A fiber: a stack of its own, and the registers it will go on with. Knows neither threads nor kernels.
//
// On x86-64 a switch saves the registers that a function must keep (System V ABI) and takes another stack pointer: some
// nanoseconds. Every other processor, and EMULATOR_UCONTEXT, has the C library do it, which asks the kernel as well.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <sys/mman.h>

#if !defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_UCONTEXT
#endif
#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

#ifdef EMULATOR_UCONTEXT

struct Registers {
  ucontext_t context;
};

inline void prepare(Registers& registers, char* stack, char* top, void (*main)()) {
  getcontext(&registers.context);
  registers.context.uc_stack.ss_sp = stack;
  registers.context.uc_stack.ss_size = std::size_t(top - stack);
  registers.context.uc_link = nullptr;
  makecontext(&registers.context, main, 0);
}

inline void switch_to(Registers& from, Registers& to) { swapcontext(&from.context, &to.context); }

#else

struct Registers {
  void* stack_pointer;  // the registers to be kept lie there
};

// from -> rdi, to -> rsi; what is popped last, by ret, is where the fiber goes on.
__attribute__((naked, noinline)) inline void swap_stacks(void** /*from*/, void* /*to*/) {
  __asm__ volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n"
      "movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
      "ret\n");
}

inline void prepare(Registers& registers, char* /*stack*/, char* top, void (*main)()) {
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;  // main's return address: it never returns
  *--sp = reinterpret_cast<void*>(main);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  registers.stack_pointer = sp;
}

inline void switch_to(Registers& from, Registers& to) { swap_stacks(&from.stack_pointer, to.stack_pointer); }

#endif

struct Fiber {
  Registers registers;
  char* stack;
  bool begun;   // it stands somewhere in `main`
  Fiber* free;  // the next one of a list
};

// Fibers for one launch after the other. Stacks are reserved at once and take memory when they are used.
class Fibers {
 public:
  static constexpr std::size_t STACK = 128 << 10, GAP = 16 << 10;  // bytes; whoever touches the gap has no stack left
  static constexpr unsigned COUNT = 1024;

  // All are free again, also those that stand in the middle of something.
  void reset(void (*main)()) {
    if (!memory_) reserve();
    main_ = main;
    free_ = nullptr;
    for (unsigned i = COUNT; i-- > 0;) {
      fibers_[i].begun = false;
      give(&fibers_[i]);
    }
  }

  Fiber* take() {
    Fiber* fiber = free_;
    assert(fiber);
    free_ = fiber->free;
    if (!fiber->begun) {
      prepare(fiber->registers, fiber->stack, top(fiber), main_);
      fiber->begun = true;
    }
    return fiber;
  }

  void give(Fiber* fiber) {
    fiber->free = free_;
    free_ = fiber;
  }

 private:
  void reserve() {
    void* found = mmap(nullptr, COUNT * (STACK + GAP), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert(found != MAP_FAILED);
    memory_ = static_cast<char*>(found);
#ifdef MADV_NOHUGEPAGE
    madvise(found, COUNT * (STACK + GAP), MADV_NOHUGEPAGE);  // a stack needs a page or two
#endif
    for (unsigned i = 0; i < COUNT; ++i) fibers_[i].stack = memory_ + i * (STACK + GAP) + GAP;
  }

  // Not all at the same place of a page: they would share a few lines of the cache.
  char* top(const Fiber* fiber) const {
    return fiber->stack + STACK - (fiber - fibers_) * 448 % 16384;
  }

  char* memory_;
  Fiber* free_;
  void (*main_)();
  Fiber fibers_[COUNT];
};

}  // namespace emulator
