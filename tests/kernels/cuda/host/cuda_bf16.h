// Stands for CUDA's header of this name: a bfloat16 is the upper half of a float, rounded to nearest, ties to even.
#pragma once
#include <cstring>

struct __nv_bfloat16 {
  unsigned short bits;

  __nv_bfloat16() = default;
  __nv_bfloat16(float wide) {
    unsigned all;
    std::memcpy(&all, &wide, 4);
    const bool is_nan = (all & 0x7FFFFFFFu) > 0x7F800000u;
    bits = is_nan ? 0x7FFF : (all + 0x7FFFu + (all >> 16 & 1u)) >> 16;
  }
  operator float() const {
    const unsigned all = unsigned(bits) << 16;
    float wide;
    std::memcpy(&wide, &all, 4);
    return wide;
  }
};
