// The numbers of stored keys and values (`kernels/kv_formats.py`), of which each lane holds some, and their rotation.
// The type of the numbers tells the format: T; char (int8), a float scale after each vector; or uchar (int4), two
// numbers in a byte, the scales of each group's halves after each vector.
#pragma once

#include "slots.h"

constant constexpr int MOST_NUMBERS = 8;  // numbers of a head that one lane holds at most: heads have up to 256
constant constexpr int MOST_GROUPED = 64;  // numbers of int4 that share bytes: a group

// ---------------------------------------------------------------- reading
// Reads the N numbers of a vector of `dim` numbers that belong to this lane, from lane * N on: what they are worth, and
// 0 beyond the vector's end.
template <int N, typename Stored>
inline void read_numbers(thread float* to, const device Stored* from, int dim, int lane) {
  for (int n = 0; n < N; n++) to[n] = lane * N + n < dim ? float(from[lane * N + n]) : 0.0f;
}

// Numbers of few bits are read so many at a time, as one word.
template <int N>
struct Word {
  static constant constexpr int BYTES = N < 4 ? 2 : 4;

  template <typename Byte>
  static inline uint read(const device Byte* from) {
    return BYTES == 4 ? *(const device uint*)from : uint(*(const device ushort*)from);
  }
};

template <int N>
inline void read_numbers(thread float* to, const device char* from, int dim, int lane) {
  const float scale = *(const device float*)(from + dim);
  for (int n = 0; n < N; n += Word<N>::BYTES) {
    const int i = lane * N + n;
    const uint word = i < dim ? Word<N>::read(from + i) : 0;
    for (int s = 0; s < Word<N>::BYTES; s++) to[n + s] = float(int(word << (24 - 8 * s)) >> 24) * scale;
  }
}

// The group of a number of an int4 vector. The first half of its numbers are in the low bits of its bytes, the second
// half in the high bits.
struct Grouped {
  int number, begin, size;  // index of the number in the vector, that of its group's first number; numbers of the group

  Grouped(int i, int dim) {
    number = i;
    begin = i / MOST_GROUPED * MOST_GROUPED;
    size = min(MOST_GROUPED, dim - begin);
  }

  bool is_high() const { return number - begin >= size / 2; }
  int byte() const { return number - begin / 2 - (is_high() ? size / 2 : 0); }
};

// What is stored for a number of int4 that is worth 0.
constant constexpr int MIDDLE = 8;

// A group has a multiple of 8 numbers, so the numbers of a word are in the same half of it.
template <int N>
inline void read_numbers(thread float* to, const device uchar* from, int dim, int lane) {
  for (int n = 0; n < N; n += Word<N>::BYTES) {
    float scale = 0.0f;
    uint word = 0;
    if (lane * N + n < dim) {
      const Grouped at = Grouped(lane * N + n, dim);
      const uint scales = ((const device uint*)(from + dim / 2))[at.begin / MOST_GROUPED];  // bfloats
      scale = as_type<float>(at.is_high() ? scales & 0xFFFF0000u : scales << 16);
      word = Word<N>::read(from + at.byte()) >> (at.is_high() ? 4 : 0);
    }
    for (int s = 0; s < Word<N>::BYTES; s++) to[n + s] = float(int(word >> (8 * s) & 15u) - MIDDLE) * scale;
  }
}

// ---------------------------------------------------------------- rotation
// Returns whether keys or values are stored rotated.
template <typename Stored>
inline bool is_rotated(PlaneSizes plane) {
  return is_same_v<Stored, uchar> && plane.rotated != 0;
}

// A step of the transform below, between numbers of the same lane.
template <int N>
inline void add_and_subtract(thread float* numbers, int distance) {
  for (int n = 0; n < N; n++) {
    if (n & distance) continue;
    const float first = numbers[n], second = numbers[n + distance];
    numbers[n] = first + second;
    numbers[n + distance] = first - second;
  }
}

// A step between numbers of lanes that are `distance` apart.
template <int N>
inline void add_and_subtract_lanes(thread float* numbers, int distance, int lane) {
  for (int n = 0; n < N; n++) {
    const float other = simd_shuffle_xor(numbers[n], ushort(distance));
    numbers[n] = lane & distance ? other - numbers[n] : numbers[n] + other;
  }
}

// Returns the inverse of the square root of a power of two.
inline float inverse_root(int size) {
  float root = 1.0f;
  for (; size > 2; size /= 4) root *= 0.5f;
  return size == 2 ? root * 0.70710678118654752f : root;
}

// Multiplies a vector of `dim` numbers by a Hadamard matrix, with the same bits as `hadamard` of kv_formats.py. A lane
// holds N numbers, in runs of RUN: lane l has number l * RUN + r of each RUN * LANES numbers.
template <int N, int RUN>
inline void rotate(thread float* numbers, int dim, int lane) {
  const int size = dim & -dim;
#pragma unroll  // so that no number is looked up by its index
  for (int distance = 1; distance < N * LANES; distance *= 2) {
    if (distance >= size) break;
    if (distance < RUN) add_and_subtract<N>(numbers, distance);
    else if (distance < RUN * LANES) add_and_subtract_lanes<N>(numbers, distance / RUN, lane);
    else add_and_subtract<N>(numbers, distance / LANES);
  }
  const float factor = inverse_root(size);
  for (int n = 0; n < N; n++) numbers[n] *= factor;
}
