// The kernel of either product, and those before and after: rows to images, sum over slots.
#pragma once

#include "cuda/sm100/expert_roles_sm100.cuh"

namespace mega_moe::sm100 {

template <typename C, bool kSecond>
__global__ void __launch_bounds__(C::kThreads, 1)
    experts_sm100_kernel(const __grid_constant__ ExpertsParams p, const __grid_constant__ CUtensorMap weights,
                         const __grid_constant__ CUtensorMap shared_weights) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || !defined(__CUDACC__)
  const uint32_t shared = shared_base();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int rank = C::kCtas == 2 ? static_cast<int>(rank_in_pair()) : 0;
  if (thread == 0) {
    if (shared % 1024 != 0) ptx::fail();  // descriptors and swizzle need it
    const auto init = [&](uint32_t at, int count, int arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(shared + at + i * 8, arrivals);
    };
    init(C::kFull, C::kStages, 1);
    init(C::kReady, C::kStages, 1);
    init(C::kEmpty, C::kStages, 1);
    init(C::kSumsFull, C::kBuffers, 1);
    init(C::kSumsFree, C::kBuffers, 4 * C::kCtas);
    ptx::fence_barrier_init();
  }
  if (warp == C::kProductWarp) tcgen05::allocate<C::kCtas>(shared + C::kTmem, C::kTmemColumns);
  if (warp == 0) plan_tiles<C::kTokens>(shared + C::kPlan, p.offsets, experts(p), lane);
  tcgen05::fence_before();
  __syncthreads();
  if constexpr (C::kCtas == 2) cluster_sync();
  tcgen05::fence_after();
  const Place<C, kSecond> place = {p,
                                   shared,
                                   load_shared_4(shared + C::kTmem),
                                   rank,
                                   static_cast<int>(blockIdx.x) / C::kCtas,
                                   static_cast<int>(gridDim.x) / C::kCtas};
  if (warp < 4) {
    Sums<C, kSecond>{place}.run(thread);
  } else if (warp == C::kProductWarp) {
    if (lane == 0 && rank == 0) Products<C, kSecond>{place}.run();
    if (lane == 0 && rank == 1) Products<C, kSecond>{place}.pass_on();
  } else if (lane == 0) {
    Copies<C, kSecond>{place}.run(weights, shared_weights);
  }
  __syncwarp();
  tcgen05::fence_before();
  __syncthreads();
  if constexpr (C::kCtas == 2) cluster_sync();  // nobody leaves while the partner may arrive here
  tcgen05::fence_after();
  if (warp == C::kProductWarp) tcgen05::deallocate<C::kCtas>(place.tmem, C::kTmemColumns);
#endif
}

inline constexpr int kGatherThreads = 128, kGatherParts = 8, kGatherShared = (kMostExperts + 2) * 4;
inline constexpr int kCombineThreads = 256;

// Rows of a tile to its image: E4M3 with a UE8M0 scale for 32 channels. A warp has 128 channels of a row at once; CTA
// `part` of a tile has every kGatherParts-th step.
template <int kTokens>
__global__ void __launch_bounds__(kGatherThreads) gather_experts_sm100(const __grid_constant__ ExpertsParams p) {
  constexpr int kImageTile = kScaleBytes + kTokens * kStepColumns;
  const uint32_t shared = shared_base();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int tile = static_cast<int>(blockIdx.x) / kGatherParts, part = static_cast<int>(blockIdx.x) % kGatherParts;
  if (warp == 0) plan_tiles<kTokens>(shared, p.offsets, experts(p), lane);
  __syncthreads();
  const TilesBefore tiles = {shared};
  if (tile >= tiles(experts(p))) return;
  const Work w = find_work(tiles, p.offsets, experts(p), 1, kTokens, tile);
  const int steps = p.d / kStepColumns;
  for (int row = warp; row < w.rows; row += kGatherThreads / 32) {
    const int number = p.rows[w.first + row], routed = p.tokens * p.slots;
    const int64_t from = static_cast<int64_t>(number < routed ? number / p.slots : number - routed) * p.d + lane * 4;
    for (int step = part; step < steps; step += kGatherParts) {
      float x[4];
      if (p.x_is_float) {
        const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + from + step * kStepColumns);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
      } else {
        const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.x) + from + step * kStepColumns);
        x[0] = cuda::bf16_float(v.x & 0xFFFF), x[1] = cuda::bf16_float(v.x >> 16);
        x[2] = cuda::bf16_float(v.y & 0xFFFF), x[3] = cuda::bf16_float(v.y >> 16);
      }
      uint32_t top = 0;
      MEGA_MOE_SM100_UNROLL
      for (int i = 0; i < 4; ++i) top = max(top, cuda::magnitude_bits(x[i]));
      MEGA_MOE_SM100_UNROLL
      for (int distance = 1; distance < 8; distance *= 2) top = max(top, __shfl_xor_sync(~0u, top, distance));
      const uint32_t byte = activation_scale(top);
      const float inverse = inverse_scale(byte);
      MEGA_MOE_SM100_UNROLL
      for (int i = 0; i < 4; ++i) x[i] = cuda::mul_rn(x[i], inverse);
      uint8_t* image = p.images + (static_cast<int64_t>(w.tile) * steps + step) * kImageTile;
      if (lane % 8 == 0) image[scale_place(row, lane / 8)] = static_cast<uint8_t>(byte);
      *reinterpret_cast<uint32_t*>(image + kScaleBytes + swizzle128(row, lane * 4)) =
          e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16;
    }
  }
}

// Slots one after the other, then the shared expert, in float32. A thread has four channels of a token.
__global__ void __launch_bounds__(kCombineThreads) combine_experts_sm100(const __grid_constant__ ExpertsParams p) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x) * 4;
  if (at >= static_cast<int64_t>(p.tokens) * p.d) return;
  const int64_t token = at / p.d, channel = at - token * p.d;
  float sum[4] = {0, 0, 0, 0};
  for (int slot = 0; slot < p.slots + (p.shared13 != nullptr); ++slot) {
    const bool routed = slot < p.slots;
    const int64_t row = routed ? token * p.slots + slot : static_cast<int64_t>(p.tokens) * p.slots + token;
    const int id = routed ? p.ids[row] : 0;
    if (id < 0 || id >= p.experts) continue;
    const float4 v = *reinterpret_cast<const float4*>(p.parts + row * p.d + channel);
    sum[0] = cuda::add_rn(sum[0], v.x), sum[1] = cuda::add_rn(sum[1], v.y);
    sum[2] = cuda::add_rn(sum[2], v.z), sum[3] = cuda::add_rn(sum[3], v.w);
  }
  if (p.out_is_float) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(sum[0], sum[1], sum[2], sum[3]);
  } else {
    uint32_t* out = static_cast<uint32_t*>(p.out) + at / 2;
    out[0] = cuda::pack_bf16(sum[0], sum[1]);
    out[1] = cuda::pack_bf16(sum[2], sum[3]);
  }
}

}  // namespace mega_moe::sm100
