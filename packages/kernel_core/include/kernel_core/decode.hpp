// Stored number formats to float32, one register at a time (spec: E2M1, E4M3 "fn", UE8M0).
//
// Exact by construction: every code is a float32 value. Included by kernels after choosing an instruction set.
#pragma once

#include "kernel_core/simd.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

// Magnitudes by code, bit 3 is the sign.
alignas(64) inline constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// 2^(b - 127); 0 is the subnormal 2^-127, 255 is NaN
inline float decode_ue8m0(uint8_t b) {
  if (b == 255) return std::numeric_limits<float>::quiet_NaN();
  return bit_cast<float>(b ? static_cast<uint32_t>(b) << 23 : 0x00400000u);
}

inline float decode_e4m3(uint8_t b) {
  const uint32_t magnitude = b & 0x7F;
  float f;
  if (magnitude == 0x7F) {
    f = std::numeric_limits<float>::quiet_NaN();
  } else if (magnitude < 8) {
    f = static_cast<float>(magnitude) * 0.001953125f;  // subnormal: units of 2^-9
  } else {
    f = bit_cast<float>((magnitude << 20) + (120u << 23));
  }
  return b & 0x80 ? -f : f;
}

#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)

// 16 E4M3 bytes. The 7 magnitude bits are a half-precision number 2^8 too small.
inline F32 decode_e4m3_vec(const uint8_t* p) {
  const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(b, _mm256_set1_epi16(0x7F));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
  __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7),
                                 _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(0x80)), 8));
  half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7E00));
  return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))};
}

// 16 codes from 8 bytes, even element in the low nibble
inline F32 decode_e2m1_vec(const uint8_t* p) {
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i nibble = _mm_set1_epi8(0x0F);
  const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(b, nibble), _mm_and_si128(_mm_srli_epi16(b, 4), nibble));
  return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), _mm512_load_ps(kE2M1))};
}

#elif defined(KERNEL_CORE_ISA_avx2)

inline F32 decode_e4m3_vec(const uint8_t* p) {
  const __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i magnitude = _mm_and_si128(b, _mm_set1_epi16(0x7F));
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F));
  __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x80)), 8));
  half = _mm_blendv_epi8(half, _mm_set1_epi16(0x7E00), nan);
  return {_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f))};
}

inline F32 decode_e2m1_vec(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  const __m128i b = _mm_cvtsi32_si128(static_cast<int>(word));
  const __m128i nibble = _mm_set1_epi8(0x0F);
  const __m128i bytes = _mm_unpacklo_epi8(_mm_and_si128(b, nibble), _mm_and_si128(_mm_srli_epi16(b, 4), nibble));
  const __m256i codes = _mm256_cvtepu8_epi32(bytes);
  const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_load_ps(kE2M1), codes);  // uses the low 3 bits
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
  return {_mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign))};
}

#else

inline F32 decode_e4m3_vec(const uint8_t* p) { return {decode_e4m3(*p)}; }

#endif

// n codes of a row (n even) to float32, without scales; any level
inline void decode_e2m1(const uint8_t* p, float* out, int64_t n) {
  int64_t i = 0;
#if !defined(KERNEL_CORE_ISA_scalar)
  for (; i + F32::width <= n; i += F32::width) decode_e2m1_vec(p + i / 2).store(out + i);
#endif
  for (; i < n; ++i) out[i] = kE2M1[(p[i / 2] >> (i % 2 * 4)) & 15];
}

inline void decode_e4m3(const uint8_t* p, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + F32::width <= n; i += F32::width) decode_e4m3_vec(p + i).store(out + i);
  for (; i < n; ++i) out[i] = decode_e4m3(p[i]);
}

// A main row: n E2M1 codes in n/2 bytes, then n/16 E4M3 scales.
inline void decode_main_row(const uint8_t* row, float* out, int64_t n) {
  const uint8_t* scales = row + n / 2;
  for (int64_t g = 0; g < n / 16; ++g) {
    const F32 scale = F32::set(decode_e4m3(scales[g]));
#if defined(KERNEL_CORE_ISA_scalar)
    for (int64_t i = g * 16; i < g * 16 + 16; ++i) out[i] = kE2M1[(row[i / 2] >> (i % 2 * 4)) & 15] * scale.v;
#else
    for (int64_t i = g * 16; i < g * 16 + 16; i += F32::width) (decode_e2m1_vec(row + i / 2) * scale).store(out + i);
#endif
  }
}

// n E4M3 values and n/32 UE8M0 scales, stored apart
inline void decode_mxfp8_row(const uint8_t* codes, const uint8_t* scales, float* out, int64_t n) {
  for (int64_t g = 0; g < n / 32; ++g) {
    const F32 scale = F32::set(decode_ue8m0(scales[g]));
    for (int64_t i = g * 32; i < g * 32 + 32; i += F32::width) (decode_e4m3_vec(codes + i) * scale).store(out + i);
  }
}

// A window row: n E4M3 values, then n/32 UE8M0 scales.
inline void decode_window_row(const uint8_t* row, float* out, int64_t n) { decode_mxfp8_row(row, row + n, out, n); }

// An index key (or an MXFP4 weight row): n E2M1 codes and n/32 UE8M0 scales, stored apart.
inline void decode_mxfp4_row(const uint8_t* codes, const uint8_t* scales, float* out, int64_t n) {
  for (int64_t g = 0; g < n / 32; ++g) {
    const F32 scale = F32::set(decode_ue8m0(scales[g]));
#if defined(KERNEL_CORE_ISA_scalar)
    for (int64_t i = g * 32; i < g * 32 + 32; ++i) out[i] = kE2M1[(codes[i / 2] >> (i % 2 * 4)) & 15] * scale.v;
#else
    for (int64_t i = g * 32; i < g * 32 + 32; i += F32::width) (decode_e2m1_vec(codes + i / 2) * scale).store(out + i);
#endif
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
