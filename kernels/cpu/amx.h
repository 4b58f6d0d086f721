// The tile registers of AMX: eight registers, each of 16 rows of 64 bytes. Knows no product.
#pragma once

#ifdef __AMX_TILE__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace kvmux {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_BYTES = 64;  // of a row

// Returns whether the system lets this process use tile registers. Linux saves their 8 KiB (at a switch of threads)
// only for processes that request it; the first call requests it.
inline bool tiles_permitted() {
  static const bool permitted = [] {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  }();
  return permitted;
}

// Configures the tile registers of the calling thread while the object lives. Other libraries configure them in their
// own way, so each piece of work makes such an object.
class Tiles {
 public:
  // `depth`: bytes of a row of tile registers 4 and 5, which hold left factors; registers 6 and 7, for right factors,
  // have depth / 4 rows.
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

// Instructions on tile register N, in assembly: the compiler's intrinsics take literal numbers only, and GCC 12 moves
// stores past their loads, as the intrinsics do not declare that they read memory.
template <int N>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(N));
}

template <int N>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(N) : "memory");
}

// Loads a tile register with data that is used once (prefetch hint T1), so that the data does not evict what the L1
// cache holds.
template <int N>
inline void tile_stream(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(N) : "memory");
}

template <int N>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(N) : "memory");
}

// Adds to tile register SUM [16, 16] of float32 the product of tile A [16, 32] and tile B [32, 16], both bfloat16; B is
// stored as [16][16][2].
template <int SUM, int A, int B>
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// Adds to tile register SUM [16, 16] of integers the product of tile A [16, 64] of signed bytes and tile B [64, 16] of
// bytes; B is stored as [16][16][4].
template <int SUM, int A, int B, bool UNSIGNED>
inline void tile_dot_int8() {
  if constexpr (UNSIGNED)
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
  else
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// The same for a tile A of unsigned bytes and a tile B of signed ones.
template <int SUM, int A, int B>
inline void tile_dot_uint8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

}  // namespace kvmux

#endif
