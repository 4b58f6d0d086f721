// The tile registers of AMX: eight of 16 rows of 64 bytes. Knows no product.
#pragma once

#ifdef __AMX_TILE__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace kvmux {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_BYTES = 64;  // of a row

// Returns whether the system lets this process use tiles. Linux saves their 8 KiB only for processes that request it;
// requested once.
inline bool tiles_permitted() {
  static const bool permitted = [] {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  }();
  return permitted;
}

// Configures the tiles of a thread for its lifetime. Other libraries configure tiles of their own, so each piece of
// work makes one of these.
class Tiles {
 public:
  // `depth`: bytes of a row of tiles 4 and 5, the left factors; tiles 6 and 7, the right ones, have depth / 4 rows.
  explicit Tiles(int64_t depth = TILE_BYTES) : depth_(depth) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof(config) == 64);
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = TILE_BYTES;
      config.rows[tile] = TILE_ROWS;
    }
    for (int tile : {4, 5}) config.row_bytes[tile] = depth;
    for (int tile : {6, 7}) config.rows[tile] = depth / 4;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  int64_t depth() const { return depth_; }

 private:
  int64_t depth_;
};

// Instructions on tile N. The compiler's intrinsics take literal numbers only, and GCC 12 moves stores past their
// loads, as their assembly does not declare that it reads memory.
template <int N>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(N));
}

template <int N>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(N) : "memory");
}

// Loads data that is used once (a hint of T1), so that it does not evict what the L1 cache holds.
template <int N>
inline void tile_stream(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(N) : "memory");
}

template <int N>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(N) : "memory");
}

// Tile SUM [16, 16] of float32 += tile A [16, 32] times tile B [32, 16], both bfloat16, B as [16][16][2].
template <int SUM, int A, int B>
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// Tile SUM [16, 16] of integers += tile A [16, 64] of signed bytes times tile B [64, 16] of bytes, B as
// [16][16][4].
template <int SUM, int A, int B, bool UNSIGNED>
inline void tile_dot_int8() {
  if constexpr (UNSIGNED)
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
  else
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

}  // namespace kvmux

#endif
