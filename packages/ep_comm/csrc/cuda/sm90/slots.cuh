// Which ranks a token goes to, and its place among those of its source: by prefix sums over the token's number, never
// by who comes first. Every CTA counts what lies before its own tokens, which costs less than waiting for the others.
#pragma once

#include "cuda/collectives.hpp"
#include "cuda/sm90/flags.cuh"

namespace ep_comm::cuda {

constexpr int kBlock = 32;  // tokens at once

struct SlotsShared {
  int32_t counts[kMostRanks];          // tokens so far that go to a rank
  uint64_t masks[kBlock];              // ranks of a token
  int32_t places[kBlock][kMostRanks];  // valid where the mask has the rank
};

// -1 for an empty slot and for a number that no expert has.
__device__ __forceinline__ int32_t valid_id(const Shape& s, int32_t id) {
  return id >= 0 && id < s.ranks * s.experts ? id : -1;
}

__device__ __forceinline__ uint64_t ranks_of(const Shape& s, const int32_t* ids) {
  uint64_t mask = 0;
  for (int j = 0; j < s.top_k; ++j) {
    const int32_t id = valid_id(s, ids[j]);
    if (id >= 0) mask |= uint64_t{1} << rank_of(s, id);
  }
  return mask;
}

// counts[r] = tokens before `end` that go to rank r.
template <int Warps>
__device__ void count_before(const Shape& s, const int32_t* ids, int64_t end, SlotsShared& shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (thread < kMostRanks) shared.counts[thread] = 0;
  __syncthreads();
  int32_t low = 0, high = 0;  // lane r counts for ranks r and r + 32
  for (int64_t first = int64_t{warp} * 32; first < end; first += Warps * 32) {
    const int64_t token = first + lane;
    const uint64_t mask = token < end ? ranks_of(s, ids + token * s.top_k) : 0;
    for (int r = 0; r < s.ranks; ++r) {
      const int goes = __popc(__ballot_sync(kAll, static_cast<int>(mask >> r & 1)));
      low += lane == r ? goes : 0, high += lane + 32 == r ? goes : 0;
    }
  }
  if (low) atomicAdd(&shared.counts[lane], low);
  if (high) atomicAdd(&shared.counts[lane + 32], high);
  __syncthreads();
}

// Masks and places of `n` tokens from `first` on, at most 32, and counts past them. A warp does a rank.
template <int Warps>
__device__ void place_tokens(const Shape& s, const int32_t* ids, int64_t first, int n, SlotsShared& shared) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const uint64_t mask = lane < n ? ranks_of(s, ids + (first + lane) * s.top_k) : 0;
  if (warp == 0) shared.masks[lane] = mask;
  for (int r = warp; r < s.ranks; r += Warps) {
    const bool goes = mask >> r & 1;
    const unsigned others = __ballot_sync(kAll, goes);
    const int32_t before = shared.counts[r];
    if (goes) shared.places[lane][r] = before + __popc(others & ((1u << lane) - 1));
    __syncwarp();
    if (lane == 0) shared.counts[r] = before + __popc(others);
  }
  __syncthreads();
}

// starts[r] = rows from sources before r, starts[ranks] = all. By warp 0; the CTA meets afterwards.
__device__ inline void prefix_counts(const Shape& s, const int32_t* counts, int32_t* starts) {
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x), r = 2 * lane;
    const int32_t a = r < s.ranks ? counts[r] : 0, b = r + 1 < s.ranks ? counts[r + 1] : 0;
    int32_t sum = a + b;
    EP_COMM_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAll, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 0) starts[0] = 0;
    if (r < s.ranks) starts[r + 1] = sum - b;
    if (r + 1 < s.ranks) starts[r + 2] = sum;
  }
  __syncthreads();
}

// The source of packed row `row`. One whole warp.
__device__ inline int source_of(const Shape& s, const int32_t* starts, int32_t row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int before = 0;
  EP_COMM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int r = lane + 32 * half;
    before += __popc(__ballot_sync(kAll, static_cast<int>(r < s.ranks && starts[r + 1] <= row)));
  }
  return before;
}

}  // namespace ep_comm::cuda
