// Float32 operands of the tile unit as three bfloat16 parts, and its sums back in place.
#pragma once

#include "kernel_core/attention/bf16_rows.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

inline constexpr int64_t kParts = 3;

// How heads and parts fill tiles of 16. Few heads: one tile with all parts side by side. Many: 16 heads a tile and
// one product for each part.
struct PartLayout {
  bool side_by_side = false;
  int64_t tiles = 0, parts = 0;
  PartLayout() = default;
  // The way follows from all heads of the call, so that a share of them is computed like the whole.
  PartLayout(int64_t all_heads, int64_t heads) : side_by_side(kParts * all_heads <= 16) {
    tiles = side_by_side ? 1 : (heads + 15) / 16;
    parts = side_by_side ? 1 : kParts;
  }
};

// Each part is the remainder's high 16 bits: truncation, so that no part overflows and the last one is exact.
inline void split_bf16(__m512 low, __m512 high, __m512i* parts) {
  const __m512 mask = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
  for (int64_t part = 0; part < kParts; ++part) {
    parts[part] = high_halves(low, high);
    low = _mm512_sub_ps(low, _mm512_and_ps(low, mask));
    high = _mm512_sub_ps(high, _mm512_and_ps(high, mask));
  }
}

inline void transpose_16x16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xDD);
    }
  }
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xDD);
  }
}

// Queries as right operands: for each tile, part and 32 channels, 16 pairs of channels x 16 columns.
inline void split_queries(const float* q, int64_t heads, int64_t dim, const PartLayout& layout, uint16_t* out) {
  const int64_t chunks = dim / 32, columns = layout.side_by_side ? heads : 16;
  for (int64_t t = 0; t < layout.tiles; ++t) {
    const int64_t n = std::min(columns, heads - t * 16);
    for (int64_t c = 0; c < chunks; ++c) {
      __m512i words[kParts][16];
      for (auto& part : words)
        for (__m512i& column : part) column = _mm512_setzero_si512();
      for (int64_t h = 0; h < n; ++h) {
        const float* x = q + (t * 16 + h) * dim + c * 32;
        __m512i parts[kParts];
        split_bf16(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), parts);
        for (int64_t part = 0; part < kParts; ++part) {
          if (layout.side_by_side) {
            words[0][part * heads + h] = parts[part];
          } else {
            words[part][h] = parts[part];
          }
        }
      }
      for (int64_t part = 0; part < layout.parts; ++part) {
        transpose_16x16(words[part]);
        uint16_t* to = out + ((t * layout.parts + part) * chunks + c) * kTileWords;
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * 32, words[part][i]);
      }
    }
  }
}

// Weights as left operands: for each tile, part and block of 32 keys, 16 lines x 32 keys.
inline void split_weights(const float* weights, int64_t heads, int64_t places, const PartLayout& layout,
                          uint16_t* out) {
  const int64_t blocks = places / kBlockKeys, rows = layout.side_by_side ? kParts * heads : heads;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t b = 0; b < blocks; ++b) {
      const float* x = weights + h * places + b * kBlockKeys;
      __m512i parts[kParts];
      split_bf16(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), parts);
      for (int64_t part = 0; part < kParts; ++part) {
        const int64_t tile = layout.side_by_side ? 0 : h / 16 * kParts + part;
        const int64_t line = layout.side_by_side ? part * heads + h : h % 16;
        _mm512_storeu_si512(out + (tile * blocks + b) * kTileWords + line * 32, parts[part]);
      }
    }
  }
  for (int64_t line = rows; line < layout.tiles * 16; ++line) {  // lines of no head
    for (int64_t part = 0; part < layout.parts; ++part)
      for (int64_t b = 0; b < blocks; ++b)
        _mm512_storeu_si512(out + ((line / 16 * layout.parts + part) * blocks + b) * kTileWords + line % 16 * 32,
                            _mm512_setzero_si512());
  }
}

// Sums of 16 keys x 16 columns to scores[h][0 .. 15] for the heads from `head` on.
inline void place_scores(const float* sums, const PartLayout& layout, int64_t head, int64_t heads, float scale,
                         float* scores, int64_t stride) {
  __m512i columns[16];
  for (int i = 0; i < 16; ++i) columns[i] = _mm512_load_si512(sums + i * 16);
  transpose_16x16(columns);
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t h = head; h < std::min(heads, head + 16); ++h) {
    __m512 s = _mm512_castsi512_ps(columns[h - head]);
    if (layout.side_by_side) {
      const __m512 rest =
          _mm512_add_ps(_mm512_castsi512_ps(columns[heads + h]), _mm512_castsi512_ps(columns[2 * heads + h]));
      s = _mm512_add_ps(s, rest);
    }
    _mm512_storeu_ps(scores + h * stride, _mm512_mul_ps(s, factor));
  }
}

// Sums of 16 lines x (16 even, then 16 odd channels) to out[h][0 .. 31] for the heads from `head` on.
inline void place_values(const float* sums, const PartLayout& layout, int64_t head, int64_t heads, const float* factor,
                         float* out, int64_t dim) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t h = head; h < std::min(heads, head + 16); ++h) {
    const auto line = [&](int64_t half, int64_t i) { return _mm512_load_ps(sums + half * 256 + i * 16); };
    __m512 halves[2];
    for (int64_t half = 0; half < 2; ++half) {
      halves[half] = line(half, h - head);
      if (layout.side_by_side)
        halves[half] = _mm512_add_ps(halves[half], _mm512_add_ps(line(half, heads + h), line(half, 2 * heads + h)));
      halves[half] = _mm512_mul_ps(halves[half], _mm512_set1_ps(factor[h]));
    }
    _mm512_storeu_ps(out + h * dim, _mm512_permutex2var_ps(halves[0], low, halves[1]));
    _mm512_storeu_ps(out + h * dim + 16, _mm512_permutex2var_ps(halves[0], high, halves[1]));
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
