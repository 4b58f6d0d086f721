// The formats in which keys and values are stored (kernels/kv_formats.py): how a vector of one is read and written.
// Knows neither where vectors are nor what they are for.
#pragma once

#include <bit>
#include <limits>

#include "dispatch.h"
#include "hadamard.h"
#include "vector.h"

namespace kvmux {

// Stands for the format of 4 bits, whose bytes torch has as uint8.
struct Int4 {};

template <typename KV>
constexpr at::ScalarType FORMAT = c10::CppTypeToScalarType<KV>::value;
template <>
constexpr at::ScalarType FORMAT<Int4> = at::kByte;

constexpr float TINY = 1e-30f;  // the least number by which numbers are divided when they are quantized

// Calls work(number) with a value of that of the C++ types that stands for a format: the last one if no other does.
template <typename First, typename... Others, typename Work>
void with_one_of(at::ScalarType format, const Work& work) {
  if constexpr (sizeof...(Others) == 0)
    work(First{});
  else
    format == FORMAT<First> ? work(First{}) : with_one_of<Others...>(format, work);
}

// Calls work(number) with a value of the C++ type that stands for any format of keys or values.
template <typename Work>
void with_kv_type(at::ScalarType format, const Work& work) {
  with_one_of<int8_t, Int4, float, at::BFloat16, at::Half>(format, work);
}

// Returns the scale of a stored int8 vector of n numbers.
inline float scale_of(const char* from, int64_t n) {
  float scale;
  std::memcpy(&scale, from + n, sizeof(scale));
  return scale;
}

// ---------------------------------------------------------------- int4
constexpr int64_t GROUP = 64;  // numbers that share bytes; each half of them has a scale

constexpr int64_t groups_of(int64_t dim) { return (dim + GROUP - 1) / GROUP; }

// The scales of a group's first half and of its second one, as they are stored: the halves of an integer.
inline uint32_t scales_of(const char* from, int64_t dim, int64_t group) {
  uint32_t both;
  std::memcpy(&both, from + dim / 2 + group * sizeof(both), sizeof(both));
  return both;
}
inline float first_in(uint32_t scales) { return std::bit_cast<float>(scales << 16); }
inline float second_in(uint32_t scales) { return std::bit_cast<float>(scales & 0xFFFF0000); }

// A group of a stored vector: byte j has number j in its low half, and number `half` + j in its high one. A number is
// worth (integer - 8) * scale.
struct Int4Group {
  Int4Group(const char* from, int64_t dim, int64_t group)
      : bytes(reinterpret_cast<const uint8_t*>(from) + group * GROUP / 2),
        half(std::min(GROUP, dim - group * GROUP) / 2) {
    const uint32_t scales = scales_of(from, dim, group);
    first = first_in(scales);
    second = second_in(scales);
  }

