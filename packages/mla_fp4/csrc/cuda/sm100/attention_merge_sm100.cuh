// Merges the partial results of CTAs that walked some chunks of a row, in the order of the chunks, with the arithmetic
// that a CTA that walks all of them uses: both give the same bits.
#pragma once

#include "cuda/sm100/attention_plan_sm100.cuh"
#include "cuda/sm100/device_sm100.cuh"

namespace mla_fp4::sm100 {

// For a row, head and chunk: 512 sums, and (maximum, two denominators, nothing). 0 floats where one CTA walks all.
constexpr bool is_split(int64_t selected, int64_t splits) { return splits > 0 && splits < chunk_count(selected); }
constexpr int64_t workspace_floats(int64_t rows, int64_t heads, int64_t selected, int64_t splits) {
  return is_split(selected, splits) ? rows * heads * chunk_count(selected) * (kDim + 4) : 0;
}

#if defined(__CUDACC__)

// One CTA of 128 threads for a row and head, four columns a thread.
static __global__ void __launch_bounds__(128)
    attention_merge_sm100_kernel(const __grid_constant__ AttentionParams a, const float* workspace) {
  const uint32_t heads = static_cast<uint32_t>(a.heads);
  const int64_t at = blockIdx.x, row = blockIdx.x / heads, head = blockIdx.x % heads;
  const int chunks = static_cast<int>(chunk_count(a.selected)), column = static_cast<int>(threadIdx.x) * 4;
  const float4* sums = reinterpret_cast<const float4*>(workspace + at * chunks * kDim + column);
  const float4* stats = reinterpret_cast<const float4*>(workspace + (a.rows * a.heads * kDim + at * 4) * chunks);
  float top = minus_infinity(), left = 0, right = 0;
  float4 o = {0, 0, 0, 0};
#pragma unroll 4
  for (int c = 0; c < chunks; ++c) {
    const float4 s = __ldg(stats + c), v = __ldg(sums + c * (kDim / 4));
    const Merge m = merge_factors(top, s.x);
    top = m.top;
    left = merge_value(left, s.y, m), right = merge_value(right, s.z, m);
    o = {merge_value(o.x, v.x, m), merge_value(o.y, v.y, m), merge_value(o.z, v.z, m), merge_value(o.w, v.w, m)};
  }
  const float factor = finish_factor(top, add_rn(left, right), mul_rn(a.sink[head], kLog2E));
  o = {mul_rn(o.x, factor), mul_rn(o.y, factor), mul_rn(o.z, factor), mul_rn(o.w, factor)};
  if (const int turned = column - (kDim - kRopeDim); turned >= 0) {
    const float* rope = a.rope + row * kRopeDim + turned / 2;
    turn_back(o.x, o.y, __ldg(rope), __ldg(rope + kRopeDim / 2));
    turn_back(o.z, o.w, __ldg(rope + 1), __ldg(rope + kRopeDim / 2 + 1));
  }
  reinterpret_cast<uint2*>(a.out)[(at * kDim + column) / 4] = make_uint2(pack_bf16(o.x, o.y), pack_bf16(o.z, o.w));
}

#endif

}  // namespace mla_fp4::sm100
