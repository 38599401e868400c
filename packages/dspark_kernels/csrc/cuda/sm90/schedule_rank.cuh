// The first `wanted` of the keys that a block's threads hold: by a histogram over shared memory of the survival in even
// steps, then by finer ones inside a step, until one value or a handful of keys is left.
#pragma once

#include "cuda/sm90/unroll.cuh"
#include "kernel_core/cuda/hd.cuh"
#include "schedule.hpp"

namespace dspark_kernels::cuda {

using kernel_core::cuda::bits_float;
using kernel_core::cuda::float_bits;

constexpr int kMostRequests = 1024, kMostDrafts = 8;
constexpr int32_t kOneBits = 0x3F800000;  // of 1.0f, the largest survival
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;
constexpr int kBinBits = 11, kBins = 1 << kBinBits, kBinsAChunk = 64, kFew = 32;

struct RankShared {
  int32_t bins[2][kBins];  // the second for the first finer steps
  int32_t chunk[32];
  int32_t warp_sum[2][32];
  int32_t ones[32];  // of a warp: keys of survival 1, which would all meet in one bin
  int32_t equal[32][kMostDrafts];
  unsigned long long few_keys[kFew];  // of first_order; 0 where there is none
  int32_t few;
};

struct Threads {
  int id, lane, warp, warps;
};

// The sum over all threads of each half of `pair`; sums stay below 2^15.
__device__ __forceinline__ int32_t block_sum(int32_t pair, const Threads& t, int32_t (&slots)[32]) {
  const int32_t sum = __reduce_add_sync(kWholeWarp, pair);
  if (t.lane == 0) slots[t.warp] = sum;
  __syncthreads();
  return __reduce_add_sync(kWholeWarp, t.lane < t.warps ? slots[t.lane] : 0);
}

// Sum up to and with the own lane
__device__ __forceinline__ int32_t scan_warp(int32_t x, int lane) {
  DSPARK_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(kWholeWarp, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

// Keys of a request: the bits of its drafts' survival, which order as the numbers do; -1 where there is no draft.
template <int kDrafts>
struct Keys {
  int32_t at[kDrafts];

  __device__ __forceinline__ int32_t count_from(int32_t least) const {
    int32_t count = 0;
    DSPARK_UNROLL
    for (int j = 0; j < kDrafts; ++j) count += at[j] >= least;
    return count;
  }
};

__device__ __forceinline__ void clear_bins(RankShared& shared, const Threads& t) {
  for (int i = t.id; i < kBins; i += 32 * t.warps) shared.bins[0][i] = shared.bins[1][i] = 0;
  if (t.id < kFew) shared.few_keys[t.id] = 0;
  if (t.id == 0) shared.few = 0;
}

// Counts keys in their bins, bin(j) of draft j, -1 for none. Where a warp's keys crowd into a few bins, one lane adds
// for all: equal addresses would follow one another.
template <int kDrafts, typename Bin>
__device__ __forceinline__ void count_bins(const Threads& t, int32_t* bins, Bin bin) {
  constexpr int32_t kCrowd = 4;
  uint32_t least = kBins, most = 0;  // of them, and one behind
  DSPARK_UNROLL
  for (int j = 0; j < kDrafts; ++j) {
    least = min(least, static_cast<uint32_t>(bin(j)));
    most = max(most, static_cast<uint32_t>(bin(j) + 1));
  }
  const auto low = static_cast<int32_t>(__reduce_min_sync(kWholeWarp, least));
  const auto end = static_cast<int32_t>(__reduce_max_sync(kWholeWarp, most));
  if (end - low <= kCrowd) {
    for (int32_t b = low; b < end; ++b) {
      int32_t count = 0;
      DSPARK_UNROLL
      for (int j = 0; j < kDrafts; ++j) count += bin(j) == b;
      count = __reduce_add_sync(kWholeWarp, count);
      if (t.lane == 0 && count > 0) atomicAdd(&bins[b], count);
    }
    return;
  }
  DSPARK_UNROLL
  for (int j = 0; j < kDrafts; ++j)
    if (const int32_t b = bin(j); b >= 0) atomicAdd(&bins[b], 1);
}

// Into even steps of 1 / kBins; 1 itself is beyond them. The product is exact.
template <int kDrafts>
__device__ __forceinline__ void count_first(const Keys<kDrafts>& keys, const float (&survival)[kDrafts],
                                            const Threads& t, RankShared& shared) {
  int32_t ones = 0;
  DSPARK_UNROLL
  for (int j = 0; j < kDrafts; ++j) ones += keys.at[j] == kOneBits;
  count_bins<kDrafts>(t, shared.bins[0], [&](int j) {
    return keys.at[j] >= 0 && keys.at[j] != kOneBits ? static_cast<int32_t>(survival[j] * kBins) : -1;
  });
  ones = __reduce_add_sync(kWholeWarp, ones);
  if (t.lane == 0) shared.ones[t.warp] = ones;
}

// The bin where the count from the top reaches `left`, which it does; `left` becomes what is missing above that bin.
// Every warp finds it for itself.
struct Bin {
  int index, count;
};
__device__ __forceinline__ Bin find_bin(const int32_t* bins, int32_t& left, const Threads& t, RankShared& shared) {
  for (int c = t.warp; c < kBins / kBinsAChunk; c += t.warps) {
    const int at = c * kBinsAChunk + t.lane;
    const int32_t sum = __reduce_add_sync(kWholeWarp, bins[at] + bins[at + 32]);
    if (t.lane == 0) shared.chunk[c] = sum;
  }
  __syncthreads();
  // Lane 0 holds the highest
  const int32_t mine = shared.chunk[31 - t.lane], upto = scan_warp(mine, t.lane);
  const int lane = __ffs(__ballot_sync(kWholeWarp, upto >= left)) - 1;
  left -= __shfl_sync(kWholeWarp, upto - mine, lane);
  const int high = (32 - lane) * kBinsAChunk - 1 - 2 * t.lane;
  const int32_t a = bins[high], b = bins[high - 1], both = scan_warp(a + b, t.lane);
  const int found = __ffs(__ballot_sync(kWholeWarp, both >= left)) - 1;
  const bool second = both - b < left;
  left -= __shfl_sync(kWholeWarp, second ? both - b : both - a - b, found);
  return {__shfl_sync(kWholeWarp, second ? high - 1 : high, found), __shfl_sync(kWholeWarp, second ? b : a, found)};
}

// Of the keys equal to `key`, `left` belong: by place, then by request.
template <int kDrafts>
__device__ __forceinline__ int32_t admitted_equals(const Keys<kDrafts>& keys, int32_t key, int32_t left,
                                                   const Threads& t, RankShared& shared) {
  int32_t mine = 0;
  uint32_t lanes[kDrafts];
  DSPARK_UNROLL
  for (int j = 0; j < kDrafts; ++j) {
    lanes[j] = __ballot_sync(kWholeWarp, keys.at[j] == key);
    if (t.lane == j) shared.equal[t.warp][j] = __popc(lanes[j]);
  }
  __syncthreads();
  DSPARK_UNROLL
  for (int j = 0; j < kDrafts; ++j) {
    const int32_t others = t.lane < t.warps ? shared.equal[t.lane][j] : 0;
    const int32_t all = __reduce_add_sync(kWholeWarp, others);
    const int32_t before = __reduce_add_sync(kWholeWarp, t.lane < t.warp ? others : 0);
    const int32_t rank = before + __popc(lanes[j] & ((1u << t.lane) - 1));
    if (keys.at[j] == key && rank < left) ++mine;
    left = max(0, left - all);
  }
  return mine;
}

// Larger for larger keys, and for earlier drafts among equals; never 0.
KC_HD unsigned long long first_order(int32_t key, int place, int request) {
  const auto order = static_cast<uint32_t>(place * kMostRequests + request);
  return static_cast<unsigned long long>(static_cast<uint32_t>(key)) << 32 | (0xFFFFFFFFu - order);
}

// Of the at most kFew keys with low <= key < high, `left` belong, and all above. Counts both.
template <int kDrafts>
__device__ __forceinline__ int32_t admitted_few(const Keys<kDrafts>& keys, int32_t low, int32_t high, int32_t left,
                                                const Threads& t, RankShared& shared) {
  const auto width = static_cast<uint32_t>(high - low);
  bool some = false;  // most threads have none
  DSPARK_UNROLL
  for (int j = 0; j < kDrafts; ++j) some |= static_cast<uint32_t>(keys.at[j] - low) < width;
  if (some) {
    DSPARK_UNROLL
    for (int j = 0; j < kDrafts; ++j)
      if (static_cast<uint32_t>(keys.at[j] - low) < width)
        shared.few_keys[atomicAdd(&shared.few, 1)] = first_order(keys.at[j], j, t.id);
  }
  int32_t mine = keys.count_from(high);
  __syncthreads();
  if (!some) return mine;
  for (int i = 0; i < shared.few; ++i) {
    const unsigned long long key = shared.few_keys[i];
    if (static_cast<int>(~static_cast<uint32_t>(key) % kMostRequests) != t.id) continue;
    int rank = 0;
    for (int from = 0; from < shared.few; from += 8) {
      DSPARK_UNROLL
      for (int e = 0; e < 8; ++e) rank += shared.few_keys[from + e] > key;
    }
    mine += rank < left;
  }
  return mine;
}

// How many drafts of this thread's request are among the first `wanted`, of which there are more. After count_first
// and a barrier.
template <int kDrafts>
__device__ __forceinline__ int32_t admitted(const Keys<kDrafts>& keys, int32_t wanted, const Threads& t,
                                            RankShared& shared) {
  int32_t left = wanted;
  const int32_t ones = __reduce_add_sync(kWholeWarp, t.lane < t.warps ? shared.ones[t.lane] : 0);
  if (left <= ones) return admitted_equals(keys, kOneBits, left, t, shared);
  left -= ones;
  Bin bin = find_bin(shared.bins[0], left, t, shared);
  int32_t low = static_cast<int32_t>(float_bits(static_cast<float>(bin.index) / kBins));
  int32_t high = static_cast<int32_t>(float_bits(static_cast<float>(bin.index + 1) / kBins));
  // Even steps of the key between its bounds, at most four times
  for (bool again = false; bin.count > kFew && bin.count != left && high - low > 1; again = true) {
    const int width = kernel_core::cuda::floor_log2(static_cast<uint32_t>(high - low - 1) | 1);
    const int shift = width < kBinBits ? 0 : width - kBinBits + 1;
    if (again) {
      __syncthreads();
      clear_bins(shared, t);
      __syncthreads();
    }
    count_bins<kDrafts>(t, shared.bins[1], [&](int j) {
      return keys.at[j] >= low && keys.at[j] < high ? (keys.at[j] - low) >> shift : -1;
    });
    __syncthreads();
    bin = find_bin(shared.bins[1], left, t, shared);
    const int32_t step = 1 << shift;
    low += bin.index * step;
    high = min(high, low + step);
  }
  if (bin.count == left) return keys.count_from(low);
  if (bin.count <= kFew) return admitted_few(keys, low, high, left, t, shared);
  return keys.count_from(high) + admitted_equals(keys, low, left, t, shared);
}

}  // namespace dspark_kernels::cuda
