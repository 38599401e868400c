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

constexpr int kCandidates = 32;  // of a token: one a lane

struct Candidate {
  uint32_t key, expert;
};

// The lowest expert of the lanes that have one.
__device__ __forceinline__ uint32_t lowest_of(bool mine, uint32_t expert) {
  return __reduce_min_sync(0xFFFFFFFFu, mine ? expert : 0xFFFFFFFFu);
}

// The expert of value number `i` of a lane.
KC_HD uint32_t expert_of(int i, int lane) { return static_cast<uint32_t>(i / 4 * 128 + 4 * lane + i % 4); }

// Keys that may be among the `top_k` largest to `to`; how many there are, or more than 32, where some are left out.
//
// Of the lanes' largest keys, the one of rank top_k bounds the wanted keys from below.
template <typename Config>
__device__ __forceinline__ int collect(const uint32_t (&key)[Config::values], int top_k, int lane, Candidate* to) {
  constexpr unsigned all = 0xFFFFFFFFu;
  uint32_t largest = 0, bound = 0;
  MEGA_MOE_UNROLL
  for (int i = 0; i < Config::values; ++i) largest = max(largest, key[i]);
  for (int r = 0; r < top_k; ++r) {
    bound = __reduce_max_sync(all, largest);
    if (largest == bound) largest = 0;
  }
  int count = 0;
  MEGA_MOE_UNROLL
  for (int i = 0; i < Config::values; ++i) {
    const bool mine = key[i] >= bound;
    const unsigned lanes = __ballot_sync(all, mine);
    if (lanes == 0) continue;
    const int place = count + __popc(lanes & ((1u << lane) - 1));
    if (mine && place < kCandidates) to[place] = {key[i], expert_of(i, lane)};
    count += __popc(lanes);
  }
  __syncwarp();
  return count;
}

// Lane r < top_k ends with the r-th expert: value first, then the lower number. scratch: of this warp.
template <typename Config>
__device__ __forceinline__ void route_token(const RouteParams& a, int64_t token, int lane, Candidate* scratch) {
  constexpr unsigned all = 0xFFFFFFFFu;
  const int top_k = static_cast<int>(a.top_k);
  const float* logits = a.logits + token * a.experts;
  const float* chosen = a.bias_vl && a.is_image[token] ? a.bias_vl : a.bias;
  float x[Config::values], bias[Config::values];
  load_experts<Config>(logits, a.experts, lane, 0.0f, x);
  // Experts that are missing are behind all others: of the smallest value, with higher numbers.
  load_experts<Config>(chosen, a.experts, lane, bits_float(0xFF800000u), bias);
  uint32_t key[Config::values];
  MEGA_MOE_UNROLL
  for (int i = 0; i < Config::values; ++i) key[i] = order_key(add_rn(sqrt_softplus(x[i]), bias[i]));
  uint32_t mine = 0;
  const int count = collect<Config>(key, top_k, lane, scratch);
  if (count <= kCandidates) {
    Candidate own = {0, 0};
    if (lane < count) own = scratch[lane];
    for (int r = 0; r < top_k; ++r) {
      const uint32_t best = __reduce_max_sync(all, own.key);
      const uint32_t expert = lowest_of(own.key == best, own.expert);
      if (own.expert == expert) own.key = 0;
      if (lane == r) mine = expert;
    }
  } else {  // many equal ones
    for (int r = 0; r < top_k; ++r) {
      uint32_t best = 0, lowest = 0xFFFFFFFFu;
      MEGA_MOE_UNROLL
      for (int i = 0; i < Config::values; ++i) best = max(best, key[i]);
      best = __reduce_max_sync(all, best);
      MEGA_MOE_UNROLL
      for (int i = Config::values - 1; i >= 0; --i)
        if (key[i] == best) lowest = expert_of(i, lane);
      const uint32_t expert = lowest_of(lowest != 0xFFFFFFFFu, lowest);
      MEGA_MOE_UNROLL
      for (int i = 0; i < Config::values; ++i)
        if (expert_of(i, lane) == expert) key[i] = 0;
      if (lane == r) mine = expert;
    }
  }
  const bool has = lane < top_k;
  const float score = has ? sqrt_softplus(logits[mine]) : 0.0f;
  float sum = 0;
  for (int r = 0; r < top_k; ++r) sum = add_rn(sum, __shfl_sync(all, score, r));
  if (!has) return;
  a.ids[token * a.top_k + lane] = static_cast<int32_t>(mine);
  a.weights[token * a.top_k + lane] = mul_rn(div_rn(score, add_rn(sum, 1e-20f)), a.scale);
}

}  // namespace mega_moe::cuda
