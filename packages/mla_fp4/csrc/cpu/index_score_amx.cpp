// Index scores with AMX-BF16 for packed keys.
//
// A code times its power-of-two scale has two significant bits, so keys and quantised queries are exact in bfloat16
// and the products are exact in float32; only the sum over channels rounds, in the fixed order of the tile unit
// (which flushes subnormals: scales below 2^-125 count as zero). Keys are the rows of the product, one step for one
// scale group, and (row, head) pairs its columns:
//
//   keys [16 x 32] . queries [32 x 16] -> [16 keys x 16 columns], then relu, weights, and the sum over a row's heads.
#include <algorithm>
#include <array>
#include <vector>

#include "cpu/index_score.hpp"
#include "cpu/key_walk.hpp"
#include "kernel_core/encode.hpp"

namespace mla_fp4 {
namespace amx {

using namespace kernel_core::amx;

namespace {

constexpr int kColumns = 16;             // of a tile
constexpr int64_t kTileBytes = 1024;     // 16 rows of 64 bytes
constexpr int kKeys = 64;                // decoded together: four tiles of rows
using Words = std::array<uint16_t, 32>;  // bfloat16 by code; twice, so that the fifth bit of an index is free

// One table for each scale byte. Truncation is exact but for subnormal results.
const Words* bf16_tables() {
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
  const __m512i spread = _mm512_set_epi32(0x0F80800F, 0x0E80800E, 0x0D80800D, 0x0C80800C, 0x0B80800B, 0x0A80800A,
                                          0x09808009, 0x08808008, 0x07808007, 0x06808006, 0x05808005, 0x04808004,
                                          0x03808003, 0x02808002, 0x01808001, static_cast<int>(0x00808000));
  const __m512i index = _mm512_srlv_epi16(_mm512_shuffle_epi8(bytes, spread), _mm512_set1_epi32(0x000C0000));
  return _mm512_permutexvar_epi16(index, _mm512_loadu_si512(table.data()));
}

// Columns of one row: the heads, rounded up to a power of two that divides 32
int64_t row_columns(int64_t heads) {
  int64_t columns = 4;
  while (columns < heads) columns *= 2;
  return columns;
}

int64_t column_tiles(int64_t rows, int64_t heads) { return (rows * row_columns(heads) + kColumns - 1) / kColumns; }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct alignas(64) Scratch {
  float product[4][16][16];  // key, column
};

// Sixteen keys of four columns each a lane: v[k] is summed over the four channels of every 128-bit lane, and
// out[lane] gets the sixteen sums in key order.
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

inline void store_scores(const ScoreArgs& a, int64_t row, int64_t key, int64_t count, __m512 scores) {
  if (row < a.rows && count > 0)
    _mm512_mask_storeu_ps(a.out + row * a.stride + key, F32::mask(count < 16 ? count : 16), scores);
}

// relu, weights and the sum over heads of a 16 x 16 product; `second` continues the columns of a row of 32 heads
inline void finish(const ScoreArgs& a, int64_t columns, int64_t tile, int64_t key, int64_t count,
                   const float (*product)[16], const float (*second)[16]) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512 w0 = _mm512_loadu_ps(a.packed_weights + tile * kColumns);
  __m512 v[16], sums[4];
  for (int k = 0; k < 16; ++k) v[k] = _mm512_mul_ps(_mm512_max_ps(zero, _mm512_load_ps(product[k])), w0);
  if (second) {
    const __m512 w1 = _mm512_loadu_ps(a.packed_weights + (tile + 1) * kColumns);
    for (int k = 0; k < 16; ++k) v[k] = _mm512_fmadd_ps(_mm512_max_ps(zero, _mm512_load_ps(second[k])), w1, v[k]);
  }
  sum_lanes(v, sums);
  const int64_t row = tile * kColumns / columns;
  if (columns == 4) {
    for (int i = 0; i < 4; ++i) store_scores(a, row + i, key, count, sums[i]);
  } else if (columns == 8) {
    store_scores(a, row, key, count, _mm512_add_ps(sums[0], sums[1]));
    store_scores(a, row + 1, key, count, _mm512_add_ps(sums[2], sums[3]));
  } else {
    store_scores(a, row, key, count, _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
  }
}

// Two tiles of keys by two of columns
inline void multiply_2x2(const uint8_t* keys, const uint8_t* queries, int64_t steps, Scratch& s) {
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
  }
  _tile_stored(0, s.product[0], 64);
  _tile_stored(1, s.product[1], 64);
  _tile_stored(2, s.product[2], 64);
  _tile_stored(3, s.product[3], 64);
}

// Four tiles of keys by one of columns
inline void multiply_4x1(const uint8_t* keys, const uint8_t* queries, int64_t steps, Scratch& s) {
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
  }
  _tile_stored(0, s.product[0], 64);
  _tile_stored(1, s.product[1], 64);
  _tile_stored(2, s.product[2], 64);
  _tile_stored(3, s.product[3], 64);
}

// Keys [begin, end) as tiles [16 keys][32 channels], steps of a tile row next to each other; missing keys are zero.
void load_keys(const ScoreArgs& a, int64_t begin, int64_t end, const Words* tables, uint8_t* tiles) {
  const int64_t steps = a.keys.dim / 32;
  const auto place = [&](int64_t i) { return tiles + (i / 16 * steps * 16 + i % 16) * 64; };
  walk_keys(a, begin, end, [&](int64_t i, const uint8_t* codes, const uint8_t* scales) {
    uint8_t* to = place(i - begin);
    for (int64_t g = 0; g < steps; ++g)
      _mm512_store_si512(to + g * kTileBytes, decode_group(codes + g * 16, tables[scales[g]]));
  });
  for (int64_t i = end - begin; i < kKeys; ++i)
    for (int64_t g = 0; g < steps; ++g) std::memset(place(i) + g * kTileBytes, 0, 64);
}

}  // namespace

