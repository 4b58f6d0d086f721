// The tile registers of AMX: eight of 16 rows of 64 bytes. Which products are made of them is not known here.
#pragma once

#ifdef __AMX_TILE__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace kvmux {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_BYTES = 64;  // of a row

// Whether the system lets this process use tiles. Linux saves their 8 KiB only for processes that have asked; asked once.
inline bool tiles_permitted() {
  static const bool permitted = [] {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  }();
  return permitted;
}

// A thread's tiles, all of them whole, while this lives. Other libraries configure tiles of their own, so a piece of work
// begins with one of these and ends with its end.
class Tiles {
 public:
  Tiles() {
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
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace kvmux

#endif
