// Norms, RoPE and gates of one row. Arithmetic is in float32, and results are rounded once to T unless a comment says
// otherwise. Knows neither tensors nor threads.
#pragma once

#include <cmath>

#include "vector.h"

namespace kvmux {

// y = operation(a, b), elementwise, all of n numbers; y may be a or b.
template <typename T, typename Operation>
inline void combine_row(const T* a, const T* b, T* y, int64_t n, const Operation& operation) {
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W)
    store(operation(load(a + i), load(b + i)), operation(load(a + i + W), load(b + i + W)), y + i);
  if (i == n) return;
  T rest[3][2 * W] = {};
  std::copy(a + i, a + n, rest[0]);
  std::copy(b + i, b + n, rest[1]);
  combine_row(rest[0], rest[1], rest[2], 2 * W, operation);
  std::copy(rest[2], rest[2] + n - i, y + i);
}

// y = a + b, elementwise, all of d numbers.
template <typename T>
void add_row(const T* a, const T* b, T* y, int64_t d) {
  combine_row(a, b, y, d, [](Vec x, Vec z) { return x + z; });
}

// y = x / rms(x) * weight, all of d numbers. x / rms(x) is rounded to T before the weight is applied (Llama); if the
// weight is float32, only the result is rounded (Gemma).
template <typename T, typename Weight>
void rms_norm_row(const T* x, const Weight* weight, float eps, T* y, int64_t d) {
  Vec squares(0.f);
  float rest = 0.f;
  int64_t i = 0;
  for (; i + W <= d; i += W) {
    const Vec v = load(x + i);
    squares = at::vec::fmadd(v, v, squares);
  }
  for (; i < d; ++i) rest += static_cast<float>(x[i]) * static_cast<float>(x[i]);
  const float total = sum(squares) + rest;
  const float factor = 1.f / std::sqrt(total / static_cast<float>(d) + eps);
  const Vec factors(factor);
  for (i = 0; i + 2 * W <= d; i += 2 * W) {
    Vec first = load(x + i) * factors, second = load(x + i + W) * factors;
    if constexpr (!std::is_same_v<Weight, float>) {
      T rounded[2 * W];
      store(first, second, rounded);
      first = load(rounded);
      second = load(rounded + W);
    }
    store(first * load(weight + i), second * load(weight + i + W), y + i);
  }
  for (; i < d; ++i) {
    const float normed = static_cast<float>(x[i]) * factor;
    const float rounded = std::is_same_v<Weight, float> ? normed : static_cast<float>(static_cast<T>(normed));
    y[i] = static_cast<T>(rounded * static_cast<float>(weight[i]));
  }
}

// Applies RoPE to a row: rotates the pairs (x[i], x[i + half]) by the angles whose cosines and sines are given [half];
// y may be x.
template <typename T>
void rope_row(const T* x, const float* cos, const float* sin, T* y, int64_t half) {
  int64_t i = 0;
  for (; i + 2 * W <= half; i += 2 * W) {
    const auto rotated = [&](int64_t at, Vec& first, Vec& second) {
      const Vec a = load(x + at), b = load(x + at + half), c = load(cos + at), s = load(sin + at);
      first = a * c - b * s;
      second = b * c + a * s;
    };
    Vec first[2], second[2];
    rotated(i, first[0], second[0]);
    rotated(i + W, first[1], second[1]);
    store(first[0], first[1], y + i);
    store(second[0], second[1], y + i + half);
  }
  for (; i < half; ++i) {
    const float a = static_cast<float>(x[i]), b = static_cast<float>(x[i + half]);
    y[i] = static_cast<T>(a * cos[i] - b * sin[i]);
    y[i + half] = static_cast<T>(b * cos[i] + a * sin[i]);
  }
}

// y = silu(gate) * up, elementwise, all of f numbers.
template <typename T>
void silu_mul_row(const T* gate, const T* up, T* y, int64_t f) {
  const Vec one(1.f);
  combine_row(gate, up, y, f, [&](Vec g, Vec u) { return g / (one + g.neg().exp_u20()) * u; });
}

// y = gelu(gate) * up with the approximation by tanh: x (1 + tanh(z)) / 2 = x / (1 + exp(-2 z)).
template <typename T>
void gelu_tanh_mul_row(const T* gate, const T* up, T* y, int64_t f) {
  constexpr float TWICE = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  const Vec one(1.f), minus_twice(-TWICE), minus_cubed(-TWICE * 0.044715f);
  combine_row(gate, up, y, f, [&](Vec g, Vec u) {
    const Vec minus_2z = g * (minus_twice + minus_cubed * (g * g));
    return g / (one + minus_2z.exp_u20()) * u;
  });
}

}  // namespace kvmux
