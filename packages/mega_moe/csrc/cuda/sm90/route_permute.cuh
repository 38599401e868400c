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
  static constexpr int64_t alone = 2048;  // ids that one block sorts by itself
  static constexpr int64_t piece = 1024;  // ids of one of several blocks, at least
  static constexpr int64_t blocks = 64;   // at most: each one reads the counts of all
  static constexpr int batch = 4;         // rounds of 32 ids whose reads are on their way together
};

// ids a warp owns, whole rounds of 32
KC_HD int64_t ids_a_warp(int64_t ids, int warps) { return (ids + 32 * warps - 1) / (32 * warps) * 32; }

KC_HD int64_t permute_piece(int64_t ids) {
  if (ids <= PermuteConfig::alone) return PermuteConfig::alone;
  const int64_t even = (ids + PermuteConfig::blocks - 1) / PermuteConfig::blocks;
  const int64_t whole = (even + PermuteConfig::threads - 1) / PermuteConfig::threads * PermuteConfig::threads;
  return whole < PermuteConfig::piece ? PermuteConfig::piece : whole;
}
KC_HD int64_t permute_blocks(int64_t ids) {
  return ids <= PermuteConfig::alone ? 1 : (ids + permute_piece(ids) - 1) / permute_piece(ids);
}

// Shared memory in int32: counts of each warp, then first places, then the scan's warps.
KC_HD int64_t permute_shared(int64_t experts, int warps) { return experts * warps + experts + 1 + 64; }

// How often each expert stands in ids [begin, end) of this warp, or where its next row goes: `f(index, expert, place)`
// with the place among equals of the warp so far. counts: [experts], of this warp.
template <typename F>
__device__ __forceinline__ void each_id(const int32_t* ids, int64_t begin, int64_t end, int64_t experts,
                                        int32_t* counts, int lane, F f) {
  constexpr unsigned all = 0xFFFFFFFFu;
  constexpr int batch = PermuteConfig::batch;
  for (int64_t from = begin; from < end; from += 32 * batch) {
    int32_t held[batch];
    MEGA_MOE_UNROLL
    for (int b = 0; b < batch; ++b) held[b] = from + 32 * b + lane < end ? ids[from + 32 * b + lane] : -1;
    MEGA_MOE_UNROLL
    for (int b = 0; b < batch; ++b) {
      if (from + 32 * b >= end) break;
      const int32_t id = held[b];
      const bool valid = id >= 0 && id < experts;
      // Lanes without a row get numbers of their own, so that no group of equals is theirs.
      const unsigned equal = __match_any_sync(all, valid ? id : -1 - lane);
      const int before = __popc(equal & ((1u << lane) - 1));
      const int32_t first = valid ? counts[id] : 0;
      __syncwarp();
      if (valid) {
        f(from + 32 * b + lane, id, first + before);
        if (before == 0) counts[id] = first + __popc(equal);
      }
      __syncwarp();
    }
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

// What a warp of a block has of the ids.
struct PermuteShare {
  int64_t begin, end;
  int active;  // warps of the block that have some

  KC_HD PermuteShare(int64_t ids, int64_t block, int warps, int warp) {
    const int64_t piece = permute_piece(ids), from = block * piece;
    const int64_t to = ids < from + piece ? ids : from + piece, each = ids_a_warp(to - from, warps);
    begin = to < from + warp * each ? to : from + warp * each;
    end = to < begin + each ? to : begin + each;
    active = each == 0 ? 0 : static_cast<int>((to - from + each - 1) / each);
  }
};

// Counts of the block's warps to counts [warps][experts]; ends with a barrier.
__device__ __forceinline__ void count_warps(const PermuteParams& a, const PermuteShare& share, int warps,
                                            int32_t* counts) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int experts = static_cast<int>(a.experts);
  for (int i = static_cast<int>(threadIdx.x); i < experts * share.active; i += 32 * warps) counts[i] = 0;
  __syncthreads();
  each_id(a.ids, share.begin, share.end, a.experts, counts + warp * experts, lane, [](int64_t, int32_t, int32_t) {});
  __syncthreads();
}

// Block `block` of `blocks` places its piece of the ids. block_counts [blocks][experts] are the counts of all blocks,
// null where there is one; `wait` returns once they are there.
template <typename Wait>
__device__ __forceinline__ void permute_block(const PermuteParams& a, int64_t block, int64_t blocks, int warps,
                                              const int32_t* block_counts, int32_t* shared, Wait wait) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int threads = 32 * warps, experts = static_cast<int>(a.experts);
  int32_t *counts = shared, *first = shared + experts * warps, *scratch = first + experts + 1;
  const int64_t ids = a.tokens * a.top_k;
  const PermuteShare share(ids, block, warps, warp);
  count_warps(a, share, warps, counts);
  wait();
  // Totals of all blocks by expert; then, kept in the warps' counts, what stands before each warp's first.
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads) {
    int32_t sum = 0, earlier = 0;
    if (block_counts) {
      constexpr int batch = 16;
      for (int64_t from = 0; from < blocks; from += batch) {
        int32_t n[batch];
        MEGA_MOE_UNROLL
        for (int i = 0; i < batch; ++i) n[i] = from + i < blocks ? block_counts[(from + i) * experts + e] : 0;
        MEGA_MOE_UNROLL
        for (int i = 0; i < batch; ++i) {
          if (from + i < block) earlier += n[i];
          sum += n[i];
        }
      }
    }
    for (int w = 0; w < share.active; ++w) {
      const int32_t n = counts[w * experts + e];
      counts[w * experts + e] = earlier;
      earlier += n;
    }
    first[e] = block_counts ? sum : earlier;
  }
  __syncthreads();
  block_scan(first, experts, scratch, warps);
  each_id(a.ids, share.begin, share.end, a.experts, counts + warp * experts, lane,
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
  const int threads = 32 * warps, experts = static_cast<int>(a.experts);
  const PermuteShare share(a.tokens * a.top_k, block, warps, static_cast<int>(threadIdx.x) / 32);
  count_warps(a, share, warps, shared);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads) {
    int32_t sum = 0;
    for (int w = 0; w < share.active; ++w) sum += shared[w * experts + e];
    block_counts[block * experts + e] = sum;
  }
}

}  // namespace mega_moe::cuda
