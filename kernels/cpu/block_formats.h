// The formats of quantized weights in GGUF files, one structure each: how the bytes of a block of columns become
// unsigned integers, and the scales that give them their values.
//
//     value = scale(group) * (number - ZERO) - offset(group)
//
// A block has COLUMNS columns in BYTES bytes; a group of GROUP columns shares a scale. Blocks of 256 columns have two
// levels of scales: scale(group) = d * small integer, offset(group) = dmin * small integer, where d and dmin are those
// of the block. In the others a block is a group, and has a scale and perhaps an offset of its own. Numbers of a
// CODEBOOK are places in a table of 16 integers. The values are those of `gguf.quants.dequantize`, bit for bit. Knows
// neither tensors nor products.
#pragma once

#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

namespace kvmux {

// A block as integers. Formats with one level of scales leave `small` and `small_offset` as they are.
struct Block {
  uint8_t numbers[256];      // [COLUMNS], below 2^BITS
  float scale;               // d
  float offset;              // dmin, or what is subtracted from the values of the block
  int8_t small[16];          // [COLUMNS / GROUP]: the scale of each group, as a multiple of d
  uint8_t small_offset[16];  // the same: its offset, as a multiple of dmin
};

namespace blocks {

inline float half_at(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return static_cast<float>(at::Half(bits, at::Half::from_bits()));
}

// Splits n bytes into halves: the lower ones become the first n numbers, the upper ones the next n.
inline void split_halves(const uint8_t* from, int n, uint8_t* to) {
  for (int i = 0; i < n; ++i) to[i] = from[i] & 15, to[n + i] = from[i] >> 4;
}

// Adds bits of four or eight times 32 columns, of which each byte has one or two for each.
inline void add_bits(const uint8_t* from, int bits, int columns, int shift, uint8_t* to) {
  for (int first = 0, down = 0; first < columns; first += 32, down = (down + bits) % 8) {
    for (int i = 0; i < 32; ++i)
      to[first + i] = static_cast<uint8_t>(to[first + i] | (from[i] >> down & ((1 << bits) - 1)) << shift);
    if (down + bits == 8) from += 32;
  }
}

// The scales of Q4_K and Q5_K: two float16 numbers, and 8 scales and 8 offsets of 6 bits in 12 bytes.
inline void unpack_k_scales(const uint8_t* from, Block& to) {
  to.scale = half_at(from);
  to.offset = half_at(from + 2);
  from += 4;
  for (int i = 0; i < 4; ++i) {
    const uint8_t scale = from[i], offset = from[4 + i], both = from[8 + i];
    to.small[i] = static_cast<int8_t>(scale & 63);
    to.small[4 + i] = static_cast<int8_t>((both & 15) | (scale >> 2 & 48));
    to.small_offset[i] = offset & 63;
    to.small_offset[4 + i] = static_cast<uint8_t>(both >> 4 | (offset >> 2 & 48));
  }
}

// The fifth bits of 32 columns, in 4 bytes. A byte's bits are spread over 8 bytes at once.
inline void add_fifth_bits(const uint8_t* from, uint8_t* to) {
  constexpr uint64_t ONES = 0x0101010101010101, EACH = 0x8040201008040201, BELOW_TOP = 0x7F7F7F7F7F7F7F7F;
  for (int i = 0; i < 4; ++i) {
    const uint64_t bits = (((from[i] * ONES & EACH) + BELOW_TOP) >> 7 & ONES) << 4;
    uint64_t eight;
    std::memcpy(&eight, to + 8 * i, sizeof(eight));
    eight |= bits;
    std::memcpy(to + 8 * i, &eight, sizeof(eight));
  }
}

}  // namespace blocks

// Tables of the integers that numbers of 4 bits stand for.
enum Codebook : int { NONE, IQ4, FP4 };
constexpr int8_t CODEBOOKS[3][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

// What a format is, as the constants of its structure.
template <int COLUMNS_, int BYTES_, int BITS_, int GROUP_, int ZERO_, bool OFFSETS_ = false, Codebook BOOK_ = NONE>
struct BlockFormat {
  static constexpr int COLUMNS = COLUMNS_, BYTES = BYTES_, BITS = BITS_, GROUP = GROUP_, ZERO = ZERO_;
  static constexpr bool OFFSETS = OFFSETS_, TWO_LEVELS = COLUMNS_ == 256;
  static constexpr Codebook BOOK = BOOK_;
};

// ---------------------------------------------------------------- blocks of 32 columns
struct Q4_0 : BlockFormat<32, 18, 4, 32, 8> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = blocks::half_at(from);
    blocks::split_halves(from + 2, 16, to.numbers);
  }
};

struct Q4_1 : BlockFormat<32, 20, 4, 32, 0, true> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = blocks::half_at(from);
    to.offset = -blocks::half_at(from + 2);
    blocks::split_halves(from + 4, 16, to.numbers);
  }
};

struct Q5_0 : BlockFormat<32, 22, 5, 32, 16> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = blocks::half_at(from);
    blocks::split_halves(from + 6, 16, to.numbers);
    blocks::add_fifth_bits(from + 2, to.numbers);
  }
};

