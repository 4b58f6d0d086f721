// The failure of a launch; ../failure.py has the same fields and formats it as a message.
#pragma once

#include "../include/emulated/runtime.h"

namespace emulator {

enum Fault : int {
  NO_FAULT,
  RACE,            // both threads
  OUT_OF_BOUNDS,   // one thread, `first`; `memory` is the nearest argument or variable
  MISALIGNED,      // one thread, `first`
  WRITE_TO_CONST,  // one thread, `first`
  DIVERGENCE,      // both threads: they do not wait at the same place, so that a wait cannot end
  TOO_MANY_BYTES,  // no thread; the threadgroup variables have `memory.offset` bytes in all
  NO_LANE,         // one thread, `first`; `memory.offset` is the lane, `memory.bytes` the number of lanes that exist
  OTHER_LANE,      // both threads, which broadcast from different lanes
  DIVISION,        // one thread, `first`, divides an integer by zero, or the least one by -1
  CRASH            // one thread, `first`, raised the signal `memory.index`, at the address `memory.offset`
};

enum Act : int { READS, WRITES, READS_ATOMICALLY, WRITES_ATOMICALLY, WAITS, RETURNED, DIVIDES, CRASHES };

struct Party {
  Act act;
  unsigned thread, group;  // indices
  unsigned code;           // if the thread accesses memory: address of the next instruction, within the library
  const char* operation;   // of WAITS
  const char* file;
  unsigned line, column;
  int flags;               // of a barrier
};

enum Space : int { DEVICE, THREADGROUP };

struct Memory {
  Space space;
  int index;        // number of the argument or of the threadgroup variable; -1: none is near
  long offset;      // bytes from its beginning
  long bytes;       // its length
  unsigned access;  // bytes
};

struct Failure {
  Fault fault;
  Party first, second;  // `first` is the thread that found the failure
  Memory memory;
};

}  // namespace emulator
