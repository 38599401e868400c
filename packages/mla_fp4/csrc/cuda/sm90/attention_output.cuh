// What attention kernels do with finished sums.
#pragma once

#include <cuda_bf16.h>

#include "cuda/sm90/attention_tiles.cuh"

namespace mla_fp4::cuda {

// Two float32 results, rounded, side by side; `angle` < 0: not turned.
__device__ __forceinline__ uint32_t output_pair(float even, float odd, const float* rope_row, int angle) {
  if (angle >= 0) {
    const float c = __ldg(rope_row + angle), s = __ldg(rope_row + kRopeDim / 2 + angle);
    const float turned = fma_rn(even, c, __fmul_rn(odd, s));
    odd = fma_rn(odd, c, -__fmul_rn(even, s));
    even = turned;
  }
  const __nv_bfloat162 both = __floats2bfloat162_rn(even, odd);
  return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

}  // namespace mla_fp4::cuda
