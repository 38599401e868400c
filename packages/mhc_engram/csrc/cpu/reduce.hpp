// Folding the lanes of many registers at once.
#pragma once

#include "kernel_core/simd.hpp"

namespace mhc_engram {
namespace KERNEL_CORE_ISA {

using namespace kernel_core::KERNEL_CORE_ISA;

#if defined(KERNEL_CORE_ISA_avx512)

// Sixteen registers, `stride` floats apart, to their sixteen sums. Each sum adds the same pairs as reduce_add does
// (lanes 8 apart, then 4, 2, 1), so both give the same bits; here a shuffle serves two registers.
inline F32 reduce_sixteen(const float* v, int64_t stride) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 x = _mm512_load_ps(v + i * stride), y = _mm512_load_ps(v + (i + 8) * stride);
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
  }
  // a[i]: two quarters of register i, then two of i + 8
  for (int i = 0; i < 4; ++i)
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD));
  // b[i]: one quarter each of registers i, i + 8, i + 4, i + 12
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xEE));
  // In each quarter of c[i]: two lanes of register i, two of i + 2 (plus the quarter's offset)
  const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xDD));
  // Lane 4q + p holds the sum of register quarter[q] + {0, 2, 1, 3}[p], quarter = {0, 8, 4, 12}.
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return {_mm512_permutexvar_ps(order, sums)};
}

#endif

// out[i] = sum of the lanes of register i at v + i * stride
template <int Count>
inline void reduce_many(const float* v, int64_t stride, float* out) {
  int i = 0;
#if defined(KERNEL_CORE_ISA_avx512)
  for (; i + 16 <= Count; i += 16) reduce_sixteen(v + i * stride, stride).store(out + i);
#endif
  for (; i < Count; ++i) out[i] = reduce_add(F32::load(v + i * stride));
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mhc_engram
