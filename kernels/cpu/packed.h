// The memory layout of packed weights: packed once, then read by products from the first byte to the last.
//
// Outputs are grouped in blocks of 64, which are 4 panels of 16. The columns of a panel are cut into tiles of 1 KiB
// (half of that for numbers of 4 bits), and the tiles of the 4 panels at the same depth are adjacent:
//
//     block  | depth 0: tile of panel 0 | panel 1 | panel 2 | panel 3 | depth 1: ... |
//     tile   [columns / S][16 outputs][S columns]
//
// S columns of an output make 32 bits, so that an instruction that multiplies pairs of bfloat16 or four bytes finds
// those of 16 outputs in one vector, and AMX finds a whole tile. For float32 and float16, S is 1. The layout is padded
// with zeros after the last output and the last column, and is the same for every instruction set. Knows neither
// tensors nor products.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvmux {

constexpr int64_t PANEL = 16;  // outputs
constexpr int64_t PANELS = 4;  // of a block
constexpr int64_t PAIR = 2;    // least number of panels that a product computes together
constexpr int64_t BLOCK = PANEL * PANELS;
constexpr int64_t TILE_SIZE = 1024;  // bytes of a tile whose numbers have 8 bits or more

// The sizes and offsets of a packed weight whose numbers are of type T.
template <typename T>
struct Packing {
  static constexpr int64_t S = std::is_same_v<T, at::BFloat16> ? 2 : sizeof(T) == 1 ? 4 : 1;
  static constexpr int64_t TILE = TILE_SIZE / sizeof(T);  // numbers
  static constexpr int64_t DEPTH = TILE / PANEL;          // columns

  static constexpr int64_t tiles(int64_t k) { return (k + DEPTH - 1) / DEPTH; }
  static constexpr int64_t panel(int64_t n, int64_t k) {  // offset of panel n: of its first tile, in numbers
    return (n / PANELS * tiles(k) * PANELS + n % PANELS) * TILE;
  }
  // Offset of column i of a panel's first output, in numbers from the panel's first tile; groups of S columns are
  // adjacent.
  static constexpr int64_t column(int64_t i) { return i / DEPTH * PANELS * TILE + i % DEPTH / S * PANEL * S; }
};

constexpr int64_t blocks_of(int64_t outputs) { return (outputs + BLOCK - 1) / BLOCK; }

// Packs one block of outputs from `from` [outputs, k], whose rows are `apart` numbers apart. Goes tile by tile, so that
// the writes stay in the L1 cache. The caller has zeroed the padding of the block.
template <typename T>
inline void pack_block(const T* from, int64_t apart, int64_t outputs, int64_t k, T* block) {
  using P = Packing<T>;
  for (int64_t column = 0; column < k; column += P::DEPTH, block += PANELS * P::TILE)
    for (int64_t output = 0; output < outputs; ++output) {
      const T* row = from + output * apart + column;
      T* to = block + output / PANEL * P::TILE + output % PANEL * P::S;
      const int64_t count = std::min(P::DEPTH, k - column), whole = count / P::S * P::S;
      for (int64_t i = 0; i < whole; i += P::S)
        std::memcpy(static_cast<void*>(to + i * PANEL), row + i, P::S * sizeof(T));
      for (int64_t i = whole; i < count; ++i) to[whole * PANEL + i - whole] = row[i];
    }
}

// Offset of column i of a panel's first output in bytes, for numbers of 4 bits; like Packing::column.
constexpr int64_t halves_column(int64_t i) {
  using P = Packing<uint8_t>;
  return i / P::DEPTH * PANELS * P::TILE / 2 + i % P::DEPTH / P::S / 2 * PANEL * P::S;
}

// Packs one output whose numbers have 4 bits, from `from` [k / 2], where the even column is the lower half of a byte,
// as in `QuantizedTensor`. In the packed layout a tile has 64 columns in 512 bytes, and of 8 columns the first 4 are
// the lower halves.
inline void pack_halves(const uint8_t* from, int64_t k, int64_t output, uint8_t* block) {
  using P = Packing<uint8_t>;
  uint8_t* to = block + output / PANEL * P::TILE / 2 + output % PANEL * P::S;
  for (int64_t i = 0; i < k; ++i) {
    const int number = i % 2 == 0 ? from[i / 2] & 15 : from[i / 2] >> 4;
    to[halves_column(i) + i % P::S] |= static_cast<uint8_t>(i / P::S % 2 == 0 ? number : number << 4);
  }
}

}  // namespace kvmux
