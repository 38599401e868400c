// Queries to the form that the scoring kernel copies: MXFP4 by the rule of the keys, swizzled images, scales, weights.
#pragma once

#include "cuda/index_score.hpp"
#include "cuda/sm100/index_plan_sm100.cuh"
#include "cuda/sm90/unroll.cuh"

namespace mla_fp4::sm100 {

using cuda::IndexScoreParams;

// Of all rows, in the workspace. Heads are padded_heads().
struct ScaledQueries {
  uint8_t* images;   // [rows, heads, 64]
  uint32_t* scales;  // [rows, heads], four bytes each
  float* weights;    // [rows, heads]

  static constexpr int64_t row_bytes(int64_t heads) { return heads * (IndexPlan::kCodeBytes + 4 + 4); }

  static ScaledQueries in(void* workspace, int64_t rows, int64_t heads) {
    ScaledQueries q;
    q.images = static_cast<uint8_t*>(workspace);
    q.scales = reinterpret_cast<uint32_t*>(q.images + rows * heads * IndexPlan::kCodeBytes);
    q.weights = reinterpret_cast<float*>(q.scales + rows * heads);
    return q;
  }
};

inline constexpr int kQueryThreads = 256;

// One thread block a row, one warp a head, lane l has channels 4 l to 4 l + 3: eight lanes share a scale.
template <int kHeads>
__global__ void __launch_bounds__(kQueryThreads) scale_queries_sm100(IndexScoreParams p, ScaledQueries to) {
  namespace format = kernel_core::cuda;
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < kHeads; head += kQueryThreads / 32) {
    float x[4] = {0, 0, 0, 0};
    if (head < p.heads) {
      const int64_t at = (row * p.heads + head) * IndexPlan::kDim + lane * 4;
      if (p.q_is_bf16) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.q) + at);
        const uint32_t words[2] = {pairs.x, pairs.y};
        MLA_FP4_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = format::bf16_float(words[i / 2] >> 16 * (i % 2) & 0xFFFF);
      } else {
        const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(p.q) + at);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
      }
    }
    uint32_t amax = 0;
    MLA_FP4_UNROLL
    for (int i = 0; i < 4; ++i) amax = max(amax, format::magnitude_bits(x[i]));
    MLA_FP4_UNROLL
    for (int step = 1; step < 8; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    const format::GroupScale scale = format::group_scale(format::IndexRow{}, amax);
    uint32_t codes = 0;
    MLA_FP4_UNROLL
    for (int i = 0; i < 4; ++i) codes |= format::encode_scaled<format::IndexRow>(x[i], scale) << (4 * i);
    const int64_t at = row * kHeads + head;
    *reinterpret_cast<uint16_t*>(to.images + row * kHeads * IndexPlan::kCodeBytes + image_byte(head, lane * 4)) =
        static_cast<uint16_t>(codes);
    uint32_t bytes = 0;
    MLA_FP4_UNROLL
    for (int g = 0; g < IndexPlan::kScales; ++g) bytes |= __shfl_sync(~0u, scale.byte, g * 8) << (8 * g);
    if (lane == 0) {
      to.scales[at] = bytes;
      to.weights[at] = head < p.heads ? p.weights[row * p.heads + head] : 0.0f;
    }
  }
}

}  // namespace mla_fp4::sm100