PackedSize packed_size(int64_t rows, int64_t heads, int64_t dim) {
  const int64_t tiles = column_tiles(rows, heads);
  return {tiles * (dim / 32) * kTileBytes, tiles * kColumns};
}

// Column tiles as [32 channels / 2][16 columns][2], the order of the second operand
void pack_queries(const PackArgs& a) {
  const int64_t steps = a.dim / 32, columns = row_columns(a.heads);
  const Words* tables = bf16_tables();
  auto* out = static_cast<uint8_t*>(a.packed);
  const PackedSize size = packed_size(a.rows, a.heads, a.dim);
  std::memset(out, 0, static_cast<size_t>(size.bytes));
  std::fill(a.packed_weights, a.packed_weights + size.weights, 0.0f);
  std::vector<uint8_t> codes(static_cast<size_t>(a.dim / 2)), scales(static_cast<size_t>(steps));
  alignas(64) uint32_t pairs[16];
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t column = row * columns + h;
      a.packed_weights[column] = a.weights[row * a.heads + h];
      encode_mxfp4_row(a.q + (row * a.heads + h) * a.dim, codes.data(), scales.data(), a.dim);
      for (int64_t g = 0; g < steps; ++g) {
        _mm512_store_si512(pairs, decode_group(codes.data() + g * 16, tables[scales[static_cast<size_t>(g)]]));
        auto* to = reinterpret_cast<uint32_t*>(out + (column / kColumns * steps + g) * kTileBytes) + column % kColumns;
        for (int i = 0; i < 16; ++i) to[i * kColumns] = pairs[i];
      }
    }
  }
}

void score_keys(const ScoreArgs& a) {
  static thread_local std::vector<uint8_t> buffer;
  const int64_t steps = a.keys.dim / 32, columns = row_columns(a.heads), tiles = column_tiles(a.rows, a.heads);
  buffer.resize(static_cast<size_t>(kKeys / 16 * steps * kTileBytes + 64));
  auto* keys = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) & ~uintptr_t{63});
  const auto* queries = static_cast<const uint8_t*>(a.packed);
  const Words* tables = bf16_tables();
  const bool wide = columns == 32;  // a row takes two tiles
  Scratch s;
  const TileConfig config;
  _tile_loadconfig(&config);
  for (int64_t begin = 0; begin < a.count; begin += kKeys) {
    const int64_t end = std::min<int64_t>(begin + kKeys, a.count);
    load_keys(a, begin, end, tables, keys);
    int64_t tile = 0;
    for (; tile + 2 <= tiles; tile += 2) {
      for (int64_t half = 0; half < 2 && begin + half * 32 < end; ++half) {
        multiply_2x2(keys + half * 2 * steps * kTileBytes, queries + tile * steps * kTileBytes, steps, s);
        for (int64_t i = 0; i < 2; ++i) {
          const int64_t key = begin + half * 32 + i * 16;
          finish(a, columns, tile, key, end - key, s.product[2 * i], wide ? s.product[2 * i + 1] : nullptr);
          if (!wide) finish(a, columns, tile + 1, key, end - key, s.product[2 * i + 1], nullptr);
        }
      }
    }
    if (tile < tiles) {
      multiply_4x1(keys, queries + tile * steps * kTileBytes, steps, s);
      for (int64_t i = 0; i < 4; ++i)
        finish(a, columns, tile, begin + i * 16, end - begin - i * 16, s.product[i], nullptr);
    }
  }
  _tile_release();
}

}  // namespace amx
}  // namespace mla_fp4
