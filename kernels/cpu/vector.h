// Vectors of float32, whatever the instruction set, and what they are loaded from and stored to.
//
// ATen's Vectorized is as wide as the flags say that this file is compiled with: see setup.py.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>

namespace kvmux {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t W = Vec::size();

constexpr int64_t in_vectors(int64_t n) { return (n + W - 1) / W; }
constexpr int64_t padded(int64_t n) { return in_vectors(n) * W; }

inline Vec load(const float* p) { return Vec::loadu(p); }

inline Vec load(const at::BFloat16* p) {
  Vec out;
  at::vec::load_fp32_from_bf16(p, out);
  return out;
}

inline Vec load(const at::Half* p) {
  Vec out;
  at::vec::load_fp32_from_fp16(p, out);
  return out;
}

// n numbers as float32.
template <typename T>
inline void to_float(const T* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int64_t j = 0; j < 4; ++j) load(from + i + j * W).store(to + i + j * W);
  for (; i + W <= n; i += W) load(from + i).store(to + i);
  for (; i < n; ++i) to[i] = static_cast<float>(from[i]);
}

inline void to_float(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }

// A vector of n numbers as float32, wherever its scale is.
template <typename T>
inline void read_vector(const T* from, float* to, int64_t n) {
  to_float(from, to, n);
}

inline void read_vector(const int8_t* from, float* to, int64_t n) {
  float scale;
  std::memcpy(&scale, from + n, sizeof(scale));
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]) * scale;
}

// The reverse. The largest number of an int8 vector becomes 127 or -127, as reference.py has it.
template <typename T, typename KV>
inline void write_vector(const T* from, KV* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<KV>(static_cast<float>(from[i]));
}

template <typename T>
inline void write_vector(const T* from, int8_t* to, int64_t n) {
  constexpr float TINY = 1e-30f;
  float largest = 0.f;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(static_cast<float>(from[i])));
  const float scale = largest / 127.f, divisor = std::max(scale, TINY);
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int8_t>(std::nearbyint(static_cast<float>(from[i]) / divisor));
  std::memcpy(to + n, &scale, sizeof(scale));
}

// n numbers, each times `factor`, rounded to T.
template <typename T>
inline void from_float(const float* from, float factor, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(from[i] * factor);
}

// All lanes to one number.
template <typename Operation>
inline float reduce(Vec v, const Operation& operation) {
  return at::vec::vec_reduce_all<float>(operation, v);
}

// A block [W, W] turned over its diagonal: log2(W) rounds of perfect shuffles.
template <typename T>
inline void transpose_block(const T* src, int64_t ld_src, float* dst, int64_t ld_dst) {
  Vec rows[W];
  for (int64_t i = 0; i < W; ++i) rows[i] = load(src + i * ld_src);
  for (int64_t round = 1; round < W; round *= 2) {
    Vec next[W];
    for (int64_t i = 0; i < W / 2; ++i)
      std::tie(next[2 * i], next[2 * i + 1]) = at::vec::interleave2(rows[i], rows[i + W / 2]);
    for (int64_t i = 0; i < W; ++i) rows[i] = next[i];
  }
  for (int64_t i = 0; i < W; ++i) rows[i].store(dst + i * ld_dst);
}

// src [rows, columns] -> dst [columns, rows].
template <typename T>
inline void transpose(const T* src, int64_t ld_src, float* dst, int64_t ld_dst, int64_t rows, int64_t columns) {
  int64_t i = 0;
  for (; i + W <= rows; i += W) {
    int64_t j = 0;
    for (; j + W <= columns; j += W) transpose_block(src + i * ld_src + j, ld_src, dst + j * ld_dst + i, ld_dst);
    for (; j < columns; ++j)
      for (int64_t r = i; r < i + W; ++r) dst[j * ld_dst + r] = static_cast<float>(src[r * ld_src + j]);
  }
  for (; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) dst[j * ld_dst + i] = static_cast<float>(src[i * ld_src + j]);
}

}  // namespace kvmux
