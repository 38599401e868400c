// The sum of a token's slots: numbers of several places together, then their values together, so that a thread waits
// for memory once for all of them.
#pragma once

#include "expert_layout.cuh"
#include "expert_params.hpp"
#include "expert_ptx.cuh"

namespace mega_moe::sm90 {

__device__ __forceinline__ void add_to(float4& sum, const float4& v) {
  sum.x = cuda::add_rn(sum.x, v.x), sum.y = cuda::add_rn(sum.y, v.y);
  sum.z = cuda::add_rn(sum.z, v.z), sum.w = cuda::add_rn(sum.w, v.w);
}

__device__ __forceinline__ float4 load_part(const ExpertsParams& p, int64_t row, int quad) {
  return __ldcg(reinterpret_cast<const float4*>(p.parts + row * p.d) + quad);
}

// Four channels of a token.
struct Quad {
  int token, quad;
};

// Quads from `next` on, `step` from one to the next: slots in their order, then the shared expert, in
// float32. kQuads of them at once, kTogether slots of each. `whole`: else results are NaN.
template <int kQuads, int kTogether>
__device__ __forceinline__ void sum_slots(const ExpertsParams& p, Quad next, const Quad& step, bool shared,
                                          bool whole) {
  const int quads = p.d / 4, experts = p.experts * p.ranks.world;
  MEGA_MOE_NO_UNROLL
  while (next.token < p.tokens) {
    Quad at[kQuads];
    float4 sum[kQuads];
    MEGA_MOE_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      at[q] = next, sum[q] = {0, 0, 0, 0};
      next.token += step.token, next.quad += step.quad;
      if (next.quad >= quads) next.quad -= quads, ++next.token;
    }
    MEGA_MOE_NO_UNROLL
    for (int slot = 0; slot < p.slots; slot += kTogether) {
      bool there[kQuads][kTogether];
      MEGA_MOE_UNROLL
      for (int i = 0; i < kQuads * kTogether; ++i) {
        const int q = i / kTogether, j = i % kTogether;
        there[q][j] = at[q].token < p.tokens && slot + j < p.slots &&
                      static_cast<unsigned>(p.ids[static_cast<int64_t>(at[q].token) * p.slots + slot + j]) <
                          static_cast<unsigned>(experts);
      }
      float4 v[kQuads][kTogether];
      MEGA_MOE_UNROLL
      for (int i = 0; i < kQuads * kTogether; ++i) {
        const int q = i / kTogether, j = i % kTogether;
        if (there[q][j]) v[q][j] = load_part(p, static_cast<int64_t>(at[q].token) * p.slots + slot + j, at[q].quad);
      }
      MEGA_MOE_UNROLL
      for (int i = 0; i < kQuads * kTogether; ++i)
        if (there[i / kTogether][i % kTogether]) add_to(sum[i / kTogether], v[i / kTogether][i % kTogether]);
    }
    if (shared) {
      float4 v[kQuads] = {};
      MEGA_MOE_UNROLL
      for (int q = 0; q < kQuads; ++q)
        if (at[q].token < p.tokens)
          v[q] = load_part(p, static_cast<int64_t>(p.tokens) * p.slots + at[q].token, at[q].quad);
      MEGA_MOE_UNROLL
      for (int q = 0; q < kQuads; ++q)
        if (at[q].token < p.tokens) add_to(sum[q], v[q]);
    }
    MEGA_MOE_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      if (at[q].token >= p.tokens) continue;
      float4& s = sum[q];
      if (!whole) s.x = s.y = s.z = s.w = cuda::bits_float(0x7FC00000u);
      const int64_t to = static_cast<int64_t>(at[q].token) * p.d + at[q].quad * 4;
      if (p.out_is_float)
        *reinterpret_cast<float4*>(static_cast<float*>(p.out) + to) = s;
      else
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + to) = {cuda::pack_bf16(s.x, s.y),
                                                                         cuda::pack_bf16(s.z, s.w)};
    }
  }
}

}  // namespace mega_moe::sm90
