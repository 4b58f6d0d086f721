// Detects data races on a piece of memory: keeps for every byte its last writer and the readers since then.
//
// Two accesses to one byte, one of them a write, are a race unless something orders them: one thread makes both, or
// their threadgroup (or simdgroup) passed a barrier for this kind of memory in between, which is known from the number
// of barriers passed before each. Nothing orders two threadgroups of a launch. Two atomic accesses are never a race.
// Two readers are kept, of different simdgroups if possible, so a race with a third reader may be missed.
#pragma once

#include <cstdint>
#include <sys/mman.h>

#include "failure.h"

namespace emulator {

// An access to memory, packed into 64 bits; 0 stands for no access.
class Access {
 public:
  Access() = default;
  Access(bool atomic, unsigned group, unsigned thread, unsigned barriers, unsigned simd_barriers)
      : bits_(1ul << 63 | std::uint64_t(atomic) << 62 | std::uint64_t(group & 0xFFFFFF) << 38 |
              std::uint64_t(thread) << 28 | std::uint64_t(barriers & 0x3FFF) << 14 | (simd_barriers & 0x3FFF)) {}

  explicit operator bool() const { return bits_; }
  bool atomic() const { return bits_ >> 62 & 1; }
  unsigned group() const { return bits_ >> 38 & 0xFFFFFF; }
  unsigned thread() const { return bits_ >> 28 & 0x3FF; }
  bool same_simdgroup(Access o) const { return group() == o.group() && thread() / LANES == o.thread() / LANES; }

  bool before(Access now) const {
    if (group() != now.group()) return false;
    return thread() == now.thread() || barriers() != now.barriers() ||
           (same_simdgroup(now) && simd_barriers() != now.simd_barriers());
  }
  // Returns whether this access is not atomic and otherwise equals `now`: then everything that races with `now` races
  // with it, too.
  bool hides(Access now) const { return bits_ == (now.bits_ & ~(1ul << 62)); }
  bool races(Access now) const { return bits_ && !(atomic() && now.atomic()) && !before(now); }

 private:
  unsigned barriers() const { return bits_ >> 14 & 0x3FFF; }
  unsigned simd_barriers() const { return bits_ & 0x3FFF; }
  std::uint64_t bits_;
};

class Shadow {
 public:
  // Reserves what is recorded of `bytes` bytes; pages that are not touched take no memory.
  void reserve(std::size_t bytes) {
    bytes_ = bytes;
    void* found = mmap(nullptr, bytes * sizeof(Cell), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cells_ = found == MAP_FAILED ? nullptr : static_cast<Cell*>(found);
  }

  void release() {
    if (cells_) munmap(cells_, bytes_ * sizeof(Cell));
    cells_ = nullptr;
  }

  explicit operator bool() const { return cells_; }

  // Records an access to bytes [offset, offset + size); returns whether it races with an earlier one, which is written
  // to `other`.
  bool race(std::size_t offset, unsigned size, bool write, Access now, unsigned code, Party& other) {
    for (unsigned i = 0; i < size; ++i)
      if (race(cells_[offset + i], write, now, code, other)) return true;
    return false;
  }

 private:
  struct Cell {
    Access writer, reader, other;
    unsigned writer_code, reader_code, other_code;
  };

  static bool race(Cell& cell, bool write, Access now, unsigned code, Party& other) {
    if (cell.writer.races(now)) return report_race(cell.writer, true, cell.writer_code, other);
    if (write) {
      if (cell.reader.races(now)) return report_race(cell.reader, false, cell.reader_code, other);
      if (cell.other.races(now)) return report_race(cell.other, false, cell.other_code, other);
      if (!now.atomic()) cell = Cell{now, Access(), Access(), code, 0, 0};
      else if (!cell.writer.hides(now)) cell.writer = now, cell.writer_code = code;
    } else if (!cell.reader || cell.reader.before(now)) {
      cell.reader = now, cell.reader_code = code;
    } else if (!cell.other || cell.other.before(now) || cell.other.same_simdgroup(cell.reader)) {
      cell.other = now, cell.other_code = code;
    }
    return false;
  }

  static bool report_race(Access access, bool write, unsigned code, Party& other) {
    const Act act = access.atomic() ? (write ? WRITES_ATOMICALLY : READS_ATOMICALLY) : (write ? WRITES : READS);
    other = Party{act, access.thread(), access.group(), code, nullptr, nullptr, 0};
    return true;
  }

  Cell* cells_;
  std::size_t bytes_;
};

}  // namespace emulator