  const uint8_t* bytes;
  int64_t half;  // numbers
  float first, second;
};

using Nibbles = int32_t __attribute__((vector_size(sizeof(Vec))));

// Returns integers of 4 bits as the numbers that they stand for.
inline Vec dequantize(Nibbles integers, Vec scale) {
  return Vec(Raw(__builtin_convertvector(integers - 8, Raw))) * scale;
}

inline void read_group(const Int4Group& from, float* to) {
  using Small = uint8_t __attribute__((vector_size(W)));
  int64_t j = 0;
  for (; j + W <= from.half; j += W) {
    Small small;
    std::memcpy(&small, from.bytes + j, sizeof(small));
    const Nibbles both = __builtin_convertvector(small, Nibbles);
    dequantize(both & 15, Vec(from.first)).store(to + j);
    dequantize(both >> 4, Vec(from.second)).store(to + from.half + j);
  }
  for (; j < from.half; ++j) {
    to[j] = static_cast<float>((from.bytes[j] & 15) - 8) * from.first;
    to[from.half + j] = static_cast<float>((from.bytes[j] >> 4) - 8) * from.second;
  }
}

// Reads one group of W vectors as columns of `to`, whose rows begin `ld` numbers apart. Eight numbers are transposed as
// one of 32 bits and widened afterwards.
inline void read_group_transposed(const char* const* from, int64_t dim, int64_t group, float* to, int64_t ld) {
  float first[W], second[W];
  const uint8_t* bytes[W];
  for (int64_t i = 0; i < W; ++i) {
    const Int4Group each(from[i], dim, group);
    first[i] = each.first;
    second[i] = each.second;
    bytes[i] = each.bytes;
  }
  constexpr int64_t MOST = std::min<int64_t>(sizeof(Raw), GROUP / 2);  // bytes of a vector that are read together
  const int64_t half = std::min(GROUP, dim - group * GROUP) / 2;
  for (int64_t at = 0; at < half; at += MOST) {
    const int64_t count = std::min(MOST, half - at);
    Raw block[W] = {};
    for (int64_t i = 0; i < W; ++i) std::memcpy(&block[i], bytes[i] + at, count == MOST ? MOST : count);
    transpose(block);
    for (int64_t u = 0; u < count / 4; ++u) {
      const auto eight = reinterpret_cast<Nibbles>(block[u]);
      float* const low = to + (at + 4 * u) * ld;
      unroll<4>([&](auto n) {
        dequantize(eight >> 8 * n & 15, load(first)).store(low + n * ld);
        dequantize(eight >> (8 * n + 4) & 15, load(second)).store(low + (half + n) * ld);
      });
    }
  }
}

// Rounds n numbers, half of a group, to integers of 4 bits, and returns their scale: by it the one of the largest
// magnitude becomes -8, of two such numbers the negative one.
inline at::BFloat16 round_half(const float* from, int64_t n, int32_t* to) {
  float numbers[GROUP / 2];
  std::fill(std::copy_n(from, n, numbers), numbers + GROUP / 2, from[0]);
  Vec least = load(numbers), largest = least, nothing(0.f);  // a NaN or infinity times 0 is NaN
  for (int64_t i = 0; i < GROUP / 2; i += W) {
    const Vec x = load(numbers + i);
    least = at::vec::minimum(least, x);
    largest = at::vec::maximum(largest, x);
    nothing = at::vec::fmadd(x, Vec(0.f), nothing);
  }
  const float low = reduce(least, [](const Vec& a, const Vec& b) { return at::vec::minimum(a, b); });
  const float high = reduce(largest, [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); });
  const at::BFloat16 scale = (high > -low ? high : low) / -8.f;
  const float step = scale;
  if (!(sum(nothing) == 0.f && std::isfinite(step))) {
    std::fill_n(to, n, 8);
    return std::numeric_limits<at::BFloat16>::quiet_NaN();
  }
  const Vec divisor(std::abs(step) > TINY ? step : TINY);
  for (int64_t i = 0; i < n; i += W) {
    const Vec integers = (load(numbers + i) / divisor).round() + Vec(8.f);
    const Nibbles each = __builtin_convertvector(Raw(at::vec::clamp(integers, Vec(0.f), Vec(15.f))), Nibbles);
    std::memcpy(to + i, &each, std::min<int64_t>(W, n - i) * sizeof(int32_t));
  }
  return scale;
}

// Rounds a group of 2 n numbers, stores the integers as n bytes, and returns the scales of both halves.
inline uint32_t write_group(const float* from, int64_t n, uint8_t* to) {
  int32_t low[GROUP / 2], high[GROUP / 2];
  const at::BFloat16 first = round_half(from, n, low), second = round_half(from + n, n, high);
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(low[i] | high[i] << 4);
  return static_cast<uint32_t>(second.x) << 16 | first.x;
}

// ---------------------------------------------------------------- all formats
// Reads a stored key or value of n numbers as float32.
template <typename KV>
inline void read_vector(const char* from, float* to, int64_t n) {
  const auto* const numbers = reinterpret_cast<const KV*>(from);
  if constexpr (std::is_same_v<KV, Int4>) {
    for (int64_t g = 0; g < groups_of(n); ++g) read_group({from, n, g}, to + g * GROUP);
  } else if constexpr (std::is_same_v<KV, int8_t>) {
    const float scale = scale_of(from, n);
    const Vec scales(scale);
    int64_t i = 0;
    for (; i + W <= n; i += W) (load(numbers + i) * scales).store(to + i);
    for (; i < n; ++i) to[i] = static_cast<float>(numbers[i]) * scale;
  } else {
    to_float(numbers, to, n);
  }
}

