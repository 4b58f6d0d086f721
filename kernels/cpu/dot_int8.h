// Dot products of bytes, four at a time: 16 integers of 32 bits += 16 times 4 unsigned bytes times the same 4 signed
// ones.
//
// It is one instruction where the processor has one; the results are the same integers on all processors. Knows neither
// weights nor rows.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstring>

namespace kvmux {

using Dot4 = int32_t __attribute__((vector_size(64)));
using Bytes = uint8_t __attribute__((vector_size(64)));

inline Dot4 quads(int32_t number) { return Dot4{} + number; }

inline Bytes load_bytes(const uint8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

#if defined(CPU_CAPABILITY_AVX2) && !defined(CPU_CAPABILITY_AVX512)
// For processors without a dot product of bytes: multiplies bytes as 16-bit words, even and odd bytes apart. (An older
// instruction for bytes sums two products in 16 bits, which would saturate.)
inline __m256i add_products(__m256i sums, __m256i bytes, __m256i x) {
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
  const __m256i evens = _mm256_and_si256(bytes, _mm256_set1_epi16(255)), odds = _mm256_srli_epi16(bytes, 8);
  return _mm256_add_epi32(_mm256_add_epi32(sums, _mm256_madd_epi16(evens, even)), _mm256_madd_epi16(odds, odd));
}
#endif

// `x`: 4 numbers.
inline void add_products(Dot4& sums, const Bytes& bytes, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof(four));
#if defined(__AVX512VNNI__)
  const auto added = _mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32(four));
  sums = (Dot4)added;
#elif defined(CPU_CAPABILITY_AVX512)
  const __m512i w = (__m512i)bytes, all = _mm512_set1_epi32(four);
  const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), odd = _mm512_srai_epi16(all, 8);
  const __m512i evens = _mm512_and_si512(w, _mm512_set1_epi16(255)), odds = _mm512_srli_epi16(w, 8);
  sums += (Dot4)_mm512_add_epi32(_mm512_madd_epi16(evens, even), _mm512_madd_epi16(odds, odd));
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i halves[2], weights[2];
  std::memcpy(halves, &sums, sizeof(sums));
  std::memcpy(weights, &bytes, sizeof(bytes));
  for (int i = 0; i < 2; ++i) halves[i] = add_products(halves[i], weights[i], _mm256_set1_epi32(four));
  std::memcpy(&sums, halves, sizeof(sums));
#else
  const Dot4 words = reinterpret_cast<const Dot4&>(bytes);
  for (int i = 0; i < 4; ++i) sums += ((words >> 8 * i) & 255) * static_cast<int32_t>(x[i]);
#endif
}

}  // namespace kvmux
