// Where the running sum of weights, in id order, reaches a target: blocks first, then one block, by one warp.
#pragma once

#include "cuda/sm90/row_blocks.cuh"

namespace dspark_kernels::cuda {

// The last lane whose bit is set
KC_HD int last_lane(uint32_t lanes) { return kernel_core::cuda::floor_log2(lanes); }

// weights(block, lane, w) gives the weights of a block, sum(block) their sum. Every lane returns the token: the first
// with a weight where the sum reaches `target` (above 0), or, where rounding leaves it beyond, the last with a weight;
// -1 without any.
template <typename Sum, typename Weights>
__device__ __forceinline__ int64_t reach(int blocks, double target, int lane, Sum sum, Weights weights) {
  double before = 0;
  int found = -1, last = -1;
  for (int from = 0; from < blocks && found < 0; from += 32) {
    const double mine = from + lane < blocks ? sum(from + lane) : 0.0;
    const double upto = warp_scan(mine, lane);
    const uint32_t some = __ballot_sync(kLanes, mine > 0);
    const uint32_t reached = __ballot_sync(kLanes, mine > 0 && before + upto >= target);
    if (some) last = from + last_lane(some);
    if (reached) {
      const int first = __ffs(reached) - 1;
      found = from + first;
      before += __shfl_sync(kLanes, upto - mine, first);
    } else {
      before += __shfl_sync(kLanes, upto, 31);
    }
  }
  if (found < 0) {
    if (last < 0) return -1;
    found = last, target = static_cast<double>(infinity());
  }
  float w[kLaneValues];
  weights(found, lane, w);
  int64_t behind = -1;
  DSPARK_UNROLL
  for (int c = 0; c < kChunks; ++c) {
    const double mine = static_cast<double>(w[4 * c]) + w[4 * c + 1] + w[4 * c + 2] + w[4 * c + 3];
    const double upto = warp_scan(mine, lane);
    const uint32_t some = __ballot_sync(kLanes, mine > 0);
    const uint32_t reached = __ballot_sync(kLanes, mine > 0 && before + upto >= target);
    double running = before + (upto - mine);
    int64_t own = -1;  // of this lane: the first that reaches, or its last with a weight
    bool done = false;
    DSPARK_UNROLL
    for (int e = 0; e < 4; ++e) {
      running += w[4 * c + e];
      if (!done && w[4 * c + e] > 0) {
        own = Row::first(found, c, lane) + e;
        done = running >= target;
      }
    }
    if (reached) return __shfl_sync(kLanes, own, __ffs(reached) - 1);
    if (some) behind = __shfl_sync(kLanes, own, last_lane(some));
    before += __shfl_sync(kLanes, upto, 31);
  }
  return behind;
}

// The lowest token with the value `top`, which some block has as its largest.
__device__ __forceinline__ int64_t first_of(const Row& row, const BlockStats* stats, float top, int lane) {
  int block = -1;
  for (int from = 0; from < row.blocks && block < 0; from += 32) {
    const uint32_t has = __ballot_sync(kLanes, from + lane < row.blocks && stats[from + lane].top == top);
    if (has) block = from + __ffs(has) - 1;
  }
  float x[kLaneValues];
  load_block(row, block, lane, x);
  int64_t found = -1;
  DSPARK_UNROLL
  for (int c = kChunks - 1; c >= 0; --c) {
    int place = -1;
    DSPARK_UNROLL
    for (int e = 3; e >= 0; --e)
      if (x[4 * c + e] == top) place = e;
    const uint32_t has = __ballot_sync(kLanes, place >= 0);
    if (has) {
      const int lowest = __ffs(has) - 1;
      found = Row::first(block, c, lowest) + __shfl_sync(kLanes, place, lowest);
    }
  }
  return found;
}

}  // namespace dspark_kernels::cuda
