// What the AMX scorer is made of: MXFP4 to bfloat16, products of tiles, and the sum over heads.
#pragma once

#include <array>
#include <atomic>
#include <vector>

#include "kernel_core/decode.hpp"

namespace mla_fp4 {
namespace amx {

using namespace kernel_core::amx;

constexpr int kColumns = 16;             // of a tile
constexpr int64_t kTileBytes = 1024;     // 16 rows of 64 bytes
using Words = std::array<uint16_t, 32>;  // bfloat16 by code; twice, so that the fifth bit of an index is free

// One table for each scale byte. Truncation is exact but for subnormal results.
inline const Words* bf16_tables() {
  static const std::vector<Words> tables = [] {
    std::vector<Words> made(256);
    for (int scale = 0; scale < 256; ++scale)
      for (int code = 0; code < 32; ++code)
        made[scale][code] = static_cast<uint16_t>(
            bit_cast<uint32_t>(kE2M1[code & 15] * decode_ue8m0(static_cast<uint8_t>(scale))) >> 16);
    return made;
  }();
  return tables.data();
}

// 32 codes (16 bytes) to bfloat16
inline __m512i decode_group(const uint8_t* codes, const Words& table) {
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  // byte i to dword i twice: as it is for the low nibble, eight bits higher for the high one
  const __m512i spread =
      _mm512_set_epi32(0x0F80800F, 0x0E80800E, 0x0D80800D, 0x0C80800C, 0x0B80800B, 0x0A80800A, 0x09808009, 0x08808008,
                       0x07808007, 0x06808006, 0x05808005, 0x04808004, 0x03808003, 0x02808002, 0x01808001, 0x00808000);
  const __m512i index = _mm512_srlv_epi16(_mm512_shuffle_epi8(bytes, spread), _mm512_set1_epi32(0x000C0000));
  return _mm512_permutexvar_epi16(index, _mm512_loadu_si512(table.data()));
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The tile intrinsics do not tell the compiler that they read memory.
inline void finish_stores() { std::atomic_signal_fence(std::memory_order_seq_cst); }

struct alignas(64) Products {
  float tile[4][16][16];  // key, column
};

// Two tiles of keys by two of columns, `steps` times 32 channels. Calls between(step) while the tile unit works.
template <typename F>
inline void multiply_2x2(const uint8_t* keys, const uint8_t* queries, int64_t steps, Products& out, F&& between) {
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t g = 0; g < steps; ++g) {
    _tile_loadd(4, keys + g * kTileBytes, 64);
    _tile_loadd(6, queries + g * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, queries + (steps + g) * kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, keys + (steps + g) * kTileBytes, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    between(g);
  }
  _tile_stored(0, out.tile[0], 64);
  _tile_stored(1, out.tile[1], 64);
  _tile_stored(2, out.tile[2], 64);
  _tile_stored(3, out.tile[3], 64);
}

// Four tiles of keys by one of columns
template <typename F>
inline void multiply_4x1(const uint8_t* keys, const uint8_t* queries, int64_t steps, Products& out, F&& between) {
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t g = 0; g < steps; ++g) {
    _tile_loadd(6, queries + g * kTileBytes, 64);
    _tile_loadd(4, keys + g * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, keys + (steps + g) * kTileBytes, 64);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, keys + (2 * steps + g) * kTileBytes, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, keys + (3 * steps + g) * kTileBytes, 64);
    _tile_dpbf16ps(3, 5, 6);
    between(g);
  }
  _tile_stored(0, out.tile[0], 64);
  _tile_stored(1, out.tile[1], 64);
  _tile_stored(2, out.tile[2], 64);
  _tile_stored(3, out.tile[3], 64);
}

// v[k] holds 16 columns of key k: out[lane] gets the sums over the four columns of that 128-bit lane, in key order.
inline void sum_lanes(__m512 v[16], __m512 out[4]) {
  for (int i = 0; i < 16; i += 2)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 1]), _mm512_unpackhi_ps(v[i], v[i + 1]));
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(v[i]), b = _mm512_castps_pd(v[i + 2]);
    v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const __m512 p = _mm512_shuffle_f32x4(v[0], v[4], 0x88), q = _mm512_shuffle_f32x4(v[0], v[4], 0xDD);
  const __m512 r = _mm512_shuffle_f32x4(v[8], v[12], 0x88), s = _mm512_shuffle_f32x4(v[8], v[12], 0xDD);
  out[0] = _mm512_shuffle_f32x4(p, r, 0x88);
  out[1] = _mm512_shuffle_f32x4(q, s, 0x88);
  out[2] = _mm512_shuffle_f32x4(p, r, 0xDD);
  out[3] = _mm512_shuffle_f32x4(q, s, 0xDD);
}

}  // namespace amx
}  // namespace mla_fp4