struct Q5_1 : BlockFormat<32, 24, 5, 32, 0, true> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = blocks::half_at(from);
    to.offset = -blocks::half_at(from + 2);
    blocks::split_halves(from + 8, 16, to.numbers);
    blocks::add_fifth_bits(from + 4, to.numbers);
  }
};

struct Q8_0 : BlockFormat<32, 34, 8, 32, 128> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = blocks::half_at(from);
    for (int i = 0; i < 32; ++i) to.numbers[i] = from[2 + i] ^ 128;
  }
};

struct IQ4_NL : BlockFormat<32, 18, 4, 32, 0, false, IQ4> {
  static void unpack(const uint8_t* from, Block& to) { Q4_0::unpack(from, to); }
};

// With a scale that is a power of 2, half of it, as the codebook has twice the values.
struct MXFP4 : BlockFormat<32, 17, 4, 32, 0, false, FP4> {
  static void unpack(const uint8_t* from, Block& to) {
    const uint32_t e = from[0], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    std::memcpy(&to.scale, &bits, sizeof(bits));
    blocks::split_halves(from + 1, 16, to.numbers);
  }
};

// ---------------------------------------------------------------- blocks of 256 columns
struct Q2_K : BlockFormat<256, 84, 2, 16, 0, true> {
  static void unpack(const uint8_t* from, Block& to) {
    for (int i = 0; i < 16; ++i) to.small[i] = from[i] & 15, to.small_offset[i] = from[i] >> 4;
    std::memset(to.numbers, 0, 256);
    blocks::add_bits(from + 16, 2, 256, 0, to.numbers);
    to.scale = blocks::half_at(from + 80);
    to.offset = blocks::half_at(from + 82);
  }
};

struct Q3_K : BlockFormat<256, 110, 3, 16, 4> {
  static void unpack(const uint8_t* from, Block& to) {
    const uint8_t* scales = from + 96;
    for (int i = 0; i < 16; ++i) {
      const int low = scales[i % 8] >> i / 8 * 4 & 15, high = scales[8 + i % 4] >> i / 4 * 2 & 3;
      to.small[i] = static_cast<int8_t>((low | high << 4) - 32);
    }
    std::memset(to.numbers, 0, 256);
    blocks::add_bits(from + 32, 2, 256, 0, to.numbers);
    blocks::add_bits(from, 1, 256, 2, to.numbers);
    to.scale = blocks::half_at(from + 108);
  }
};

struct Q4_K : BlockFormat<256, 144, 4, 32, 0, true> {
  static void unpack(const uint8_t* from, Block& to) {
    blocks::unpack_k_scales(from, to);
    for (int i = 0; i < 4; ++i) blocks::split_halves(from + 16 + 32 * i, 32, to.numbers + 64 * i);
  }
};

struct Q5_K : BlockFormat<256, 176, 5, 32, 0, true> {
  static void unpack(const uint8_t* from, Block& to) {
    blocks::unpack_k_scales(from, to);
    for (int i = 0; i < 4; ++i) blocks::split_halves(from + 48 + 32 * i, 32, to.numbers + 64 * i);
    blocks::add_bits(from + 16, 1, 256, 4, to.numbers);
  }
};

struct Q6_K : BlockFormat<256, 210, 6, 16, 32> {
  static void unpack(const uint8_t* from, Block& to) {
    for (int i = 0; i < 2; ++i) blocks::split_halves(from + 64 * i, 64, to.numbers + 128 * i);
    blocks::add_bits(from + 128, 2, 256, 4, to.numbers);
    std::memcpy(to.small, from + 192, 16);
    to.scale = blocks::half_at(from + 208);
  }
};

struct IQ4_XS : BlockFormat<256, 136, 4, 32, 0, false, IQ4> {
  static void unpack(const uint8_t* from, Block& to) {
    to.scale = blocks::half_at(from);
    for (int i = 0; i < 8; ++i) {
      const int low = from[4 + i / 2] >> i % 2 * 4 & 15, high = from[2 + i / 4] >> i % 4 * 2 & 3;
      to.small[i] = static_cast<int8_t>((low | high << 4) - 32);
    }
    for (int i = 0; i < 8; ++i) blocks::split_halves(from + 8 + 16 * i, 16, to.numbers + 32 * i);
  }
};

// Calls work(format) with a value of the structure of a format's name in GGUF files.
template <typename Work>
bool with_block_format(const char* name, const Work& work) {
  const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
#define KVMUX_FORMAT(NAME) \
  if (is(#NAME)) return work(NAME{}), true;
  KVMUX_FORMAT(Q4_0)
  KVMUX_FORMAT(Q4_1)
  KVMUX_FORMAT(Q5_0)
  KVMUX_FORMAT(Q5_1)
  KVMUX_FORMAT(Q8_0)
  KVMUX_FORMAT(IQ4_NL)
  KVMUX_FORMAT(MXFP4)
  KVMUX_FORMAT(Q2_K)
  KVMUX_FORMAT(Q3_K)
  KVMUX_FORMAT(Q4_K)
  KVMUX_FORMAT(Q5_K)
  KVMUX_FORMAT(Q6_K)
  KVMUX_FORMAT(IQ4_XS)
#undef KVMUX_FORMAT
  return false;
}

}  // namespace kvmux
