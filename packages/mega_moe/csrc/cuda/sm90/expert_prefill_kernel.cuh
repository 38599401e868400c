// The launches of the experts for many tokens: rows to E4M3, two grouped products, the sum of slots.
#pragma once

#include "expert_prefill_consumer.cuh"

namespace mega_moe::sm90 {

// Prefix sums of rows, blocks and tiles; one warp.
__device__ inline void make_prefill_plan(const PrefillParams& p, int blocks_of_tile, PrefillPlan& plan) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int blocks = 0, tiles = 0;
  MEGA_MOE_NO_UNROLL
  for (int base = 0; base < p.experts; base += 32) {
    const int expert = base + lane;
    int first = 0, count = 0;
    if (expert < p.experts) first = p.offsets[expert], count = p.offsets[expert + 1] - first;
    const int own_blocks = (count + kBlockTokens - 1) / kBlockTokens;
    const int own_tiles = (own_blocks + blocks_of_tile - 1) / blocks_of_tile;
    int block_sum = own_blocks, tile_sum = own_tiles;
    MEGA_MOE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int a = __shfl_up_sync(0xFFFFFFFFu, block_sum, step), b = __shfl_up_sync(0xFFFFFFFFu, tile_sum, step);
      if (lane >= step) block_sum += a, tile_sum += b;
    }
    if (expert < p.experts) {
      plan.first[expert] = first;
      plan.blocks[expert] = blocks + block_sum - own_blocks, plan.tiles[expert] = tiles + tile_sum - own_tiles;
    }
    blocks += __shfl_sync(0xFFFFFFFFu, block_sum, 31), tiles += __shfl_sync(0xFFFFFFFFu, tile_sum, 31);
  }
  if (lane == 0) {
    plan.experts = p.experts, plan.first[p.experts] = p.offsets[p.experts];
    plan.blocks[p.experts] = blocks, plan.tiles[p.experts] = tiles;
  }
}

template <typename C, bool kFirst>
__global__ void __launch_bounds__(C::kThreads, 1) prefill_product_kernel(const __grid_constant__ PrefillParams p) {
  namespace ptx = kernel_core::ptx;
  MEGA_MOE_SHARED(memory);
  auto& shared = *reinterpret_cast<PrefillShared<C>*>(memory);
  if (ptx::shared_address(memory) != kFirstShared) ptx::fail();
  const int warp = uniform(static_cast<int>(threadIdx.x / 32));
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(full_barrier<C>(i), PrefillProducer<C>::kArrivals);
      ptx::mbarrier_init(empty_barrier<C>(i), C::kConsumers / 32);
    }
    ptx::fence_barrier_init();
  }
  let_later_launch();
  // Rows by expert and weights are older than the launch before this one; only `images` come from it.
  if (warp == C::kConsumers / 32) make_prefill_plan(p, C::kBlocks, shared.plan);
  __syncthreads();
  const uint8_t* const weights = C::kExpanded ? (kFirst ? p.expanded13 : p.expanded2) : (kFirst ? p.w13 : p.w2);
  const PrefillProduct product = {kFirst ? p.images : p.hidden, weights, (kFirst ? 2 * p.inter : p.d) / kGroupRows,
                                  (kFirst ? p.d : p.inter) / C::kColumns};
  if (warp < C::kConsumers / 32) {
    ptx::registers_grow<C::kConsumerRegisters>();
    PrefillConsumer<C, kFirst>(p, product, shared).run();
  } else {
    ptx::registers_shrink<C::kProducerRegisters>();
    PrefillProducer<C>(product, shared).run();
  }
}

inline constexpr int kRowThreads = 256;

__device__ inline uint4 load_row_8(const PrefillParams& p, int64_t at) {
  if (!p.x_is_float) return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) + at);
  const float4 a = *reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + at);
  const float4 b = *reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + at + 4);
  return {cuda::pack_bf16(a.x, a.y), cuda::pack_bf16(a.z, a.w), cuda::pack_bf16(b.x, b.y), cuda::pack_bf16(b.z, b.w)};
}

