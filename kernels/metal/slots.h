// The addresses of the keys of a row (`kernels.types.Slots`), and the layout of stored keys and values
// (`kernels/store.py`). K and V are the types of their numbers, see vectors.h; memory is bound as bytes.
#pragma once

#include "common.h"

struct Layout {
  int block_size, sinks, ring;

  int slot(int index) const { return ring > 0 && index >= sinks ? sinks + (index - sinks) % ring : index; }

  // Returns how many tokens with the indices from `first` on, before `end`, have consecutive slots within one block.
  int run(int first, int end) const {
    const int at = slot(first);
    const int here = min(end - first, block_size - at % block_size);
    return ring == 0 ? here : min(here, first < sinks ? sinks - first : sinks + ring - at);
  }
};

// The layout of one layer's keys or values in the store's memory. Offset and strides are counted in what is stored,
// numbers or bytes with two numbers, and may exceed 2^31.
struct PlaneSizes {
  long dim, offset, block_stride, head_stride, vector_stride;
  long rotated;  // whether vectors are
};

struct Planes {
  PlaneSizes k, v;
};

// The sizes of a step's addresses, which are the same for all layers.
struct Memory {
  Layout layout;
  int table_width, rows;
  int heads;  // KV heads with addresses of their own, in blocks of one head; 1: all heads of a row have the same

  // Returns the number of the addresses of a row's KV head.
  int own(int row, int head) const { return heads > 1 ? row * heads + head : row; }
  int head_in_block(int head) const { return heads > 1 ? 0 : head; }
};

// The stored keys or values of one head of one row. Number is K or V, or const if they are only read.
template <typename Number>
struct Plane {
  device Number* memory;     // the store's
  const device int* blocks;  // ids of its blocks: a row of the block table
  PlaneSizes sizes;
  Layout layout;
  int head;

  device Number* at(int index) const {
    const int slot = layout.slot(index);
    return memory + size_t(blocks[slot / layout.block_size]) * sizes.block_stride + sizes.offset +
           size_t(head) * sizes.head_stride + size_t(slot % layout.block_size) * sizes.vector_stride;
  }
};

// Returns the row to which a token of the step belongs: the last row that begins at or before the token.
inline int row_of(int token, const device int* q_start, int rows) {
  int row = 0;
  for (int end = rows; end - row > 1;) {
    const int middle = (row + end) / 2;
    if (q_start[middle] <= token) row = middle;
    else end = middle;
  }
  return row;
}
