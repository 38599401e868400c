// Cache rows as bfloat16 operands of the tile unit (AMX). Every finite value of the packed formats is exact in
// bfloat16: an E4M3 value has 4 significant bits and its scale is a power of two; E2M1 times E4M3 has at most 6 bits.
//
// A block is 32 keys, held twice:
//   scores: for each 32 channels, 32 keys x 32 channels          (left operand, two tiles of 16 keys)
//   values: for each 32 channels, even then odd channels, 16 pairs of keys x 16 channels x 2   (right operand)
// Both are 64 bytes a line, 2 KiB for each 32 channels. Keys are decoded in pairs, which share value lines.
#pragma once

#include <algorithm>

#include "kernel_core/attention/rows.hpp"
#include "kernel_core/attention/scratch.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

inline constexpr int64_t kBlockKeys = 32;
inline constexpr int64_t kTileWords = 512;              // bfloat16 values in a tile of 16 lines of 64 bytes
inline constexpr int64_t kChunkWords = 2 * kTileWords;  // 32 keys x 32 channels
inline int64_t block_words(int64_t dim) { return dim / 32 * kChunkWords; }

inline __mmask16 first_lanes(int64_t n) { return n < 16 ? static_cast<__mmask16>((1u << n) - 1) : 0xFFFF; }

// The high halves of 32 floats, in order: exact for values that are bfloat16 already, truncation otherwise.
inline __m512i high_halves(__m512 low, __m512 high) {
  const __m512i order = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(_mm512_castps_si512(low), order, _mm512_castps_si512(high));
}

// 32 channels of keys 2 pair (a) and 2 pair + 1 (b), in both forms of their chunk.
inline void store_pair(__m512i a, __m512i b, uint16_t* scores, uint16_t* values, int64_t pair) {
  const __mmask32 second = 0xAAAAAAAA;
  uint16_t *keys = scores + pair * 64, *lines = values + pair * 32;
  _mm512_store_si512(keys, a);
  _mm512_store_si512(keys + 32, b);
  _mm512_store_si512(lines, _mm512_mask_mov_epi16(a, second, _mm512_slli_epi32(b, 16)));
  _mm512_store_si512(lines + kTileWords, _mm512_mask_mov_epi16(_mm512_srli_epi32(a, 16), second, b));
}

// What a window row needs: the shortcut alone, the shortcut with subnormal codes, or the way through float32 (a NaN).
enum class RowClass { plain, subnormal, odd };

inline RowClass classify_codes(const uint8_t* codes, int64_t dim) {
  const __m512i two = _mm512_set1_epi8(2);
  __m512i low = _mm512_set1_epi8(-1), high = _mm512_setzero_si512();
  for (int64_t i = 0; i < dim; i += 64) {
    const __m512i b = _mm512_maskz_loadu_epi8(dim - i < 64 ? 0xFFFFFFFFu : ~__mmask64{0}, codes + i);
    const __m512i twice = _mm512_add_epi8(b, b);  // without the sign: 0 zero, 2 to 14 subnormal, 254 NaN
    low = _mm512_min_epu8(low, _mm512_sub_epi8(twice, two));
    high = _mm512_max_epu8(high, twice);
  }
  if (_mm512_cmpeq_epi8_mask(high, _mm512_set1_epi8(static_cast<char>(254)))) return RowClass::odd;
  return _mm512_cmple_epu8_mask(low, _mm512_set1_epi8(12)) ? RowClass::subnormal : RowClass::plain;
}

// 32 codes to bfloat16. An E4M3 byte, sign-extended and shifted by 4, is a bfloat16 whose exponent is too small by
// 120; `up` adds that and the scale's own exponent by integer addition.
template <bool kSubnormal>
inline __m512i window_values(const uint8_t* codes, uint32_t up) {
  const __m512i keep = _mm512_set1_epi16(static_cast<short>(0x87F0)), exponent = _mm512_set1_epi16(0x0780);
  const __m512i bytes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i shifted = _mm512_and_si512(_mm512_slli_epi16(bytes, 4), keep);
  const __mmask32 normal = _mm512_test_epi16_mask(shifted, exponent);
  const __m512i moved = _mm512_set1_epi32(static_cast<int>(up));
  const __m512i v = _mm512_maskz_add_epi16(normal, shifted, moved);
  if constexpr (!kSubnormal) return v;
  // units of 2^-9, as bfloat16 less the 120 that `up` adds
  const __m512i table = _mm512_zextsi128_si512(_mm_setr_epi16(0, -2 * 128, -128, -64, 0, 32, 64, 96));
  const __mmask32 subnormal = _mm512_mask_test_epi16_mask(~normal, bytes, _mm512_set1_epi16(7));
  const __m512i units = _mm512_permutexvar_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(7)), table);
  const __m512i sign = _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<short>(0x8000)));
  return _mm512_mask_mov_epi16(v, subnormal, _mm512_or_si512(sign, _mm512_add_epi16(units, moved)));
}

