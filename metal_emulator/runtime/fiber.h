// Fibers: execution contexts, each with a stack of its own and the registers to resume with. Knows neither threads nor
// kernels.
//
// A switch saves the registers that a function must keep, and sets the stack pointer of the other fiber. On x86-64
// (System V ABI) and, with clang, on AArch64 (AAPCS64) this takes a few nanoseconds. On other processors, and with
// EMULATOR_UCONTEXT, the C library switches, which takes a system call.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <sys/mman.h>

#if !defined(__x86_64__) && !(defined(__aarch64__) && defined(__clang__)) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_UCONTEXT  // g++ has no naked functions on AArch64
#endif
#ifdef EMULATOR_UCONTEXT
#ifdef __APPLE__
#define _XOPEN_SOURCE 700  // without it macOS hides these functions
#define _DARWIN_C_SOURCE
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
#endif
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

#ifdef __aarch64__

constexpr int SAVED = 20;  // number of saved registers of 8 bytes: x19 to x30, d8 to d15

// Switches stacks. `from` is in x0, `to` in x1; ret jumps to x30, where the other fiber resumes.
__attribute__((naked, noinline)) inline void swap_stacks(void** /*from*/, void* /*to*/) {
  __asm__ volatile(
      "sub sp, sp, #160\n"
      "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
      "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n"
      "stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n"
      "mov sp, x1\n"
      "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
      "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n"
      "ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n ret\n");
}

inline void prepare(Registers& registers, char* /*stack*/, char* top, void (*main)()) {
  void** sp = reinterpret_cast<void**>(top) - SAVED;
  for (int i = 0; i < SAVED; ++i) sp[i] = nullptr;
  sp[11] = reinterpret_cast<void*>(main);  // x30, at byte 88: where ret jumps to; `main` never returns
  registers.stack_pointer = sp;
}

#else

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

#endif

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
