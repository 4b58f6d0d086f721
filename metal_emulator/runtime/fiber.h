// Fibers: execution contexts, each with a stack of its own and the registers to resume with. Knows neither threads nor
// kernels.
//
// On x86-64 a switch saves the registers that a function must keep (System V ABI) and sets the other stack pointer,
// which takes some nanoseconds. On other processors, and with EMULATOR_UCONTEXT, the C library switches, with a system
// call.
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
  void* stack_pointer;  // where on the stack the other registers are saved
};

// Switches stacks. `from` is in rdi, `to` in rsi; ret pops the address at which the other fiber resumes.
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
  *--sp = nullptr;  // stands for a return address: `main` never returns
  *--sp = reinterpret_cast<void*>(main);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  registers.stack_pointer = sp;
}

inline void switch_to(Registers& from, Registers& to) { swap_stacks(&from.stack_pointer, to.stack_pointer); }

#endif

struct Fiber {
  Registers registers;
  char* stack;
  bool begun;   // it is within `main`
  Fiber* free;  // the next fiber in the list of free ones
};

// A pool of fibers that all launches use. Stacks are reserved together, and take memory only when they are used.
class Fibers {
 public:
  // Bytes of a stack, and of the gap below it, which only a stack overflow touches.
  static constexpr std::size_t STACK = 128 << 10, GAP = 16 << 10;
  static constexpr unsigned COUNT = 1024;

  // Makes all fibers free, also those whose functions have not returned.
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
    madvise(found, COUNT * (STACK + GAP), MADV_NOHUGEPAGE);  // no huge pages, as a stack needs only a page or two
#endif
    for (unsigned i = 0; i < COUNT; ++i) fibers_[i].stack = memory_ + i * (STACK + GAP) + GAP;
  }

  // Returns the top of a fiber's stack: at different offsets in a page, as otherwise all stacks would compete for a few
  // cache lines.
  char* top(const Fiber* fiber) const {
    return fiber->stack + STACK - (fiber - fibers_) * 448 % 16384;
  }

  char* memory_;
  Fiber* free_;
  void (*main_)();
  Fiber fibers_[COUNT];
};

}  // namespace emulator