// 16 channels of a lane; eight lanes are a group.
__device__ inline void store_piece_fp8(const uint4 (&v)[2], bool inside, uint8_t* to, int row, int channel) {
  const uint32_t words[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
  uint32_t top = 0;
  MEGA_MOE_UNROLL
  for (int j = 0; j < 8; ++j) top = max(top, max(words[j] << 16 & 0x7FFFFFFF, words[j] & 0x7FFF0000));
  MEGA_MOE_UNROLL
  for (int step = 1; step < 8; step *= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
  if (!inside) return;
  const Fp8Scale scale = fp8_scale(top);
  uint32_t out[8];
  MEGA_MOE_UNROLL
  for (int j = 0; j < 8; ++j)
    out[j] = pack_e4m3(cuda::mul_rn(cuda::bits_float(words[j] << 16), scale.inverse),
                       cuda::mul_rn(cuda::bits_float(words[j] & 0xFFFF0000u), scale.inverse));
  *reinterpret_cast<uint4*>(to + kernel_core::wgmma::swizzle128(row, channel)) = {
      out[0] | out[1] << 16, out[2] | out[3] << 16, out[4] | out[5] << 16, out[6] | out[7] << 16};
  if (channel == 0) *reinterpret_cast<float*>(to + kChunkCodes + row * 4) = scale.scale;
}

// A warp takes 512 channels of a row: a lane 16, eight lanes a group of E4M3 and its scale.
template <bool kFp8>
__global__ void __launch_bounds__(kRowThreads) prefill_rows_kernel(const __grid_constant__ PrefillParams p) {
  MEGA_MOE_SHARED(memory);
  auto& plan = *reinterpret_cast<PrefillPlan*>(memory);
  let_later_launch();
  if (threadIdx.x < 32) make_prefill_plan(p, 1, plan);
  __syncthreads();
  constexpr int kPart = 512;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int parts = (p.d + kPart - 1) / kPart;
  const int64_t units = static_cast<int64_t>(plan.first[p.experts]) * parts;
  MEGA_MOE_NO_UNROLL
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * (kRowThreads / 32) + warp; unit < units;
       unit += static_cast<int64_t>(gridDim.x) * (kRowThreads / 32)) {
    const int position = static_cast<int>(unit / parts);
    const int channel = static_cast<int>(unit - static_cast<int64_t>(position) * parts) * kPart + lane * 16;
    const int expert = find_prefix(plan.first, p.experts, position), row = position - plan.first[expert];
    const int64_t from = static_cast<int64_t>(p.rows[position] / p.slots) * p.d + channel;
    const bool inside = channel < p.d;
    uint4 v[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    if (inside) v[0] = load_row_8(p, from), v[1] = load_row_8(p, from + 8);
    constexpr int kChannels = step_channels(kFp8);
    const int64_t block = plan.blocks[expert] + row / kBlockTokens;
    uint8_t* const to = p.images + chunks_bytes(block, p.d, kFp8) + channel / kChannels * chunk_bytes(kFp8);
    if constexpr (kFp8) {
      store_piece_fp8(v, inside, to, row % kBlockTokens, channel % kChannels);
    } else if (inside) {
      MEGA_MOE_UNROLL
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint4*>(
            to + kernel_core::wgmma::swizzle128(row % kBlockTokens, channel % kChannels * 2 + i * 16)) = v[i];
    }
  }
}

// Four channels of a part, exactly as float32.
__device__ inline float4 load_part(const PrefillParams& p, int64_t at) {
  if (p.parts_are_float) return *reinterpret_cast<const float4*>(static_cast<const float*>(p.parts) + at);
  const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.parts) + at);
  return {cuda::bits_float(v.x << 16), cuda::bits_float(v.x & 0xFFFF0000u), cuda::bits_float(v.y << 16),
          cuda::bits_float(v.y & 0xFFFF0000u)};
}

// Slots in their order; tokens with none are zeros. Where parts are the result, those are all there is to do.
__global__ void __launch_bounds__(kRowThreads) prefill_sum_kernel(const __grid_constant__ PrefillParams p) {
  wait_for_earlier_launch();
  const int quads = p.d / 4;
  const int64_t total = static_cast<int64_t>(p.tokens) * quads;
  MEGA_MOE_NO_UNROLL
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * kRowThreads) {
    const int64_t token = i / quads, channel = (i - token * quads) * 4;
    float4 sum = {0, 0, 0, 0};
    bool done = false;
    MEGA_MOE_NO_UNROLL
    for (int slot = 0; slot < p.slots && !done; ++slot) {
      const int64_t row = token * p.slots + slot;
      if (static_cast<unsigned>(p.ids[row]) >= static_cast<unsigned>(p.experts)) continue;
      done = p.parts == p.out;
      if (done) continue;
      const float4 v = load_part(p, row * p.d + channel);
      sum = {cuda::add_rn(sum.x, v.x), cuda::add_rn(sum.y, v.y), cuda::add_rn(sum.z, v.z), cuda::add_rn(sum.w, v.w)};
    }
    if (done) continue;
    const int64_t at = token * p.d + channel;
    if (p.out_is_float)
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = sum;
    else
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {cuda::pack_bf16(sum.x, sum.y),
                                                                       cuda::pack_bf16(sum.z, sum.w)};
  }
}

// Packed weights to E4M3 in memory: 128 rows x 128 columns a turn of 128 threads.
__global__ void __launch_bounds__(128) prefill_expand_kernel(const uint8_t* from, uint8_t* to, int64_t steps) {
  const int thread = static_cast<int>(threadIdx.x), row = thread / 32 * 16 + thread % 32 / 4;
  MEGA_MOE_NO_UNROLL
  for (int64_t step = blockIdx.x; step < steps; step += gridDim.x) {
    const uint8_t* const in = from + step * kPackedStep;
    MEGA_MOE_UNROLL
    for (int i = 0; i < kTiles * kPieces; ++i) {
      const int tile = i / kPieces, piece = i % kPieces;
      const uint4 v = *reinterpret_cast<const uint4*>(in + tile * kTileCodes + piece * kPieceBytes + thread * 16);
      const uint32_t codes[4] = {v.x, v.y, v.z, v.w};
      const uint32_t scales = *reinterpret_cast<const uint32_t*>(
          in + kTiles * kTileCodes + tile * Step<Format::mxfp4>::kScaleBytes + thread / 4 * 8 + piece * 4);
      uint32_t out[2][4];
      expand_piece_fp8(codes, scales, out[0], out[1]);
      uint8_t* const tile_to = to + step * kExpandedStep + tile * (kTileRows * 128);
      MEGA_MOE_UNROLL
      for (int j = 0; j < 8; ++j) {
        const int byte = piece * 64 + j / 4 * 32 + j % 4 / 2 * 16 + thread % 4 * 4;
        *reinterpret_cast<uint32_t*>(tile_to + kernel_core::wgmma::swizzle128(row + j % 2 * 8, byte)) =
            out[j / 4][j % 4];
      }
    }
  }
}

}  // namespace mega_moe::sm90
