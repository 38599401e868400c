// Square blocks of float32 turned in registers.
#pragma once

#include "kernel_core/simd.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

using kernel_core::KERNEL_CORE_ISA::F32;

// out[c * out_step + r] = in[r * in_step + c] for an F32::width square block
#if defined(KERNEL_CORE_ISA_avx512)

inline void transpose_block(const float* in, int64_t in_step, float* out, int64_t out_step) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(in + i * in_step);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    const auto lo = [](__m512 x, __m512 y) {
      return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
    };
    const auto hi = [](__m512 x, __m512 y) {
      return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
    };
    a[i] = lo(b[i], b[i + 2]);
    a[i + 1] = hi(b[i], b[i + 2]);
    a[i + 2] = lo(b[i + 1], b[i + 3]);
    a[i + 3] = hi(b[i + 1], b[i + 3]);
  }
  // a[4g + c] holds rows 4g..4g+3 of columns c, c+4, c+8, c+12, one column a 128-bit lane
  for (int c = 0; c < 4; ++c) {
    const __m512 p = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), q = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xDD);
    const __m512 r = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88),
                 s = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xDD);
    _mm512_storeu_ps(out + c * out_step, _mm512_shuffle_f32x4(p, r, 0x88));
    _mm512_storeu_ps(out + (c + 8) * out_step, _mm512_shuffle_f32x4(p, r, 0xDD));
    _mm512_storeu_ps(out + (c + 4) * out_step, _mm512_shuffle_f32x4(q, s, 0x88));
    _mm512_storeu_ps(out + (c + 12) * out_step, _mm512_shuffle_f32x4(q, s, 0xDD));
  }
}

#elif defined(KERNEL_CORE_ISA_avx2)

inline void transpose_block(const float* in, int64_t in_step, float* out, int64_t out_step) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(in + i * in_step);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(out + c * out_step, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
    _mm256_storeu_ps(out + (c + 4) * out_step, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
  }
}

#else

inline void transpose_block(const float* in, int64_t, float* out, int64_t) { *out = *in; }

#endif

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
