// The memory that a launch may access: its arguments, threadgroup memory, the stack of the thread, and constants.
//
// Checked builds check every access here. Arguments may overlap: an access is valid if one of them allows it. Races are
// detected only in arguments that may be written.
#pragma once

#include <dlfcn.h>

#include "race.h"
#include "scheduler.h"

namespace emulator {

constexpr long THREADGROUP_BYTES = 32 << 10;
constexpr unsigned MAX_VARIABLES = 64;  // most threadgroup variables of a kernel; as in ../translation.py
constexpr long MARGIN = 64;             // bytes between two threadgroup variables, which nothing may access

struct Argument {
  std::uintptr_t begin, end;
  bool writable;

  bool has(std::uintptr_t address, unsigned size = 1) const { return begin <= address && address + size <= end; }
};

// Memory for threadgroup variables. A variable gets its place when it is first declared in a launch, and keeps it until
// the launch ends.
class ThreadgroupMemory {
 public:
  void begin_launch() {
    std::memset(variables_, 0, sizeof variables_);
    used_ = MARGIN;
    bytes = 0;
  }

  void begin_threadgroup() {
    if (bytes) std::memset(memory_, 0xFF, std::size_t(used_));
  }

  // Returns the memory of the variable with number `key`; null if the variables do not fit into threadgroup memory.
  void* of(unsigned key, long size) {
    assert(key < MAX_VARIABLES);
    Variable& found = variables_[key];
    if (!found.size) {
      bytes += (size + 15) & ~15l;
      if (bytes > THREADGROUP_BYTES) return nullptr;
      found = Variable{used_, size};
      std::memset(memory_ + used_, 0xFF, std::size_t(size));
      used_ += (size + 2 * MARGIN - 1) / MARGIN * MARGIN;
    }
    return memory_ + found.offset;
  }

  bool has(std::uintptr_t address) const { return address - base() < sizeof memory_; }
  long offset(std::uintptr_t address) const { return long(address - base()); }

  // Returns the threadgroup variable that contains `size` bytes at an address, or else the nearest one: its number, its
  // length, and the address's offset from its beginning. `inside`: whether it contains them.
  Memory find(std::uintptr_t address, unsigned size, bool& inside) const {
    Memory nearest{THREADGROUP, -1, 0, 0, size};
    long least = 1l << 62;
    inside = false;
    for (unsigned key = 0; key < MAX_VARIABLES; ++key) {
      const Variable& each = variables_[key];
      if (!each.size) continue;
      const long at = offset(address) - each.offset;
      const long outside = at < 0 ? -at : at + long(size) > each.size ? at + long(size) - each.size : 0;
      if (outside >= least) continue;
      least = outside;
      nearest.index = int(key), nearest.offset = at, nearest.bytes = each.size;
      inside = outside == 0;
    }
    return nearest;
  }

  long bytes;

 private:
  struct Variable {
    long offset, size;
  };
  std::uintptr_t base() const { return reinterpret_cast<std::uintptr_t>(memory_); }

  Variable variables_[MAX_VARIABLES];
  long used_;
  alignas(64) char memory_[THREADGROUP_BYTES + (MAX_VARIABLES + 1) * 2 * MARGIN];
};

class Checker {
 public:
  Checker(Scheduler& scheduler, ThreadgroupMemory& threadgroup) : scheduler_(scheduler), threadgroup_(threadgroup) {}

  void begin_launch(void* kernel, void* const* buffers, const std::uint64_t* bytes, const std::uint8_t* writable,
                    unsigned count) {
    accesses = 0;
    image_ = image_of(kernel);
    constant_page_ = 0;
    arguments_ = count;
    for (unsigned i = 0; i < count; ++i) {
      const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(buffers[i]);
      argument_[i] = Argument{begin, begin + bytes[i], writable[i] != 0};
    }
    find_written();
    threadgroup_shadow_.reserve(sizeof(ThreadgroupMemory));
  }

  void begin_threadgroup() {
    threadgroup_shadow_.release();
    threadgroup_shadow_.reserve(sizeof(ThreadgroupMemory));
  }

  void end_launch() {
    for (unsigned i = 0; i < pieces_; ++i) piece_[i].shadow.release();
    threadgroup_shadow_.release();
  }

  // Checks an access to memory by the running thread. `aligned`: the address must be a multiple of the size.
  void check(std::uintptr_t address, unsigned size, bool write, bool atomic, bool aligned, void* caller) {
    ++accesses;
    const std::uintptr_t stack = reinterpret_cast<std::uintptr_t>(scheduler_.stack());
    if (address - stack < Fibers::STACK) return;
    code_ = unsigned(reinterpret_cast<std::uintptr_t>(caller) - image_);
    if (aligned && address % size) fail(MISALIGNED, nearest(address, size), write, atomic);
    if (threadgroup_.has(address)) return check_threadgroup(address, size, write, atomic);
    if (Piece* piece = find_piece(address, size)) {
      if (!allowed(address, size, write)) fail(WRITE_TO_CONST, nearest(address, size), write, atomic);
      note(piece->shadow, address - piece->begin, size, write, atomic, MEM_DEVICE, nearest(address, size));
    } else if (!allowed(address, size, false)) {
      if (write || !constant(address)) fail(OUT_OF_BOUNDS, nearest(address, size), write, atomic);
    } else if (write) {
      fail(WRITE_TO_CONST, nearest(address, size), write, atomic);
    }
  }