// 32 codes and their two scales. Even and odd channels are looked up apart and joined as word pairs.
inline __m512i main_values(const uint8_t* codes, const uint32_t* scales) {
  const __m512 table = _mm512_load_ps(kE2M1);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  const __m512 scale = _mm512_castsi512_ps(
      _mm512_mask_set1_epi32(_mm512_set1_epi32(static_cast<int>(scales[0])), 0xFF00, static_cast<int>(scales[1])));
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512 even = _mm512_mul_ps(_mm512_permutexvar_ps(bytes, table), scale);
  const __m512 odd = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table), scale);
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
  return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(odd), high, 0xF8);  // low | (odd & high)
}

// A block of rows that is about to be decoded. Null stands for a place without a key: a pair of them is left out, and
// leaves whatever finite values its lines held, for their weight is 0; beside a key it counts as zeros.
//
// Opening looks at all scales: for window rows it makes what they add to exponents, (scale - 7) << 7 in both halves of
// a word, for main rows floats. Then each chunk of 32 channels is made on its own, in both forms, so that stores run
// through memory in order.
class BlockRows {
 public:
  // False when a row needs the way through float32: a NaN, or a scale that takes an exponent out of range.
  bool open_window(const uint8_t* const* rows, int64_t dim) {
    uint32_t* steps = open(rows, dim / 32, dim + dim / 32, 127);  // zeros of scale 1
    for (int64_t i = 2 * begin_; i < 2 * end_; ++i) {
      const RowClass kind = classify_codes(rows_[i], dim);
      bool odd = kind == RowClass::odd;
      for (int64_t g = 0; g < groups_; g += 16) {
        const __mmask16 some = first_lanes(groups_ - g);
        const __m128i scales = _mm_maskz_loadu_epi8(some, rows_[i] + dim + g);
        const __m128i from_10 = _mm_sub_epi8(scales, _mm_set1_epi8(10));
        odd |= _mm_mask_cmpgt_epu8_mask(some, from_10, _mm_set1_epi8(static_cast<char>(236))) != 0;  // not 10 to 246
        const __m512i step = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_cvtepu8_epi32(scales), _mm512_set1_epi32(7)), 7);
        _mm512_mask_storeu_epi32(steps + i * groups_ + g, some, _mm512_or_si512(_mm512_slli_epi32(step, 16), step));
      }
      subnormal_ |= static_cast<uint32_t>(kind == RowClass::subnormal) << i;
      odd_ |= static_cast<uint32_t>(odd) << i;
    }
    return odd_ == 0;
  }

  bool open_main(const uint8_t* const* rows, int64_t dim) {
    uint32_t* scales = open(rows, dim / 16, dim / 2 + dim / 16, 0);
    for (int64_t i = 2 * begin_; i < 2 * end_; ++i) {
      for (int64_t g = 0; g < groups_; g += 16) {
        alignas(16) uint8_t bytes[16];
        const __mmask16 some = first_lanes(groups_ - g);
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm_maskz_loadu_epi8(some, rows_[i] + dim / 2 + g));
        const __m512 v = decode_e4m3_vec(bytes).v;
        _mm512_mask_storeu_ps(scales + i * groups_ + g, some, v);
        odd_ |= static_cast<uint32_t>(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0) << i;
      }
    }
    return odd_ == 0;
  }

  // Chunk c of all keys; rows that are odd give values not to rely on.
  void window_chunk(int64_t c, uint16_t* scores, uint16_t* values) const {
    for (int64_t pair = begin_; pair < end_; ++pair) {
      const uint8_t *a = rows_[2 * pair] + c * 32, *b = rows_[2 * pair + 1] + c * 32;
      const uint32_t* steps = table_.data() + 2 * pair * groups_ + c;
      if (subnormal_ >> (2 * pair) & 3) {
        store_pair(window_values<true>(a, steps[0]), window_values<true>(b, steps[groups_]), scores, values, pair);
      } else {
        store_pair(window_values<false>(a, steps[0]), window_values<false>(b, steps[groups_]), scores, values, pair);
      }
    }
  }

  void main_chunk(int64_t c, uint16_t* scores, uint16_t* values) const {
    for (int64_t pair = begin_; pair < end_; ++pair) {
      const uint8_t *a = rows_[2 * pair] + c * 16, *b = rows_[2 * pair + 1] + c * 16;
      const uint32_t* scales = table_.data() + 2 * (pair * groups_ + c);
      store_pair(main_values(a, scales), main_values(b, scales + groups_), scores, values, pair);
    }
  }

  uint32_t odd() const { return odd_; }  // a bit a row
  const uint8_t* row(int64_t i) const { return rows_[i]; }

 private:
  uint32_t* open(const uint8_t* const* rows, int64_t groups, int64_t bytes, uint8_t scale) {
    groups_ = groups, subnormal_ = 0, odd_ = 0, begin_ = 0, end_ = kBlockKeys / 2;
    uint8_t* zeros = zeros_.reserve(bytes);
    std::memset(zeros, 0, static_cast<size_t>(bytes - groups));
    std::memset(zeros + bytes - groups, scale, static_cast<size_t>(groups));
    while (begin_ < end_ && !rows[2 * begin_] && !rows[2 * begin_ + 1]) ++begin_;
    while (begin_ < end_ && !rows[2 * end_ - 2] && !rows[2 * end_ - 1]) --end_;
    for (int64_t i = 2 * begin_; i < 2 * end_; ++i) rows_[i] = rows[i] ? rows[i] : zeros;
    return table_.reserve(kBlockKeys * groups_);
  }

  const uint8_t* rows_[kBlockKeys] = {};
  int64_t groups_ = 0, begin_ = 0, end_ = 0;  // scales a row; pairs with a key
  uint32_t subnormal_ = 0, odd_ = 0;
  Scratch<uint32_t> table_;
  Scratch<uint8_t> zeros_;
};

