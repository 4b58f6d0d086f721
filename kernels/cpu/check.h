// Checks of the arguments of an operation: types, sizes, and that the last dimension is dense. Each operation runs them
// once, before it reads any memory; a failure is a ValueError in Python. Knows no operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

namespace kvmux {

// A set of dtypes.
using Types = uint64_t;
constexpr Types only(at::ScalarType type) { return Types{1} << static_cast<int>(type); }
constexpr Types FLOATS = only(at::kFloat) | only(at::kBFloat16) | only(at::kHalf);  // of activations and weights
constexpr Types KV_TYPES = FLOATS | only(at::kChar) | only(at::kByte);  // of stored keys and values; bytes: int4

constexpr int64_t ANY = -1;   // in expected sizes: a dimension of any size
constexpr int64_t SOME = -2;  // in expected sizes: a dimension of size 1 or more

inline bool dense(const at::Tensor& t) { return t.size(-1) <= 1 || t.stride(-1) == 1; }

// Throws a ValueError that says what the argument must be and what it is.
[[noreturn]] void refuse(const char* operation, const char* name, const at::Tensor& t, Types types,
                         std::initializer_list<int64_t> sizes);

inline bool fits(const at::Tensor& t, Types types, std::initializer_list<int64_t> sizes) {
  if (!t.defined() || !t.is_cpu() || t.layout() != at::kStrided || !(types & only(t.scalar_type()))) return false;
  if (t.dim() != static_cast<int64_t>(sizes.size())) return false;
  const int64_t* found = t.sizes().data();
  for (const int64_t size : sizes) {
    const int64_t n = *found++;
    if (n != size && (size >= 0 || n < ANY - size)) return false;
  }
  return dense(t);
}

// Throws unless a tensor has one of these types and these sizes, is in the memory of the CPU, and is dense.
inline void expect(const char* operation, const char* name, const at::Tensor& t, Types types,
                   std::initializer_list<int64_t> sizes) {
  if (C10_UNLIKELY(!fits(t, types, sizes))) refuse(operation, name, t, types, sizes);
}

inline void expect(const char* operation, const char* name, const std::optional<at::Tensor>& t, Types types,
                   std::initializer_list<int64_t> sizes) {
  if (t) expect(operation, name, *t, types, sizes);
}

// Returns whether all of n numbers are indices below `end`. No branch depends on a single number, so that the compiler
// compares them in vectors.
template <typename Number>
bool are_indices(const Number* numbers, int64_t n, int64_t end) {
  bool inside = true;
  for (int64_t i = 0; i < n; ++i) inside &= static_cast<uint64_t>(numbers[i]) < static_cast<uint64_t>(end);
  return inside;
}

// Throws unless all numbers of a tensor int64 [n] are indices below `end`.
void expect_indices(const char* operation, const char* name, const at::Tensor& t, int64_t end);

}  // namespace kvmux
