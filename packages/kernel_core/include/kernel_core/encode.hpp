// Float32 to the stored number formats: the inverse of decode.hpp, equal to the bit at every instruction set.
//
// Rounding is to nearest, ties to the even code; magnitudes saturate; the sign of a value rounded to zero is kept.
// A code rounds fl32(x * fl32(1 / scale)), which a true division would not match at 42 ties of a main row.
// NaN: E2M1 codes of its group are 0, E4M3 values 0x7F, and the scale is the NaN of its format. An infinity
// saturates in a main row and makes its group NaN elsewhere (its UE8M0 scale would be 2^128).
#pragma once

#include "kernel_core/decode.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

inline constexpr float kMainFloor = 6 * 0.001953125f;               // amax of a zero group: smallest E4M3 scale
inline constexpr float kWindowFloor = 1e-4f;                        // scale byte 105
inline constexpr float kMxfp4Floor = 6 * 1.17549435082228751e-38f;  // scale byte 1

// How a small float sits in a float32: `shift` mantissa bits to drop, exponent difference `offset`.
// Below `min_normal`, adding `magic` rounds to the format's fixed step in hardware.
struct E2M1 {
  static constexpr int shift = 22, offset = 126, sign = 3;
  static constexpr float max = 6.0f, min_normal = 1.0f, magic = 4194304.0f;  // 2^22: step 2^-1
};
struct E4M3 {
  static constexpr int shift = 20, offset = 120, sign = 7;
  static constexpr float max = 448.0f, min_normal = 0.015625f, magic = 16384.0f;  // 2^14: step 2^-9
};

// One element that is not NaN
template <typename Format>
inline uint32_t encode_finite(float x) {
  const uint32_t sign = bit_cast<uint32_t>(x) >> 31 << Format::sign;
  const float magnitude = std::fabs(x);
  const float a = magnitude < Format::max ? magnitude : Format::max;
  if (a < Format::min_normal) return sign | (bit_cast<uint32_t>(a + Format::magic) & 0xF);
  const uint32_t bits = bit_cast<uint32_t>(a);
  const uint32_t rounded = bits + ((1u << (Format::shift - 1)) - 1) + (bits >> Format::shift & 1);
  return sign | ((rounded >> Format::shift) - (Format::offset << (23 - Format::shift)));
}

inline uint8_t encode_e2m1(float x) { return x != x ? 0 : static_cast<uint8_t>(encode_finite<E2M1>(x)); }
inline uint8_t encode_e4m3(float x) { return x != x ? 0x7F : static_cast<uint8_t>(encode_finite<E4M3>(x)); }

// Exponent + 127 of the smallest power of two not below |x|; 255 for infinities and NaN
inline uint8_t encode_ue8m0(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x) & 0x7FFFFFFF;
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
  return static_cast<uint8_t>(exponent > 255 ? 255 : exponent);
}

#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)

template <typename Format>
inline __m512i encode_lanes(F32 x) {
  const __m512i raw = _mm512_castps_si512(x.v);
  const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(raw, 31), Format::sign);
  const __m512 a = _mm512_min_ps(_mm512_abs_ps(x.v), _mm512_set1_ps(Format::max));
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, Format::shift), _mm512_set1_epi32(1));
  const __m512i half = _mm512_set1_epi32((1 << (Format::shift - 1)) - 1);
  const __m512i normal =
      _mm512_sub_epi32(_mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, half), odd), Format::shift),
                       _mm512_set1_epi32(Format::offset << (23 - Format::shift)));
  const __m512i stepped = _mm512_castps_si512(_mm512_add_ps(a, _mm512_set1_ps(Format::magic)));
  const __m512i subnormal = _mm512_and_si512(stepped, _mm512_set1_epi32(0xF));
  const __mmask16 small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(Format::min_normal), _CMP_LT_OQ);
  return _mm512_or_si512(sign, _mm512_mask_mov_epi32(normal, small, subnormal));
}

inline void store_codes(__m512i codes, uint8_t* p) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(codes));
}

inline void store_nibbles(__m512i codes, uint8_t* p) {  // a pair of lanes is one byte, even lane low
  const __m512i pairs = _mm512_or_si512(codes, _mm512_srli_epi64(codes, 28));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtepi64_epi8(pairs));
}

// Largest |x| of n values (n a multiple of 16) by its bits, which order like the values and put NaN on top
inline float amax(const float* x, int64_t n) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 16)
    top = _mm512_max_epi32(top, _mm512_and_si512(magnitude, _mm512_castps_si512(F32::load(x + i).v)));
  return bit_cast<float>(_mm512_reduce_max_epi32(top));
}

#elif defined(KERNEL_CORE_ISA_avx2)

