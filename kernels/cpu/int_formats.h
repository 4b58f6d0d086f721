// How packed weights of integers are stored: a type for each way, and the numbers of 16 outputs in vectors.
//
// 32 columns of a panel are a unit. Its numbers lie in planes of 8, 4, 2 or 1 bits: numbers of 5 and 6 bits have their
// lower 4 bits in one plane and the others in a second one, numbers of 3 bits their lower 2. A vector of a plane holds
// bits of 4 columns of the 16 outputs, 8 / (bits of the plane) times: those of the first 4 columns are the lowest of
// each byte. So a plane of 8 bits has 8 vectors, and one of 1 bit has one. Knows neither tensors nor products.
#pragma once

#include <array>

#include "block_formats.h"
#include "int8_rows.h"

namespace kvmux {

constexpr int QUADS = UNIT / 4;

constexpr int low_plane(int bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }  // bits of a number in the first plane

// Bytes of a unit whose numbers have so many bits.
constexpr int64_t unit_bytes(int bits) { return UNIT * PANEL * bits / 8; }

// value = scale * (number - ZERO), or scale * number + offset. Small groups (16 columns) and two levels of scales are
// those of block_formats.h; numbers with a BOOK are places in a codebook.
template <int BITS_, int ZERO_, bool OFFSETS_, typename S, bool TWO_LEVELS_ = false, int GROUP_ = 32,
          Codebook BOOK_ = NONE>
struct IntFormat {
  static constexpr int BITS = BITS_, ZERO = ZERO_;
  static constexpr bool OFFSETS = OFFSETS_, TWO_LEVELS = TWO_LEVELS_;
  static constexpr int PARTS = GROUP_ == 16 ? 2 : 1;  // groups of a unit
  static constexpr Codebook BOOK = BOOK_;
  static constexpr bool SMALL = BITS < 8 && BOOK == NONE;  // numbers as they are multiplied are unsigned, below 128
  // What is subtracted from numbers as they are multiplied, so that the scale gives them their value. Large numbers are
  // multiplied as bytes with a sign, or plus 128.
  static constexpr int32_t SHIFT = SMALL ? (OFFSETS ? 0 : ZERO) : (SIGNED_BYTES ? 0 : 128) - (OFFSETS ? 128 : 0);
  static constexpr int MOST = SMALL ? (1 << BITS) - 1 : BOOK == FP4 ? 12 : 128 - (BOOK == IQ4);  // largest magnitude
  using Scale = S;
  using Dots = DotProducts<MOST, SMALL>;
};

template <typename F>
using FormatOf = IntFormat<F::BITS, F::ZERO, F::OFFSETS, std::conditional_t<F::BOOK == FP4, at::BFloat16, at::Half>,
                           F::TWO_LEVELS, F::GROUP, F::BOOK>;

// A packed weight of integers.
template <typename F>
struct IntWeight {
  static constexpr int64_t BLOCK_UNITS = 8;  // with two levels of scales, units of a block of 256 columns

  const uint8_t* numbers;
  const typename F::Scale* scale;   // [panels][groups][PANEL]; with two levels [panels][groups of 256 columns][PANEL]
  const typename F::Scale* offset;  // the same, or null
  const int8_t* small;              // with two levels: [panels][groups][PANEL]
  const int8_t* small_offset;       // the same, or null
  int64_t units, group_units;       // units of a row, and of a group of columns if it has that many

