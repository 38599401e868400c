// A float32 vector of the widest register of the level being compiled, with the few operations kernels need.
//
// Everything is in `namespace kernel_core::KERNEL_CORE_ISA`. Tails use `load_n` / `store_n`, so the last lanes of
// a row go through the same instructions as the first and a value never depends on its place.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifndef KERNEL_CORE_ISA
#error "compile this header through kernel_core_add_module(KERNELS ...)"
#endif

#if defined(KERNEL_CORE_ISA_avx2) || defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)
#include <immintrin.h>
#endif

namespace kernel_core {
namespace KERNEL_CORE_ISA {

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)

struct F32 {
  static constexpr int width = 16;
  __m512 v;
  static F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F32 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }  // other lanes 0
  static F32 set(float x) { return {_mm512_set1_ps(x)}; }
  static F32 zero() { return {_mm512_setzero_ps()}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_n(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
  static __mmask16 mask(int n) { return n >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << n) - 1); }
};
inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }                // b where either is NaN
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
inline F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
inline float reduce_add(F32 a) {  // lanes i and i+8, then +4, +2, +1: the order is part of the contract
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(F32 a) { return _mm512_reduce_max_ps(a.v); }

// 2^n for integral n in [-126, 127], held as float
inline F32 exp2_int(F32 n) {
  const __m512i i = _mm512_cvtps_epi32(n.v);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(127)), 23))};
}
inline F32 round(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32 zero_below(F32 x, F32 limit, F32 y) {  // 0 where x < limit, else y
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), _mm512_setzero_ps())};
}

#elif defined(KERNEL_CORE_ISA_avx2)

struct F32 {
  static constexpr int width = 8;
  __m256 v;
  static F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static F32 load_n(const float* p, int n) { return {_mm256_maskload_ps(p, mask(n))}; }
  static F32 set(float x) { return {_mm256_set1_ps(x)}; }
  static F32 zero() { return {_mm256_setzero_ps()}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store_n(float* p, int n) const { _mm256_maskstore_ps(p, mask(n), v); }
  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};
inline F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.v)}; }
inline float reduce_add(F32 a) {
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(F32 a) {
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline F32 exp2_int(F32 n) {
  const __m256i i = _mm256_cvtps_epi32(n.v);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(i, _mm256_set1_epi32(127)), 23))};
}
inline F32 round(F32 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32 zero_below(F32 x, F32 limit, F32 y) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_LT_OQ), y.v)};
}

#else  // scalar: one lane

struct F32 {
  static constexpr int width = 1;
  float v;
  static F32 load(const float* p) { return {*p}; }
  static F32 load_n(const float* p, int n) { return {n > 0 ? *p : 0.0f}; }
  static F32 set(float x) { return {x}; }
  static F32 zero() { return {0.0f}; }
  void store(float* p) const { *p = v; }
  void store_n(float* p, int n) const {
    if (n > 0) *p = v;
  }
};
inline F32 operator+(F32 a, F32 b) { return {a.v + b.v}; }
inline F32 operator-(F32 a, F32 b) { return {a.v - b.v}; }
inline F32 operator*(F32 a, F32 b) { return {a.v * b.v}; }
inline F32 operator/(F32 a, F32 b) { return {a.v / b.v}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {a.v * b.v + c.v}; }  // a libm fma call would be far slower
inline F32 max(F32 a, F32 b) { return {a.v > b.v ? a.v : b.v}; }
inline F32 min(F32 a, F32 b) { return {a.v < b.v ? a.v : b.v}; }
inline F32 abs(F32 a) { return {std::fabs(a.v)}; }
inline F32 sqrt(F32 a) { return {std::sqrt(a.v)}; }
inline float reduce_add(F32 a) { return a.v; }
inline float reduce_max(F32 a) { return a.v; }
inline F32 exp2_int(F32 n) { return {bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(n.v) + 127) << 23)}; }
inline F32 round(F32 a) { return {std::nearbyint(a.v)}; }
inline F32 zero_below(F32 x, F32 limit, F32 y) { return {x.v < limit.v ? 0.0f : y.v}; }

#endif

// e^x, at most 2 ulp from the true value; 0 below -87.33, clamped at e^88.37; NaN stays NaN.
// Range reduction by ln 2 in two parts, then a polynomial on [-ln2/2, ln2/2].
inline F32 exp(F32 x) {
  const F32 lo = F32::set(-87.336544f), hi = F32::set(88.3762626647949f);
  const F32 clamped = max(lo, min(hi, x));
  const F32 n = round(clamped * F32::set(1.44269504088896341f));
  F32 r = fma(n, F32::set(-0.693359375f), clamped);
  r = fma(n, F32::set(2.12194440e-4f), r);
  F32 p = F32::set(1.9875691500e-4f);
  p = fma(p, r, F32::set(1.3981999507e-3f));
  p = fma(p, r, F32::set(8.3334519073e-3f));
  p = fma(p, r, F32::set(4.1665795894e-2f));
  p = fma(p, r, F32::set(1.6666665459e-1f));
  p = fma(p, r, F32::set(5.0000001201e-1f));
  const F32 y = fma(p, r * r, r) + F32::set(1.0f);
  return zero_below(x, lo, y * exp2_int(n));
}

inline F32 sigmoid(F32 x) { return F32::set(1.0f) / (F32::set(1.0f) + exp(F32::zero() - x)); }

// sum of a[i] * b[i], lanes accumulated in two registers and folded in a fixed order
inline float dot(const float* a, const float* b, int64_t n) {
  constexpr int w = F32::width;
  F32 s0 = F32::zero(), s1 = F32::zero();
  int64_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    s0 = fma(F32::load(a + i), F32::load(b + i), s0);
    s1 = fma(F32::load(a + i + w), F32::load(b + i + w), s1);
  }
  for (; i < n; i += w) {
    const int m = static_cast<int>(n - i < w ? n - i : w);
    s0 = fma(F32::load_n(a + i, m), F32::load_n(b + i, m), s0);
  }
  return reduce_add(s0 + s1);
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
