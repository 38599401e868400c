// The two products of attention on the tile unit. Tile registers: 0 to 3 hold sums, 4 to 7 operands.
#pragma once

#include <immintrin.h>

#include "kernel_core/attention/bf16_rows.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

// GCC's tile loads do not tell the compiler that they read memory: stores before them have to be made to happen.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// All eight tiles 16 lines of 64 bytes, for the time of one object.
class TileConfig {
 public:
  TileConfig() {
    alignas(64) uint8_t bytes[64] = {1};  // palette 1
    for (int i = 0; i < 8; ++i) {
      bytes[16 + 2 * i] = 64;  // bytes a line
      bytes[48 + i] = 16;      // lines
    }
    __asm__ volatile("" ::"r"(bytes) : "memory");  // the intrinsic names only the first bytes as its input
    _tile_loadconfig(bytes);
  }
  ~TileConfig() { _tile_release(); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

template <int T>
inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (T == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int T>
inline void store_sums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if constexpr (T == 2) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

// Adds 32 channels to sum 2 t + g: 16 keys (half g of a block) x 16 columns of query tile t, for T query tiles
// `tile_stride` words apart, each of `parts` parts `part_stride` words apart.
template <int T>
inline void score_step(const uint16_t* keys, const uint16_t* query, int64_t tile_stride, int64_t parts,
                       int64_t part_stride) {
  _tile_loadd(4, keys, 64);
  _tile_loadd(5, keys + kTileWords, 64);
  for (int64_t part = 0; part < parts; ++part, query += part_stride) {
    _tile_loadd(6, query, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (T == 2) {
      _tile_loadd(7, query + tile_stride, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Scores of a decoded block
template <int T>
inline void score_block(const uint16_t* keys, const uint16_t* query, int64_t parts, int64_t chunks, float* sums) {
  finish_stores();
  clear_sums<T>();
  for (int64_t c = 0; c < chunks; ++c)
    score_step<T>(keys + c * kChunkWords, query + c * kTileWords, parts * chunks * kTileWords, parts,
                  chunks * kTileWords);
  store_sums<T>(sums);
}

// The same while decode(c, keys) makes the chunks: they live in a small ring that never leaves the first-level cache,
// and the products of a chunk run while the next one is decoded.
template <int T, typename Decode>
inline void score_decoding(Decode&& decode, uint16_t* ring, const uint16_t* query, int64_t parts, int64_t chunks,
                           float* sums) {
  constexpr int64_t kRing = 4;
  clear_sums<T>();
  for (int64_t c = 0; c <= chunks; ++c) {
    if (c < chunks) decode(c, ring + c % kRing * kChunkWords);
    if (c == 0) continue;
    finish_stores();
    score_step<T>(ring + (c - 1) % kRing * kChunkWords, query + (c - 1) * kTileWords, parts * chunks * kTileWords,
                  parts, chunks * kTileWords);
  }
  store_sums<T>(sums);
}

// sums[2 t + odd]: 16 lines of weight tile t x 16 even or odd channels, over all blocks in order
template <int T>
inline void value_tiles(const uint16_t* const* values, int64_t channel, const uint16_t* weights, int64_t stride,
                        int64_t parts, int64_t blocks, float* sums) {
  finish_stores();
  clear_sums<T>();
  for (int64_t b = 0; b < blocks; ++b) {
    _tile_loadd(6, values[b] + channel, 64);
    _tile_loadd(7, values[b] + channel + kTileWords, 64);
    for (int64_t part = 0; part < parts; ++part) {
      const uint16_t* p = weights + (part * blocks + b) * kTileWords;
      _tile_loadd(4, p, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (T == 2) {
        _tile_loadd(5, p + stride, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  store_sums<T>(sums);
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
