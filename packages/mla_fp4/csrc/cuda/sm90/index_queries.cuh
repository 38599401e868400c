// Queries to the form that the scoring kernel copies: E4M3 images and weights.
#pragma once

#include "../index_score.hpp"
#include "index_launch.cuh"
#include "index_plan.cuh"
#include "unroll.cuh"

namespace mla_fp4::sm90 {

using cuda::IndexScoreParams;

// Of all rows, in the workspace. Heads are padded_heads().
struct PackedQueries {
  uint8_t* images;  // [rows, heads * 128]
  float* weights;   // [rows, heads], in the order of weight_place

  static constexpr int64_t row_bytes(int64_t heads) { return heads * (index_plan::kDim + 4); }

  static PackedQueries in(void* workspace, int64_t rows, int64_t heads) {
    PackedQueries p;
    p.images = static_cast<uint8_t*>(workspace);
    p.weights = reinterpret_cast<float*>(p.images + rows * heads * index_plan::kDim);
    return p;
  }
};

inline constexpr int kPackThreads = 256;

// One thread block a row, one warp a head, lane l has channels 4l to 4l + 3: eight lanes share a scale group.
template <int kHeads>
__global__ void __launch_bounds__(kPackThreads) pack_queries(IndexScoreParams p, PackedQueries to) {
  namespace format = kernel_core::cuda;
  namespace plan = index_plan;
  allow_next();
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < kHeads; head += kPackThreads / 32) {
    float x[4] = {0, 0, 0, 0};
    if (head < p.heads) {
      const int64_t at = (row * p.heads + head) * plan::kDim + lane * 4;
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
    uint32_t top = max(scale.byte, __shfl_xor_sync(~0u, scale.byte, 8));
    top = max(top, __shfl_xor_sync(~0u, top, 16));
    const int depth = static_cast<int>(top - scale.byte);

    uint8_t* const image = to.images + row * kHeads * plan::kDim;
    MLA_FP4_UNROLL
    for (int i = 0; i < 2; ++i) {  // elements i and i + 2 stand next to each other
      const uint32_t low = plan::shifted_code(format::encode_scaled<format::IndexRow>(x[i], scale), depth);
      const uint32_t high = plan::shifted_code(format::encode_scaled<format::IndexRow>(x[i + 2], scale), depth);
      *reinterpret_cast<uint16_t*>(image + plan::image_byte(head, lane * 4 + i)) =
          static_cast<uint16_t>(low | high << 8);
    }
    if (lane == 0)
      to.weights[row * kHeads + plan::weight_place(head, kHeads)] =
          head < p.heads ? plan::head_weight(p.weights[row * p.heads + head], top) : 0.0f;
  }
}

}  // namespace mla_fp4::sm90
