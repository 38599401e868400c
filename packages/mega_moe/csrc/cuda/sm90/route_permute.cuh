// Rows by expert: a stable counting sort. Warps own consecutive pieces of the id list, count their experts, prefix sums
// over warps and experts give first places, and a second reading places the rows. No order depends on timing.
#pragma once

#include "cuda/route.hpp"
#include "cuda/sm90/route_unroll.cuh"
#include "kernel_core/cuda/hd.cuh"

namespace mega_moe::cuda {

struct PermuteConfig {
  static constexpr int warps = 16, threads = 32 * warps;
  static constexpr int experts = 1024;    // at most
  static constexpr int64_t piece = 8192;  // ids of a block
};

// ids a warp owns, whole rounds of 32
KC_HD int64_t ids_a_warp(int64_t ids, int warps) { return (ids + 32 * warps - 1) / (32 * warps) * 32; }

KC_HD int64_t permute_blocks(int64_t ids) {
  return ids <= PermuteConfig::piece ? 1 : (ids + PermuteConfig::piece - 1) / PermuteConfig::piece;
}

// Shared memory in int32: counts of each warp, then first places, then the scan's warps.
KC_HD int64_t permute_shared(int64_t experts, int warps) { return experts * warps + experts + 1 + 64; }

// How often each expert stands in ids [begin, end) of this warp, or where its next row goes: `f(index, expert, place)`
// with the place among equals of the warp so far. counts: [experts], of this warp.
template <typename F>
__device__ __forceinline__ void each_id(const int32_t* ids, int64_t begin, int64_t end, int64_t experts,
                                        int32_t* counts, int lane, F f) {
  constexpr unsigned all = 0xFFFFFFFFu;
  for (int64_t at = begin; at < end; at += 32) {
    const int64_t i = at + lane;
    const int32_t id = i < end ? ids[i] : -1;
    const bool valid = id >= 0 && id < experts;
    // Lanes without a row get numbers of their own, so that no group of equals is theirs.
    const unsigned equal = __match_any_sync(all, valid ? id : -1 - lane);
    const int before = __popc(equal & ((1u << lane) - 1));
    const int32_t first = valid ? counts[id] : 0;
    __syncwarp();
    if (valid) {
      f(i, id, first + before);
      if (before == 0) counts[id] = first + __popc(equal);
    }
    __syncwarp();
  }
}

// Exclusive prefix sum over values[0..count) in shared memory, total behind it; all threads of the block.
__device__ __forceinline__ void block_scan(int32_t* values, int count, int32_t* scratch, int warps) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int threads = 32 * warps;
  int32_t carry = 0;
  for (int from = 0; from < count; from += threads) {
    const int i = from + static_cast<int>(threadIdx.x);
    const int32_t own = i < count ? values[i] : 0;
    int32_t sum = own;
    MEGA_MOE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    int32_t before = carry, total = carry;
    for (int w = 0; w < warps; ++w) {
      if (w < warp) before += scratch[w];
      total += scratch[w];
    }
    if (i < count) values[i] = before + sum - own;
    carry = total;
    __syncthreads();
  }
  if (threadIdx.x == 0) values[count] = carry;
  __syncthreads();
}

// Block `block` of `blocks` places its piece of the ids. block_counts [blocks][experts] are the counts of all blocks,
// null where there is one.
__device__ __forceinline__ void permute_block(const PermuteParams& a, int64_t block, int64_t blocks, int warps,
                                              const int32_t* block_counts, int32_t* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int threads = 32 * warps, experts = static_cast<int>(a.experts);
  int32_t *counts = shared, *first = shared + experts * warps, *scratch = first + experts + 1;
  const int64_t ids = a.tokens * a.top_k;
  const int64_t from = block * PermuteConfig::piece;
  const int64_t to = min(ids, from + PermuteConfig::piece);
  const int64_t each = ids_a_warp(to - from, warps);
  const int64_t begin = min(to, from + warp * each), end = min(to, from + (warp + 1) * each);

  for (int i = static_cast<int>(threadIdx.x); i < experts * warps; i += threads) counts[i] = 0;
  __syncthreads();
  each_id(a.ids, begin, end, a.experts, counts + warp * experts, lane, [](int64_t, int32_t, int32_t) {});
  __syncthreads();
  // Totals of all blocks by expert; then, kept in the warps' counts, what stands before each warp's first.
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads) {
    int32_t sum = 0, earlier = 0;
    if (block_counts) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int32_t n = block_counts[b * experts + e];
        if (b < block) earlier += n;
        sum += n;
      }
    }
    for (int w = 0; w < warps; ++w) {
      const int32_t n = counts[w * experts + e];
      counts[w * experts + e] = earlier;
      earlier += n;
    }
    first[e] = block_counts ? sum : earlier;
  }
  __syncthreads();
  block_scan(first, experts, scratch, warps);
  each_id(a.ids, begin, end, a.experts, counts + warp * experts, lane,
          [&](int64_t i, int32_t id, int32_t place) { a.rows[first[id] + place] = static_cast<int32_t>(i); });
  const int32_t routed = first[experts];
  const int64_t tokens_before = a.shared ? a.tokens : 0;
  if (block == 0) {
    for (int e = static_cast<int>(threadIdx.x); e <= experts; e += threads) a.offsets[e] = first[e];
    if (a.shared && threadIdx.x == 0) a.offsets[experts + 1] = routed + static_cast<int32_t>(a.tokens);
  }
  // The shared expert's rows, and -1 where slots were empty, by all blocks together.
  const int64_t total = ids + tokens_before;
  const int64_t step = blocks * threads;
  for (int64_t i = routed + block * threads + threadIdx.x; i < total; i += step)
    a.rows[i] = i - routed < tokens_before ? static_cast<int32_t>(ids + i - routed) : -1;
}

// Counts of one block's piece to block_counts [blocks][experts].
__device__ __forceinline__ void count_block(const PermuteParams& a, int64_t block, int warps, int32_t* block_counts,
                                            int32_t* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int threads = 32 * warps, experts = static_cast<int>(a.experts);
  const int64_t from = block * PermuteConfig::piece;
  const int64_t to = min(a.tokens * a.top_k, from + PermuteConfig::piece);
  const int64_t each = ids_a_warp(to - from, warps);
  for (int i = static_cast<int>(threadIdx.x); i < experts * warps; i += threads) shared[i] = 0;
  __syncthreads();
  each_id(a.ids, min(to, from + warp * each), min(to, from + (warp + 1) * each), a.experts, shared + warp * experts,
          lane, [](int64_t, int32_t, int32_t) {});
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads) {
    int32_t sum = 0;
    for (int w = 0; w < warps; ++w) sum += shared[w * experts + e];
    block_counts[block * experts + e] = sum;
  }
}

}  // namespace mega_moe::cuda