template <typename Format>
inline __m256i encode_lanes(F32 x) {
  const __m256i raw = _mm256_castps_si256(x.v);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(raw, 31), Format::sign);
  const __m256 a = _mm256_min_ps(abs(x).v, _mm256_set1_ps(Format::max));
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, Format::shift), _mm256_set1_epi32(1));
  const __m256i half = _mm256_set1_epi32((1 << (Format::shift - 1)) - 1);
  const __m256i normal =
      _mm256_sub_epi32(_mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, half), odd), Format::shift),
                       _mm256_set1_epi32(Format::offset << (23 - Format::shift)));
  const __m256i stepped = _mm256_castps_si256(_mm256_add_ps(a, _mm256_set1_ps(Format::magic)));
  const __m256i subnormal = _mm256_and_si256(stepped, _mm256_set1_epi32(0xF));
  const __m256i small = _mm256_castps_si256(_mm256_cmp_ps(a, _mm256_set1_ps(Format::min_normal), _CMP_LT_OQ));
  return _mm256_or_si256(sign, _mm256_blendv_epi8(normal, subnormal, small));
}

inline void store_codes(__m256i codes, uint8_t* p) {
  const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                       0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8(codes, low);
  const __m128i joined = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), joined);
}

inline void store_nibbles(__m256i codes, uint8_t* p) {
  const __m256i pairs = _mm256_or_si256(codes, _mm256_srli_epi64(codes, 28));
  const __m256i low = _mm256_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                       0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8(pairs, low);
  const __m128i joined = _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  const int word = _mm_cvtsi128_si32(joined);
  std::memcpy(p, &word, 4);
}

inline float amax(const float* x, int64_t n) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i top = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i += 8)
    top = _mm256_max_epi32(top, _mm256_and_si256(magnitude, _mm256_castps_si256(F32::load(x + i).v)));
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4E));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0xB1));
  return bit_cast<float>(_mm_cvtsi128_si32(q));
}

#else

inline float amax(const float* x, int64_t n) {
  uint32_t top = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF;
    top = bits > top ? bits : top;
  }
  return bit_cast<float>(top);
}

#endif

inline float at_least(float amax, float floor) { return amax < floor ? floor : amax; }  // NaN stays

// n/2 bytes of codes of x * inverse; n a multiple of 16, no product NaN
inline void encode_e2m1_scaled(const float* x, float inverse, uint8_t* p, int64_t n) {
#if defined(KERNEL_CORE_ISA_scalar)
  for (int64_t i = 0; i < n; i += 2)
    p[i / 2] = static_cast<uint8_t>(encode_finite<E2M1>(x[i] * inverse) | encode_finite<E2M1>(x[i + 1] * inverse) << 4);
#else
  const F32 s = F32::set(inverse);
  for (int64_t i = 0; i < n; i += F32::width) store_nibbles(encode_lanes<E2M1>(F32::load(x + i) * s), p + i / 2);
#endif
}

// n bytes of codes of x * inverse; n a multiple of 16, no product NaN
inline void encode_e4m3_scaled(const float* x, float inverse, uint8_t* p, int64_t n) {
#if defined(KERNEL_CORE_ISA_scalar)
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<uint8_t>(encode_finite<E4M3>(x[i] * inverse));
#else
  const F32 s = F32::set(inverse);
  for (int64_t i = 0; i < n; i += F32::width) store_codes(encode_lanes<E4M3>(F32::load(x + i) * s), p + i);
#endif
}

// A main row: n values (a multiple of 16) to n/2 code bytes and n/16 E4M3 scales.
inline void encode_main_row(const float* x, uint8_t* row, int64_t n) {
  uint8_t* scales = row + n / 2;
  for (int64_t g = 0; g < n / 16; ++g) {
    const uint8_t scale = encode_e4m3(at_least(amax(x + g * 16, 16), kMainFloor) / 6.0f);
    scales[g] = scale;
    if (scale == 0x7F) {
      std::memset(row + g * 8, 0, 8);
    } else {
      encode_e2m1_scaled(x + g * 16, 1.0f / decode_e4m3(scale), row + g * 8, 16);
    }
  }
}

// n values (a multiple of 32) to n E4M3 bytes and n/32 UE8M0 scales, stored apart
inline void encode_mxfp8_row(const float* x, uint8_t* codes, uint8_t* scales, int64_t n) {
  for (int64_t g = 0; g < n / 32; ++g) {
    const uint8_t scale = encode_ue8m0(at_least(amax(x + g * 32, 32), kWindowFloor) / 448.0f);
    scales[g] = scale;
    if (scale == 255) {
      std::memset(codes + g * 32, 0x7F, 32);
    } else {
      encode_e4m3_scaled(x + g * 32, 1.0f / decode_ue8m0(scale), codes + g * 32, 32);
    }
  }
}

// A window row: the same, one after the other.
inline void encode_window_row(const float* x, uint8_t* row, int64_t n) { encode_mxfp8_row(x, row, row + n, n); }

// An index key (or an MXFP4 weight row): n values (a multiple of 32) to n/2 code bytes and n/32 UE8M0 scales.
inline void encode_mxfp4_row(const float* x, uint8_t* codes, uint8_t* scales, int64_t n) {
  for (int64_t g = 0; g < n / 32; ++g) {
    const uint8_t scale = encode_ue8m0(at_least(amax(x + g * 32, 32), kMxfp4Floor) / 6.0f);
    scales[g] = scale;
    if (scale == 255) {
      std::memset(codes + g * 16, 0, 16);
    } else {
      encode_e2m1_scaled(x + g * 32, 1.0f / decode_ue8m0(scale), codes + g * 16, 32);
    }
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