// Reads W stored keys or values of n numbers as the columns of [n, W] of float32, whose rows begin `ld` numbers apart;
// calls between() from time to time.
template <typename KV, typename Between>
inline void read_transposed(const char* const* from, int64_t n, float* to, int64_t ld, const Between& between) {
  if constexpr (std::is_same_v<KV, Int4>) {
    for (int64_t g = 0; g < groups_of(n); ++g, between()) read_group_transposed(from, n, g, to + g * GROUP * ld, ld);
  } else {
    const KV* rows[W];
    for (int64_t i = 0; i < W; ++i) rows[i] = reinterpret_cast<const KV*>(from[i]);
    if constexpr (std::is_same_v<KV, int8_t>) {
      float scales[W];
      for (int64_t i = 0; i < W; ++i) scales[i] = scale_of(from[i], n);
      int64_t at = 0;
      for (; at + 4 * W <= n; at += 4 * W, between()) transpose_quads(rows, at, load(scales), to + at * ld, ld);
      for (; at + W <= n; at += W, between()) transpose_block(rows, at, to + at * ld, ld, load(scales));
      for (; at < n; ++at)
        for (int64_t i = 0; i < W; ++i) to[at * ld + i] = static_cast<float>(rows[i][at]) * scales[i];
    } else {
      transpose_rows(rows, n, to, ld, between);
    }
  }
}

// Stores n numbers as int8: the largest magnitude becomes 127, as in kv_formats.py.
template <typename T>
inline void write_int8(const T* from, char* to, int64_t n) {
  float largest = 0.f;
  bool finite = true;  // if any of the numbers is NaN or infinite, the scale becomes NaN
  for (int64_t i = 0; i < n; ++i) {
    const float size = std::abs(static_cast<float>(from[i]));
    finite &= size <= std::numeric_limits<float>::max();
    largest = std::max(largest, size);
  }
  const float scale = finite ? largest / 127.f : std::numeric_limits<float>::quiet_NaN();
  const float divisor = finite ? std::max(scale, TINY) : std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i) {
    const float number = std::nearbyint(static_cast<float>(from[i]) / divisor);
    to[i] = finite ? static_cast<int8_t>(number) : int8_t{0};
  }
  std::memcpy(to + n, &scale, sizeof(scale));
}

inline void write_int4(const float* from, char* to, int64_t n) {
  for (int64_t g = 0; g < groups_of(n); ++g) {
    const int64_t first = g * GROUP, size = std::min(GROUP, n - first);
    const uint32_t scales = write_group(from + first, size / 2, reinterpret_cast<uint8_t*>(to) + first / 2);
    std::memcpy(to + n / 2 + g * sizeof(scales), &scales, sizeof(scales));
  }
}

// Stores a key or value of n numbers.
template <typename KV, typename T>
inline void write_vector(const T* from, char* to, int64_t n) {
  if constexpr (std::is_same_v<KV, int8_t>)
    write_int8(from, to, n);
  else
    convert(from, reinterpret_cast<KV*>(to), n);
}

// Stores a key or value of n numbers in a format. `center` is subtracted first, unless it is null; then the vector is
// rotated, if the format is. `scratch` has n numbers.
template <typename T>
inline void write_vector(const T* from, at::ScalarType format, const float* center, bool rotated, char* to, int64_t n,
                         float* scratch) {
  if (center == nullptr && !rotated && format != at::kByte)
    return with_kv_type(format, [&](auto of_kv) {
      if constexpr (!std::is_same_v<decltype(of_kv), Int4>) write_vector<decltype(of_kv)>(from, to, n);
    });
  to_float(from, scratch, n);
  if (center != nullptr)
    for (int64_t i = 0; i < n; ++i) scratch[i] -= center[i];
  if (rotated) rotate(scratch, n);
  if (format == at::kByte) return write_int4(scratch, to, n);
  write_vector(scratch, format, nullptr, false, to, n, scratch);
}

}  // namespace kvmux
