// The best experts of one token by one warp.
#pragma once

#include "cuda/route.hpp"
#include "cuda/sm90/route_math.cuh"
#include "cuda/sm90/route_unroll.cuh"

namespace mega_moe::cuda {

// Groups of 128 experts; a lane holds four neighbours of each.
template <int Groups_, bool Vectors_>
struct RouteConfig {
  static constexpr int groups = Groups_, values = 4 * Groups_;
  static constexpr bool vectors = Vectors_;  // 16-byte loads
  static constexpr int warps = 8, threads = 32 * warps;
};

template <typename Config>
__device__ __forceinline__ void load_experts(const float* from, int64_t experts, int lane, float missing,
                                             float (&out)[Config::values]) {
  MEGA_MOE_UNROLL
  for (int g = 0; g < Config::groups; ++g) {
    const int at = g * 128 + 4 * lane;
    if (Config::vectors) {
      float4 v = {missing, missing, missing, missing};
      if (at < experts) v = *reinterpret_cast<const float4*>(from + at);
      out[4 * g] = v.x, out[4 * g + 1] = v.y, out[4 * g + 2] = v.z, out[4 * g + 3] = v.w;
    } else {
      MEGA_MOE_UNROLL
      for (int e = 0; e < 4; ++e) out[4 * g + e] = at + e < experts ? from[at + e] : missing;
    }
  }
}

// Lane r < top_k ends with the r-th expert: value first, then the lower number.
template <typename Config>
__device__ __forceinline__ void route_token(const RouteParams& a, int64_t token, int lane) {
  constexpr unsigned all = 0xFFFFFFFFu;
  const float* logits = a.logits + token * a.experts;
  const float* chosen = a.bias_vl && a.is_image[token] ? a.bias_vl : a.bias;
  float x[Config::values], bias[Config::values];
  load_experts<Config>(logits, a.experts, lane, 0.0f, x);
  load_experts<Config>(chosen, a.experts, lane, 0.0f, bias);
  uint32_t key[Config::values];
  MEGA_MOE_UNROLL
  for (int i = 0; i < Config::values; ++i) {
    const int expert = i / 4 * 128 + 4 * lane + i % 4;
    key[i] = expert < a.experts ? order_key(add_rn(sqrt_softplus(x[i]), bias[i])) : 0;
  }
  int mine = 0;
  for (int r = 0; r < static_cast<int>(a.top_k); ++r) {
    uint32_t best = 0;
    MEGA_MOE_UNROLL
    for (int i = 0; i < Config::values; ++i) best = max(best, key[i]);
    best = __reduce_max_sync(all, best);
    uint32_t lowest = 0xFFFFFFFFu;
    MEGA_MOE_UNROLL
    for (int i = Config::values - 1; i >= 0; --i)
      if (key[i] == best) lowest = static_cast<uint32_t>(i / 4 * 128 + 4 * lane + i % 4);
    const int expert = static_cast<int>(__reduce_min_sync(all, lowest));
    MEGA_MOE_UNROLL
    for (int i = 0; i < Config::values; ++i)
      if (i / 4 * 128 + 4 * lane + i % 4 == expert) key[i] = 0;
    if (lane == r) mine = expert;
  }
  const bool has = lane < static_cast<int>(a.top_k);
  const float score = has ? sqrt_softplus(logits[mine]) : 0.0f;
  float sum = 0;
  for (int r = 0; r < static_cast<int>(a.top_k); ++r) sum = add_rn(sum, __shfl_sync(all, score, r));
  if (!has) return;
  a.ids[token * a.top_k + lane] = mine;
  a.weights[token * a.top_k + lane] = mul_rn(div_rn(score, add_rn(sum, 1e-20f)), a.scale);
}

}  // namespace mega_moe::cuda
