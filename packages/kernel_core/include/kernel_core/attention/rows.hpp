// Cache rows to float32, faster than the general decoders because a whole row is decoded at a time.
//
// Bit for bit the values of decode.hpp, which takes over where a shortcut would not hold.
#pragma once

#include "kernel_core/decode.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)

// True when a row holds a NaN code, or a scale outside [low, high].
inline bool window_row_is_odd(const uint8_t* row, int64_t n, uint8_t low, uint8_t high) {
  const __m256i magnitude = _mm256_set1_epi8(0x7F);
  __m256i odd = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i += 32) {
    const __m256i b = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i)), magnitude);
    odd = _mm256_or_si256(odd, _mm256_cmpeq_epi8(b, magnitude));
  }
  bool scale_odd = false;
  for (int64_t g = 0; g < n / 32; ++g) scale_odd |= row[n + g] < low || row[n + g] > high;
  return scale_odd || !_mm256_testz_si256(odd, odd);
}

// An E4M3 byte, sign-extended and shifted, is a half-precision number 2^8 too small; the scale makes up for it.
inline void decode_window_row_fast(const uint8_t* row, float* out, int64_t n) {
  if (window_row_is_odd(row, n, 0, 246)) return decode_window_row(row, out, n);
  const __m256i keep = _mm256_set1_epi16(static_cast<short>(0xBF80));
  for (int64_t g = 0; g < n / 32; ++g) {
    const __m512 scale = _mm512_set1_ps(256.0f * decode_ue8m0(row[n + g]));
    for (int64_t i = g * 32; i < g * 32 + 32; i += 16) {
      const __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i)));
      const __m512 v = _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(b, 7), keep));
      _mm512_storeu_ps(out + i, _mm512_mul_ps(v, scale));
    }
  }
}

// The table look-up takes its index from the low 4 bits of a lane, so nibbles need no mask, only a shift.
inline void decode_main_row_fast(const uint8_t* row, float* out, int64_t n) {
  const __m512 codes = _mm512_load_ps(kE2M1);
  const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
  alignas(64) float scales[16];
  const int64_t groups = n / 16;
  for (int64_t g = 0; g < groups; ++g) {
    if (g % 16 == 0) {
      alignas(16) uint8_t bytes[16] = {};
      std::memcpy(bytes, row + n / 2 + g, groups - g < 16 ? groups - g : 16);
      decode_e4m3_vec(bytes).store(scales);
    }
    uint32_t low, high;
    std::memcpy(&low, row + g * 8, 4);
    std::memcpy(&high, row + g * 8 + 4, 4);
    __m512i words = _mm512_set1_epi32(static_cast<int>(low));
    words = _mm512_mask_set1_epi32(words, 0xFF00, static_cast<int>(high));
    const __m512 v = _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), codes);
    _mm512_storeu_ps(out + g * 16, _mm512_mul_ps(v, _mm512_set1_ps(scales[g % 16])));
  }
}

#else

inline void decode_window_row_fast(const uint8_t* row, float* out, int64_t n) { decode_window_row(row, out, n); }
inline void decode_main_row_fast(const uint8_t* row, float* out, int64_t n) { decode_main_row(row, out, n); }

#endif

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
