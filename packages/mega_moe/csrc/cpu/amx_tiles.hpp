// Products of tiles: rows are split activations, columns are outputs. Weights (and only they) are in register 7, and
// in 6 where tiles of activations have 16 rows too.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace mega_moe {
namespace KERNEL_CORE_ISA {

inline constexpr int64_t kTileBytes = 1024;  // 16 rows of 64 bytes
inline constexpr int kTileRows = 16;

// The compiler does not know that a tile load reads memory: without this it may move earlier stores behind it.
inline void stores_before_tile_loads() { __asm__ volatile("" : : : "memory"); }

// Holds the tile configuration of a thread for as long as it lives. Others in the process (oneDNN) use tiles too,
// so nothing is assumed about the state before and nothing is left behind.
class TileSession {
 public:
  TileSession() = default;
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
  ~TileSession() {
    if (rows_) _tile_release();
  }

  // `rows` activation rows a tile: fewer rows make a product faster
  void configure(int rows) {
    if (rows == rows_) return;
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t column_bytes[16];
      uint8_t rows[16];
    } config;
    static_assert(sizeof(config) == 64);
    std::memset(&config, 0, sizeof(config));
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.column_bytes[i] = 64;
      config.rows[i] = static_cast<uint8_t>(i < 7 ? rows : kTileRows);
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // the intrinsic declares only its first bytes as input
    _tile_loadconfig(&config);
    rows_ = rows;
  }

 private:
  int rows_ = 0;
};

// Sums of G activation groups (1 or 2) and N weight tiles (1 or 2): registers 2 * group + tile
template <int G, int N>
struct TileBlock {
  static void zero() {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (G > 1) _tile_zero(2);
    if constexpr (G > 1 && N > 1) _tile_zero(3);
  }
  // c: [G][N][16][16] floats, groups 2 KiB apart
  static void load(const float* c) {
    stores_before_tile_loads();
    _tile_loadd(0, c, 64);
    if constexpr (N > 1) _tile_loadd(1, c + 256, 64);
    if constexpr (G > 1) _tile_loadd(2, c + 512, 64);
    if constexpr (G > 1 && N > 1) _tile_loadd(3, c + 768, 64);
  }
  static void store(float* c) {
    _tile_stored(0, c, 64);
    if constexpr (N > 1) _tile_stored(1, c + 256, 64);
    if constexpr (G > 1) _tile_stored(2, c + 512, 64);
    if constexpr (G > 1 && N > 1) _tile_stored(3, c + 768, 64);
  }
  // a: tiles of the groups, `step` bytes from block to block, `group` bytes apart; b: weight tiles, `tile` bytes apart
  static void accumulate(const char* a, int64_t step, int64_t group, const char* b, int64_t tile, int64_t blocks) {
    stores_before_tile_loads();
    for (int64_t k = 0; k < blocks; ++k, a += step, b += kTileBytes) {
      _tile_loadd(6, b, 64);
      _tile_loadd(4, a, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (N > 1) {
        _tile_loadd(7, b + tile, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (G > 1) {
        _tile_loadd(5, a + group, 64);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
};

// Sums of G <= 3 activation groups and N <= 2 weight tiles, all in registers: 3 * tile + group
template <int G, int N>
struct TileStream {
  static void zero() {
    _tile_zero(0);
    if constexpr (G > 1) _tile_zero(1);
    if constexpr (G > 2) _tile_zero(2);
    if constexpr (N > 1) _tile_zero(3);
    if constexpr (N > 1 && G > 1) _tile_zero(4);
    if constexpr (N > 1 && G > 2) _tile_zero(5);
  }
  // c: [G][N][16][16] floats
  static void store(float* c) {
    _tile_stored(0, c, 64);
    if constexpr (G > 1) _tile_stored(1, c + N * 256, 64);
    if constexpr (G > 2) _tile_stored(2, c + 2 * N * 256, 64);
    if constexpr (N > 1) _tile_stored(3, c + 256, 64);
    if constexpr (N > 1 && G > 1) _tile_stored(4, c + 3 * 256, 64);
    if constexpr (N > 1 && G > 2) _tile_stored(5, c + 5 * 256, 64);
  }
  // weight tile I: a: tiles of the groups, `group` bytes apart
  template <int I>
  static void accumulate(const char* a, int64_t group, const char* b) {
    stores_before_tile_loads();
    _tile_loadd(7, b, 64);
    _tile_loadd(6, a, 64);
    if constexpr (I == 0) {
      _tile_dpbf16ps(0, 6, 7);
    } else {
      _tile_dpbf16ps(3, 6, 7);
    }
    if constexpr (G > 1) {
      _tile_loadd(6, a + group, 64);
      if constexpr (I == 0) {
        _tile_dpbf16ps(1, 6, 7);
      } else {
        _tile_dpbf16ps(4, 6, 7);
      }
    }
    if constexpr (G > 2) {
      _tile_loadd(6, a + 2 * group, 64);
      if constexpr (I == 0) {
        _tile_dpbf16ps(2, 6, 7);
      } else {
        _tile_dpbf16ps(5, 6, 7);
      }
    }
  }
};

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