  // Returns the offset in the kernels' library of the instruction after an address; 0 outside of a checked launch.
  unsigned code(void* instruction) const {
    const std::uintptr_t found = image_of(instruction);
    return found && found == image_ ? unsigned(reinterpret_cast<std::uintptr_t>(instruction) - image_) + 1 : 0;
  }

  unsigned long accesses;

 private:
  // A range of addresses in which races are detected: that of an argument that may be written, joined with those that
  // overlap it.
  struct Piece {
    std::uintptr_t begin, end;
    Shadow shadow;
  };

  void find_written() {
    pieces_ = 0;
    for (unsigned i = 0; i < arguments_; ++i)
      if (argument_[i].writable && argument_[i].begin < argument_[i].end)
        piece_[pieces_++] = Piece{argument_[i].begin, argument_[i].end, Shadow()};
    for (unsigned i = 0; i < pieces_; ++i)  // join ranges that overlap, and start again with the joined one
      for (unsigned j = i + 1; j < pieces_; ++j)
        if (piece_[i].begin < piece_[j].end && piece_[j].begin < piece_[i].end) {
          piece_[i].begin = piece_[i].begin < piece_[j].begin ? piece_[i].begin : piece_[j].begin;
          piece_[i].end = piece_[i].end > piece_[j].end ? piece_[i].end : piece_[j].end;
          piece_[j] = piece_[--pieces_];
          j = i;
        }
    for (unsigned i = 0; i < pieces_; ++i) piece_[i].shadow.reserve(piece_[i].end - piece_[i].begin);
  }

  Piece* find_piece(std::uintptr_t address, unsigned size) {
    for (unsigned i = 0; i < pieces_; ++i)
      if (piece_[i].begin <= address && address + size <= piece_[i].end) return &piece_[i];
    return nullptr;
  }

  bool allowed(std::uintptr_t address, unsigned size, bool write) const {
    for (unsigned i = 0; i < arguments_; ++i)
      if (argument_[i].has(address, size) && (argument_[i].writable || !write)) return true;
    return false;
  }

  void check_threadgroup(std::uintptr_t address, unsigned size, bool write, bool atomic) {
    bool inside;
    const Memory memory = threadgroup_.find(address, size, inside);
    if (!inside) fail(OUT_OF_BOUNDS, memory, write, atomic);
    note(threadgroup_shadow_, std::size_t(threadgroup_.offset(address)), size, write, atomic, MEM_THREADGROUP, memory);
  }

  void note(Shadow& shadow, std::size_t offset, unsigned size, bool write, bool atomic, MemoryFlags kind,
            const Memory& memory) {
    const unsigned thread = scheduler_.index();
    const Access now(atomic, scheduler_.group, thread, scheduler_.passed[kind],
                     scheduler_.simdgroups[thread / LANES].passed[kind]);
    if (shadow && shadow.race(offset, size, write, now, code_, scheduler_.failure.second))
      fail(RACE, memory, write, atomic);
  }

  // Returns the argument whose memory contains an address, preferably one that may be written; if there is none, the
  // nearest within 1 MiB.
  Memory nearest(std::uintptr_t address, unsigned size) const {
    Memory found{DEVICE, -1, 0, 0, size};
    long least = 2l << 20;  // 1 MiB, doubled as the distances below are
    for (unsigned i = 0; i < arguments_; ++i) {
      const Argument& each = argument_[i];
      const long before = long(each.begin - address), after = long(address + size - each.end);
      const long outside = (before > 0 ? before : after > 0 ? after : 0) * 2 + !each.writable;
      if (outside >= least) continue;
      least = outside;
      found.index = int(i), found.offset = long(address - each.begin), found.bytes = long(each.end - each.begin);
    }
    return found;
  }

  [[noreturn]] void fail(Fault fault, const Memory& memory, bool write, bool atomic) {
    const Act act = atomic ? (write ? WRITES_ATOMICALLY : READS_ATOMICALLY) : (write ? WRITES : READS);
    scheduler_.failure.fault = fault;
    scheduler_.failure.first = scheduler_.party(act, scheduler_.index());
    scheduler_.failure.first.code = code_;
    scheduler_.failure.memory = memory;
    scheduler_.abandon();
  }

  // Returns whether an address is in the kernels' library, which contains the program's constants.
  bool constant(std::uintptr_t address) {
    const std::uintptr_t page = (address >> 12) + 1;
    if (page == constant_page_) return true;
    if (image_of(reinterpret_cast<void*>(address)) != image_) return false;
    constant_page_ = page;
    return true;
  }

  // Returns the address at which the library that contains an address begins; 0 if no library does.
  static std::uintptr_t image_of(void* address) {
    Dl_info found;
    return dladdr(address, &found) ? reinterpret_cast<std::uintptr_t>(found.dli_fbase) : 0;
  }

  Scheduler& scheduler_;
  ThreadgroupMemory& threadgroup_;
  Argument argument_[MAX_BUFFERS];
  Piece piece_[MAX_BUFFERS];
  unsigned arguments_, pieces_;
  Shadow threadgroup_shadow_;
  std::uintptr_t image_;          // address where the kernels' library begins
  std::uintptr_t constant_page_;  // number of the latest page found in the library, plus one
  unsigned code_;                 // place in the library of the access being checked
};

}  // namespace emulator