// Row i of a block through float32, after its chunks were made. A row with a value that is not finite becomes NaN as a
// whole where scores are made of it, and zero as a value: weight 0 times NaN would reach rows that do not see the key,
// while those that do see it get NaN through their scores. `x` holds the decoded row.
inline void replace_row(const float* x, uint16_t* scores, uint16_t* values, int64_t i, int64_t dim) {
  bool finite = true;
  for (int64_t d = 0; d < dim; ++d) finite &= std::isfinite(x[d]);
  for (int64_t c = 0; c < dim / 32; ++c, x += 32, scores += kChunkWords, values += kChunkWords) {
    alignas(64) uint16_t v[32] = {};
    if (finite) _mm512_store_si512(v, high_halves(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)));
    for (int64_t d = 0; d < 32; ++d) {
      scores[i * 32 + d] = finite ? v[d] : 0x7FC0;
      values[d % 2 * kTileWords + i / 2 * 32 + d / 2 * 2 + i % 2] = v[d];
    }
  }
}

// A whole block in both forms; `scratch` holds dim floats.
inline void decode_window_block(BlockRows& block, const uint8_t* const* rows, uint16_t* scores, uint16_t* values,
                                int64_t dim, float* scratch) {
  block.open_window(rows, dim);
  for (int64_t c = 0; c < dim / 32; ++c) block.window_chunk(c, scores + c * kChunkWords, values + c * kChunkWords);
  for (int64_t i = 0; block.odd() != 0 && i < kBlockKeys; ++i) {
    if (!(block.odd() >> i & 1)) continue;
    decode_window_row(block.row(i), scratch, dim);
    replace_row(scratch, scores, values, i, dim);
  }
}

inline void decode_main_block(BlockRows& block, const uint8_t* const* rows, uint16_t* scores, uint16_t* values,
                              int64_t dim, float* scratch) {
  block.open_main(rows, dim);
  for (int64_t c = 0; c < dim / 32; ++c) block.main_chunk(c, scores + c * kChunkWords, values + c * kChunkWords);
  for (int64_t i = 0; block.odd() != 0 && i < kBlockKeys; ++i) {
    if (!(block.odd() >> i & 1)) continue;
    decode_main_row(block.row(i), scratch, dim);
    replace_row(scratch, scores, values, i, dim);
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
