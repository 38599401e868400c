// Cache rows as bfloat16 tiles for the tile unit (AMX). Every finite value of the packed formats is exact in bfloat16:
// an E4M3 value has 4 significant bits and its scale is a power of two; E2M1 times E4M3 has at most 6 bits.
//
// A block is 32 keys, held twice:
//   scores: for each 32 channels, 32 keys x 32 channels          (left operand, two tiles of 16 keys)
//   values: for each 32 channels, even then odd channels, 16 pairs of keys x 16 channels x 2   (right operand)
// Both are 64 bytes a line, 2 KiB for each 32 channels.
#pragma once

#include <algorithm>

#include "kernel_core/attention/rows.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

inline constexpr int64_t kBlockKeys = 32;
inline constexpr int64_t kTileWords = 512;                 // bfloat16 values in a tile of 16 x 64 bytes
inline constexpr int64_t kChunkWords = 2 * kTileWords;     // 32 keys x 32 channels
inline int64_t block_words(int64_t dim) { return dim / 32 * kChunkWords; }

// The line of one key for channels 32 c ... 32 c + 31 of a score block
inline uint16_t* key_line(uint16_t* block, int64_t c, int64_t key) { return block + c * kChunkWords + key * 32; }

inline void fill_key(uint16_t* block, int64_t key, int64_t dim, uint16_t value) {
  const __m512i v = _mm512_set1_epi16(static_cast<short>(value));
  for (int64_t c = 0; c < dim / 32; ++c) _mm512_storeu_si512(key_line(block, c, key), v);
}

// The high halves of 32 floats, in order: exact for values that are bfloat16 already, truncation otherwise.
inline __m512i high_halves(__m512 low, __m512 high) {
  const __m512i order = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(_mm512_castps_si512(low), order, _mm512_castps_si512(high));
}

// A row through float32, for scales that the shortcut cannot take. A row with a value that is not finite becomes NaN
// as a whole. Returns false for such a row.
inline bool key_from_floats(const float* row, uint16_t* block, int64_t key, int64_t dim) {
  bool finite = true;
  for (int64_t i = 0; i < dim; ++i) finite &= std::isfinite(row[i]);
  if (!finite) {
    fill_key(block, key, dim, 0x7FC0);
    return false;
  }
  for (int64_t c = 0; c < dim / 32; ++c) {
    const float* x = row + c * 32;
    _mm512_storeu_si512(key_line(block, c, key), high_halves(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)));
  }
  return true;
}

// Codes 1 to 7 (units of 2^-9), as bfloat16 with the exponent of scale 1
inline __m512i e4m3_subnormal_bf16(__m512i codes) {
  const __m512i table = _mm512_zextsi128_si512(_mm_setr_epi16(0, 118 << 7, 119 << 7, (119 << 7) | 64, 120 << 7,
                                                              (120 << 7) | 32, (120 << 7) | 64, (120 << 7) | 96));
  return _mm512_permutexvar_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(7)), table);
}

// A window row as key `key` of a score block. The exponent is moved by integer addition: an E4M3 byte, sign-extended
// and shifted by 4, is a bfloat16 whose exponent is too small by 120; the scale adds its own.
inline bool window_key(const uint8_t* row, uint16_t* block, int64_t key, int64_t dim, float* scratch) {
  if (window_row_is_odd(row, dim, 10, 246)) {
    decode_window_row(row, scratch, dim);
    return key_from_floats(scratch, block, key, dim);
  }
  const __m512i keep = _mm512_set1_epi16(static_cast<short>(0x87F0)), exponent = _mm512_set1_epi16(0x78);
  for (int64_t c = 0; c < dim / 32; ++c) {
    const int scale = row[dim + c];
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c * 32)));
    const __mmask32 normal = _mm512_test_epi16_mask(codes, exponent);
    const __m512i shifted = _mm512_and_si512(_mm512_slli_epi16(codes, 4), keep);
    const __m512i moved = _mm512_set1_epi16(static_cast<short>((scale - 7) << 7));
    __m512i v = _mm512_mask_add_epi16(shifted, normal, shifted, moved);
    const __mmask32 subnormal = _mm512_mask_test_epi16_mask(~normal, codes, _mm512_set1_epi16(7));
    if (subnormal) {
      const __m512i sign = _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<short>(0x8000)));
      const __m512i up = _mm512_set1_epi16(static_cast<short>((scale - 127) * 128));
      const __m512i value = _mm512_or_si512(sign, _mm512_add_epi16(e4m3_subnormal_bf16(codes), up));
      v = _mm512_mask_mov_epi16(v, subnormal, value);
    } else {
      v = _mm512_maskz_mov_epi16(normal, v);  // zeros without their sign, like an absent key
    }
    _mm512_storeu_si512(key_line(block, c, key), v);
  }
  return true;
}

// A main row as key `key` of a score block: even and odd channels are looked up apart and joined as word pairs.
inline bool main_key(const uint8_t* row, uint16_t* block, int64_t key, int64_t dim) {
  const __m512 codes = _mm512_load_ps(kE2M1);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  const int64_t groups = dim / 16;
  __mmask16 odd = 0;
  for (int64_t g = 0; g < groups; g += 16) {
    const int64_t n = groups - g < 16 ? groups - g : 16;
    alignas(16) uint8_t bytes[16] = {};
    std::memcpy(bytes, row + dim / 2 + g, static_cast<size_t>(n));
    const __m512 scales = decode_e4m3_vec(bytes).v;
    odd |= _mm512_cmp_ps_mask(scales, scales, _CMP_UNORD_Q);
    __m512i pick = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    for (int64_t c = g / 2; c < (g + n) / 2; ++c) {
      const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + c * 16)));
      const __m512 scale = _mm512_permutexvar_ps(pick, scales);
      pick = _mm512_add_epi32(pick, _mm512_set1_epi32(2));
      const __m512 even = _mm512_mul_ps(_mm512_permutexvar_ps(pairs, codes), scale);
      const __m512 odds = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), codes), scale);
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
      // low | (odds & high)
      _mm512_storeu_si512(key_line(block, c, key), _mm512_ternarylogic_epi32(low, _mm512_castps_si512(odds), high, 0xF8));
    }
  }
  if (odd) fill_key(block, key, dim, 0x7FC0);
  return !odd;
}

// The value form of a score block: pairs of keys interleaved, even channels apart from odd ones.
inline void value_form(const uint16_t* scores, uint16_t* values, int64_t dim) {
  const __mmask32 second = 0xAAAAAAAA;
  for (int64_t c = 0; c < dim / 32; ++c) {
    const uint16_t* from = scores + c * kChunkWords;
    uint16_t* to = values + c * kChunkWords;
    for (int64_t pair = 0; pair < kBlockKeys / 2; ++pair) {
      const __m512i a = _mm512_loadu_si512(from + pair * 64), b = _mm512_loadu_si512(from + pair * 64 + 32);
      _mm512_storeu_si512(to + pair * 32, _mm512_mask_mov_epi16(a, second, _mm512_slli_epi32(b, 16)));
      _mm512_storeu_si512(to + kTileWords + pair * 32, _mm512_mask_mov_epi16(_mm512_srli_epi32(a, 16), second, b));
    }
  }
}

// Zeros in place of a key that is not finite: weight 0 times NaN would reach rows that do not see the key. Rows that
// do see it get NaN through their scores.
inline void erase_value(uint16_t* values, int64_t key, int64_t dim) {
  for (int64_t line = 0; line < dim / 16; ++line)
    for (int64_t i = 0; i < 16; ++i) values[line * kTileWords + key / 2 * 32 + 2 * i + key % 2] = 0;
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
