// Float32 activations as sums of three bfloat16 numbers, laid out as tiles.
//
// x = hi + mid + lo exactly: each part takes the next 8 bits of the significand by truncation (24 = 8 + 8 + 8), so
// nothing overflows and products with weights that are exact in bfloat16 lose nothing before the float32 sums.
// The tile unit flushes operands and results below 2^-126 to zero. A product of k terms loses at most 3 k 2^-126 by
// that, which shows only in sums that are themselves near the smallest normal numbers.
//
// The parts are rows of their own with sums of their own, which are added at the end: a product with T tokens is
// one with 3 T rows. A block of r <= 16 tokens has the rows hi(0..r-1), mid(0..r-1), lo(0..r-1), in groups of 16.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "amx_tiles.hpp"
#include "matrix.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

// Where the parts of `tokens` tokens lie: groups of tiles, each group's tiles consecutive over k.
struct SplitLayout {
  int64_t tokens, blocks;  // blocks of 32 columns
  int64_t groups;
  int rows;  // of a tile: 16, or fewer where one group holds everything
  int64_t tile_bytes, group_bytes;

  SplitLayout(int64_t n, int64_t k) : tokens(n), blocks((k + 31) / 32) {
    const int64_t rest = n % 16;
    groups = n / 16 * 3 + (3 * rest + 15) / 16;
    rows = groups == 1 ? static_cast<int>(3 * rest) : kTileRows;
    tile_bytes = rows * 64;
    group_bytes = blocks * tile_bytes;
  }
  int64_t bytes() const { return groups * group_bytes; }
  int64_t block_tokens(int64_t t) const { return std::min<int64_t>(16, tokens - t / 16 * 16); }
  // Virtual row of part p of token t: group = row / 16
  int64_t row(int64_t t, int p) const { return t / 16 * 48 + p * block_tokens(t) + t % 16; }
  int64_t row_offset(int64_t row) const { return row / 16 * group_bytes + row % 16 * 64; }
};

// The order of 32 columns inside a tile row is that in which decoding the weights yields them.
struct ColumnOrder {
  alignas(64) uint16_t high_half[32];  // for permutex2var over two registers of float32: the upper half words
};

inline constexpr ColumnOrder make_order(Format format) {
  ColumnOrder order{};
  for (int p = 0; p < 16; ++p) {
    int even = 2 * p, odd = 2 * p + 1;  // bf16: pairs as they are
    if (format == Format::mxfp4) {      // nibble i of the low and the high word of dword j
      even = p / 4 * 8 + p % 4;
      odd = even + 4;
    } else if (format == Format::fp8) {  // byte i of the low and the high word of dword j
      even = p / 2 * 4 + p % 2;
      odd = even + 2;
    }
    order.high_half[2 * p] = static_cast<uint16_t>(2 * even + 1);
    order.high_half[2 * p + 1] = static_cast<uint16_t>(2 * odd + 1);
  }
  return order;
}

inline const ColumnOrder& column_order(Format format) {
  static constexpr ColumnOrder orders[3] = {make_order(Format::mxfp4), make_order(Format::fp8),
                                            make_order(Format::bf16)};
  return orders[static_cast<int>(format)];
}

// n <= 32 values of one token to the three tile rows
inline void split_block(const float* x, int n, __m512i order, char* hi, char* mid, char* lo) {
  const __mmask16 m0 = n >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << n) - 1);
  const __mmask16 m1 = n >= 32 ? 0xFFFF : n <= 16 ? 0 : static_cast<__mmask16>((1u << (n - 16)) - 1);
  const __m512i top = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  const __m512 x0 = _mm512_maskz_loadu_ps(m0, x), x1 = _mm512_maskz_loadu_ps(m1, x + 16);
  const auto truncate = [&](__m512 v) { return _mm512_and_ps(v, _mm512_castsi512_ps(top)); };
  const auto put = [&](char* to, __m512 a, __m512 b) {
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(_mm512_castps_si512(a), order, _mm512_castps_si512(b)));
  };
  put(hi, x0, x1);
  // An infinity has no rest: inf - inf would turn it into NaN.
  constexpr int kInfinity = 0x18;
  const __m512 r0 =
      _mm512_maskz_sub_ps(static_cast<__mmask16>(~_mm512_fpclass_ps_mask(x0, kInfinity)), x0, truncate(x0));
  const __m512 r1 =
      _mm512_maskz_sub_ps(static_cast<__mmask16>(~_mm512_fpclass_ps_mask(x1, kInfinity)), x1, truncate(x1));
  put(mid, r0, r1);
  put(lo, _mm512_sub_ps(r0, truncate(r0)), _mm512_sub_ps(r1, truncate(r1)));
}

// Columns [column, column + n) of tokens [first, last); column is a multiple of 32. Token t is row rows[t], or t; x
// starts at the column.
inline void split_columns(const float* x, int64_t ldx, const int32_t* rows, const SplitLayout& layout, int64_t first,
                          int64_t last, int64_t column, int64_t n, Format format, char* out) {
  const __m512i order = _mm512_load_si512(column_order(format).high_half);
  for (int64_t t = first; t < last; ++t) {
    const float* row = x + (rows ? rows[t] : t) * ldx;
    char* to = out + column / 32 * layout.tile_bytes;
    char* hi = to + layout.row_offset(layout.row(t, 0));
    char* mid = to + layout.row_offset(layout.row(t, 1));
    char* lo = to + layout.row_offset(layout.row(t, 2));
    for (int64_t i = 0; i < n; i += 32) {
      split_block(row + i, static_cast<int>(std::min<int64_t>(32, n - i)), order, hi, mid, lo);
      hi += layout.tile_bytes;
      mid += layout.tile_bytes;
      lo += layout.tile_bytes;
    }
  }
}

// Back to float32, exactly (an infinity comes back as one)
inline void join_token(const char* packed, const SplitLayout& layout, int64_t t, int64_t k, Format format, float* x) {
  const ColumnOrder& order = column_order(format);
  for (int64_t b = 0; b < layout.blocks; ++b) {
    const uint16_t* part[3];
    for (int p = 0; p < 3; ++p)
      part[p] = reinterpret_cast<const uint16_t*>(packed + layout.row_offset(layout.row(t, p)) + b * layout.tile_bytes);
    for (int i = 0; i < 32; ++i) {
      const int64_t column = b * 32 + order.high_half[i] / 2;
      if (column >= k) continue;
      float v[3];
      for (int p = 0; p < 3; ++p) {
        const uint32_t bits = static_cast<uint32_t>(part[p][i]) << 16;
        std::memcpy(&v[p], &bits, 4);
      }
      x[column] = v[0] + (v[1] + v[2]);
    }
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
