// The failure of a launch, which ../failure.py formats; it has the same fields.
#pragma once

#include "../include/emulated/runtime.h"

namespace emulator {

enum Fault : int {
  NO_FAULT,
  RACE,              // both parties
  OUT_OF_BOUNDS,     // one party; `memory` is the nearest
  MISALIGNED,        // one party
  WRITE_TO_CONST,    // one party
  DIVERGENCE,        // both parties: the other does not reach what the first waits in
  TOO_MANY_BYTES,    // of threadgroup memory; `memory.offset` is their sum
  NO_LANE,           // one party; `memory` has the lane as offset, and as bytes how many lanes there are
  OTHER_LANE,        // both parties, which do not broadcast from the same lane
  DIVISION           // one party; of integers, by zero, or the least one by -1
};

enum Act : int { READS, WRITES, READS_ATOMICALLY, WRITES_ATOMICALLY, WAITS, RETURNED, DIVIDES };

struct Party {
  Act act;
  unsigned thread, group;  // indices
  unsigned code;           // of an access: the address of the instruction after it, in the library
  const char* operation;   // of WAITS
  const char* file;
  unsigned line, column;
  int flags;               // of a barrier
};

enum Space : int { DEVICE, THREADGROUP };

struct Memory {
  Space space;
  int index;        // of the argument, or of the threadgroup's variable; -1: near none
  long offset;      // bytes from its beginning
  long bytes;       // its length
  unsigned access;  // bytes
};

struct Failure {
  Fault fault;
  Party first, second;  // `first` is the one that found it
  Memory memory;
};

}  // namespace emulator