  // The places of the scales of a unit: those of the first level, or the only one.
  int64_t place(int64_t panel, int64_t unit) const {
    const int64_t divided = F::TWO_LEVELS ? BLOCK_UNITS : group_units;
    return (panel * ((units + divided - 1) / divided) + unit / divided) * PANEL;
  }
  // Those of the second level, of a part of the unit.
  int64_t small_place(int64_t panel, int64_t unit, int64_t part) const {
    return ((panel * units + unit) * F::PARTS + part) * PANEL;
  }
};

// ---------------------------------------------------------------- numbers
// A unit's quad Q of a plane, moved up by SHIFT, for W outputs of which the first is number `lane`.
template <int BITS, int SHIFT, int Q>
inline Bytes plane_quad(const uint8_t* plane, int lane) {
  using Words = uint16_t __attribute__((vector_size(sizeof(Bytes))));
  constexpr int PER_BYTE = 8 / BITS, DOWN = Q % PER_BYTE * BITS;
  const Bytes bytes = load_bytes(plane + (Q / PER_BYTE * PANEL + lane) * 4);
  const auto words = (Words)bytes;
  const Words moved = DOWN >= SHIFT ? words >> (DOWN - SHIFT) : words << (SHIFT - DOWN);
  return (Bytes)moved & static_cast<uint8_t>(((1 << BITS) - 1) << SHIFT);
}

// The entries of a codebook, as SIGNED_BYTES says: with a sign, or plus 128.
template <Codebook BOOK>
inline Bytes look_up(const Bytes& places) {
  alignas(64) static constexpr auto TABLE = [] {
    std::array<uint8_t, 64> table{};
    for (size_t i = 0; i < table.size(); ++i)
      table[i] = static_cast<uint8_t>(CODEBOOKS[BOOK][i % 16] + (SIGNED_BYTES ? 0 : 128));
    return table;
  }();
#if defined(CPU_CAPABILITY_AVX512)
  return (Bytes)_mm512_shuffle_epi8((__m512i)load_bytes(TABLE.data()), (__m512i)places);
#elif defined(CPU_CAPABILITY_AVX2)
  return (Bytes)_mm256_shuffle_epi8((__m256i)load_bytes(TABLE.data()), (__m256i)places);
#else
  Bytes found;
  for (size_t i = 0; i < sizeof(found); ++i) found[i] = TABLE[places[i]];
  return found;
#endif
}

// The numbers of columns 4 Q .. 4 Q + 3 of a unit as they are multiplied, for W outputs from number `lane` on.
template <typename F, int Q>
inline Bytes load_quad(const uint8_t* unit, int lane) {
  constexpr int LOW = low_plane(F::BITS), HIGH = F::BITS - LOW;
  if constexpr (F::BITS == 8) {
    constexpr uint8_t OTHER_SIGN = SIGNED_BYTES == F::OFFSETS ? 128 : 0;  // without offsets they are stored with a sign
    return load_bytes(unit + (Q * PANEL + lane) * 4) ^ OTHER_SIGN;
  }
  Bytes numbers = plane_quad<LOW, 0, Q>(unit, lane);
  if constexpr (HIGH > 0) numbers |= plane_quad<HIGH, LOW, Q>(unit + LOW * 4 * PANEL, lane);
  if constexpr (F::BOOK != NONE) return look_up<F::BOOK>(numbers);
  return numbers;
}

// Packs the numbers of 32 columns of an output, below 2^BITS, into a unit. Four numbers are moved as one word.
template <int BITS>
inline void pack_unit(const uint8_t* from, int64_t lane, uint8_t* unit) {
  const auto pack_plane = [&](auto bits, int shift) {
    constexpr int PER_BYTE = 8 / bits;
    constexpr uint32_t MASK = 0x01010101u * ((1 << bits) - 1);
    for (int quad = 0; quad < QUADS; quad += PER_BYTE) {
      uint32_t packed = 0;
      for (int i = 0; i < PER_BYTE; ++i) {
        uint32_t four;
        std::memcpy(&four, from + 4 * (quad + i), sizeof(four));
        packed |= (four >> shift & MASK) << i * bits;
      }
      std::memcpy(unit + (quad / PER_BYTE * PANEL + lane) * 4, &packed, sizeof(packed));
    }
    unit += 4 * PANEL * bits;
  };
  constexpr int LOW = low_plane(BITS);
  pack_plane(std::integral_constant<int, LOW>{}, 0);
  if constexpr (BITS > LOW) pack_plane(std::integral_constant<int, BITS - LOW>{}, LOW);
}

// Returns the number of a column and an output of a unit.
template <int BITS>
inline int number_at(const uint8_t* unit, int64_t lane, int64_t i) {
  const auto bits_at = [&](int bits) {
    const int64_t quad = i / 4, per_byte = 8 / bits;
    const uint8_t byte = unit[quad / per_byte * 4 * PANEL + lane * 4 + i % 4];
    unit += 4 * PANEL * bits;
    return byte >> quad % per_byte * bits & ((1 << bits) - 1);
  };
  constexpr int LOW = low_plane(BITS);
  int number = bits_at(LOW);
  if constexpr (BITS > LOW) number |= bits_at(BITS - LOW) << LOW;
  return number;
}

// Offset of the unit of column i of panel n, in bytes.
template <int BITS>
inline int64_t unit_offset(int64_t n, int64_t k, int64_t i) {
  using P = Packing<uint8_t>;
  static_assert(P::DEPTH == 2 * UNIT);
  constexpr int64_t TILE = P::TILE * BITS / 8;
  return (P::panel(n, k) / P::TILE + i / P::DEPTH * PANELS) * TILE + i % P::DEPTH / UNIT * unit_bytes(BITS);
}

}  // namespace kvmux
