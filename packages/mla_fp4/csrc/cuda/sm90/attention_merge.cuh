// Merges the partial results of attention kernels that walked single chunks, in the order of the chunks, with the
// arithmetic that a CTA that walks all of them uses: both give the same bits.
#pragma once

#include <cuda_bf16.h>

#include "cuda/sm90/attention_plan.cuh"
#include "kernel_core/cuda/hd.cuh"

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

// Where the partial result of a row, head and chunk lies: 512 sums each, and after all of them 4 numbers each.
struct Partials {
  float* sums;
  float* stats;
  __device__ __forceinline__ Partials(const AttentionParams& a, int64_t chunks)
      : sums(a.workspace), stats(a.workspace + a.rows * a.heads * chunks * kDim) {}
};

// One CTA of 128 threads for a row and head, four columns a thread.
static __global__ void __launch_bounds__(128) attention_merge_kernel(const AttentionParams a) {
  const uint32_t heads = static_cast<uint32_t>(a.heads);
  const int64_t at = blockIdx.x, row = blockIdx.x / heads, head = blockIdx.x % heads;
  const int chunks = static_cast<int>(attention_chunks(a.selected));
  const Partials parts(a, chunks);
  const float4* sums = reinterpret_cast<const float4*>(parts.sums + at * chunks * kDim) + threadIdx.x;
  const float4* stats = reinterpret_cast<const float4*>(parts.stats + at * chunks * 4);
  float top = minus_infinity(), left = 0, right = 0;
  float4 o = {0, 0, 0, 0};
#pragma unroll 5
  for (int c = 0; c < chunks; ++c) {
    const float4 s = __ldg(stats + c), v = __ldg(sums + c * (kDim / 4));
    const Merge m = merge_factors(top, s.x);
    top = m.top;
    left = merge_value(left, s.y, m), right = merge_value(right, s.z, m);
    o = {merge_value(o.x, v.x, m), merge_value(o.y, v.y, m), merge_value(o.z, v.z, m), merge_value(o.w, v.w, m)};
  }
  const float factor =
      finish_factor(top, kernel_core::cuda::add_rn(left, right), kernel_core::cuda::mul_rn(a.sink[head], kLog2E));
  const int column = static_cast<int>(threadIdx.x) * 4, turned = (column - (kDim - kRopeDim)) / 2;
  const int angle = column < kDim - kRopeDim ? -1 : turned;
  const float* rope = a.rope + row * kRopeDim;
  uint2 out;
  out.x = output_pair(__fmul_rn(o.x, factor), __fmul_rn(o.y, factor), rope, angle);
  out.y = output_pair(__fmul_rn(o.z, factor), __fmul_rn(o.w, factor), rope, angle < 0 ? -1 : angle + 1);
  reinterpret_cast<uint2*>(a.out)[at * (kDim / 4) + threadIdx.x] = out;
}

inline cudaError_t launch_attention_merge(const AttentionParams& a, cudaStream_t stream) {
  attention_merge_kernel<<<static_cast<unsigned>(a.rows * a.heads), 128, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace mla_fp4::cuda
