// Where the running sum of weights, in id order, reaches a target: blocks first, then one block, by one warp.
#pragma once

#include "cuda/sm90/row_blocks.cuh"

namespace dspark_kernels::cuda {

// The last lane whose bit is set
KC_HD int last_lane(uint32_t lanes) { return kernel_core::cuda::floor_log2(lanes); }

// The compiler reads the value anew.
__device__ __forceinline__ void forget(float& x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+f"(x));
#else
  static_cast<void>(x);
#endif
}

// weights(block, lane, w) gives the weights of a block, sum(block) their sum. Every lane returns the token: the first
// with a weight where the sum reaches `target` (above 0), or, where rounding leaves it beyond, the last with a weight;
// -1 without any.
template <typename Sum, typename Weights>
__device__ __forceinline__ int64_t reach(int blocks, double target, int lane, Sum sum, Weights weights) {
  constexpr int kEach = 4;  // blocks of a lane, one after another
  double before = 0;
  int found = -1, last = -1;
  for (int from = 0; from < blocks && found < 0; from += 32 * kEach) {
    double own[kEach], mine = 0;
    DSPARK_UNROLL
    for (int e = 0; e < kEach; ++e) {
      const int b = from + kEach * lane + e;
      own[e] = b < blocks ? sum(b) : 0.0;
      mine += own[e];
    }
    const double upto = warp_scan(mine, lane);
    const uint32_t some = __ballot_sync(kLanes, mine > 0);
    const uint32_t reached = __ballot_sync(kLanes, mine > 0 && before + upto >= target);
    double running = before + (upto - mine), below = running;
    int at = -1;  // of this lane: the first that reaches, or its last with a weight
    bool done = false;
    DSPARK_UNROLL
    for (int e = 0; e < kEach; ++e) {
      if (!done && own[e] > 0) at = from + kEach * lane + e, below = running, done = running + own[e] >= target;
      running += own[e];
    }
    if (some) last = __shfl_sync(kLanes, at, last_lane(some));
    if (reached) {
      const int first = __ffs(reached) - 1;
      found = __shfl_sync(kLanes, at, first);
      before = __shfl_sync(kLanes, below, first);
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
  int chunk = -1;
  uint32_t reached = 0, some = 0;
  double upto = 0, start = before;
  float own[4] = {0, 0, 0, 0};
  constexpr int kAtOnce = kChunks / 4;  // scans whose steps overlap
  DSPARK_UNROLL
  for (int from = 0; from < kChunks; from += kAtOnce) {
    if (reached) continue;
    double sums[kAtOnce];
    DSPARK_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = 4 * (from + k);
      sums[k] = static_cast<double>(w[i]) + w[i + 1] + w[i + 2] + w[i + 3];
    }
    DSPARK_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      DSPARK_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const double other = __shfl_up_sync(kLanes, sums[k], step);
        if (lane >= step) sums[k] += other;
      }
    }
    DSPARK_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      if (reached) continue;
      const int i = 4 * (from + k);
      const bool has = fmaxf(fmaxf(w[i], w[i + 1]), fmaxf(w[i + 2], w[i + 3])) > 0;
      const uint32_t lanes = __ballot_sync(kLanes, has);
      if (!lanes) continue;
      reached = __ballot_sync(kLanes, has && before + sums[k] >= target);
      chunk = from + k, some = lanes, upto = sums[k], start = before;
      DSPARK_UNROLL
      for (int e = 0; e < 4; ++e) forget(own[e] = w[i + e]);  // doubles of all would need twice the registers
      before += __shfl_sync(kLanes, upto, 31);
    }
  }
  if (chunk < 0) return -1;
  const double below = __shfl_up_sync(kLanes, upto, 1);
  double running = lane == 0 ? start : start + below;
  int64_t token = -1;  // of this lane: the first that reaches, or its last with a weight
  bool done = false;
  DSPARK_UNROLL
  for (int e = 0; e < 4; ++e) {
    running += own[e];
    if (!done && own[e] > 0) {
      token = Row::first(found, chunk, lane) + e;
      done = running >= target;
    }
  }
  return __shfl_sync(kLanes, token, reached ? __ffs(reached) - 1 : last_lane(some));
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
