// The whole schedule by one block: survival, the first drafts under a budget, and the layout of their rows.
//
// A thread holds the keys of one request. Several blocks compute the same, and each writes the results of its warp of
// requests: no block waits for another. Sums are of integers, so that their order does not matter.
#pragma once

#include "cuda/sm90/schedule_rank.cuh"
#include "survival.hpp"

namespace dspark_kernels::cuda {

struct ScheduleShared {
  RankShared rank;
  // Of this block's 32 requests
  int32_t slot[32];
  int64_t start[32], token[32][kMostDrafts + 1];
  uint16_t row[32 * (kMostDrafts + 1)];  // request and place of a verification row
  int32_t local, first;                  // rows of this block, and where they begin
};

// Eight bytes into shared memory, there after copied()
__device__ __forceinline__ void copy_early(int64_t* to, const int64_t* from) {
#if defined(__CUDA_ARCH__)
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from) : "memory");
#else
  *to = *from;
#endif
}
__device__ __forceinline__ void copied() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The drafts' confidences of one slot: up to three 16-byte words that hold them, shifted into place. A gather costs by
// the lines that it touches, so few wide loads are best.
template <int kDrafts>
__device__ __forceinline__ void load_confidence(const float* at, bool present, float (&out)[kDrafts]) {
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(at) / 4 % 4);
  const float4* words = reinterpret_cast<const float4*>(at - shift);
  constexpr int kWords = (kDrafts + 3 + 3) / 4;
  float w[4 * kWords];
  DSPARK_UNROLL
  for (int k = 0; k < kWords; ++k) {
    float4 v = {0, 0, 0, 0};
    if (present && 4 * k < shift + kDrafts) v = words[k];
    w[4 * k] = v.x, w[4 * k + 1] = v.y, w[4 * k + 2] = v.z, w[4 * k + 3] = v.w;
  }
  DSPARK_UNROLL
  for (int j = 0; j < 4 * kWords - 1; ++j) w[j] = shift & 1 ? w[j + 1] : w[j];
  DSPARK_UNROLL
  for (int j = 0; j < kDrafts; ++j) out[j] = shift & 2 ? w[j + 2] : w[j];
}

// Rows before this thread's, and in `total` all of them.
__device__ __forceinline__ int32_t rows_before(int32_t count, const Threads& t, int32_t (&slots)[32], int32_t& total) {
  const int32_t upto = scan_warp(count, t.lane);
  if (t.lane == 31) slots[t.warp] = upto;
  __syncthreads();
  const int32_t sums = t.lane < t.warps ? slots[t.lane] : 0;
  total = __reduce_add_sync(kWholeWarp, sums);
  return __reduce_add_sync(kWholeWarp, t.lane < t.warp ? sums : 0) + upto - count;
}

// Block `index` of one for every 32 requests, each with `threads` threads, at least one a request; a.drafts is kDrafts.
template <int kDrafts>
__device__ __forceinline__ void schedule_block(const Schedule& a, int index, int blocks, int threads,
                                               ScheduleShared& shared) {
  const int id = static_cast<int>(threadIdx.x);
  const Threads t{id, id % 32, id / 32, threads / 32};
  const int requests = static_cast<int>(a.requests);
  const int64_t budget = a.device_budget ? *a.device_budget : a.budget;
  const int32_t limit_given = id < requests ? a.limits[id] : -1;
  const int32_t slot_given = id < requests && a.slots ? a.slots[id] : id;
  const int32_t fixed_given = id < requests && a.fixed ? a.fixed[id] : -1;
  clear_bins(shared.rank, t);
  __syncthreads();

  bool present = limit_given >= 0 && slot_given >= 0;
  const int32_t slot = present ? slot_given : 0;
  const int32_t limit = present ? min(limit_given, kDrafts) : 0;
  const bool fixed = fixed_given >= 0;
  const int32_t own = fixed ? min(fixed_given, limit) : 0, eligible = fixed ? 0 : limit;
  float confidence[kDrafts];
  load_confidence(a.confidence + static_cast<int64_t>(slot) * kDrafts, present, confidence);
  const bool mine = t.warp == index;
  if (mine && present) {  // their latency passes while drafts are ranked
    shared.slot[t.lane] = slot;
    copy_early(&shared.start[t.lane], a.starts + slot);
    DSPARK_UNROLL
    for (int j = 0; j <= kDrafts; ++j)
      copy_early(&shared.token[t.lane][j], a.tokens + static_cast<int64_t>(slot) * (kDrafts + 1) + j);
  }
  Keys<kDrafts> keys;
  float survival[kDrafts], running = 1.0f;
  DSPARK_UNROLL
  for (int j = 0; j < kDrafts; ++j) {
    running = present ? survive(running, confidence[j]) : 0.0f;
    survival[j] = running;
    keys.at[j] = j < eligible ? static_cast<int32_t>(float_bits(running)) : -1;
  }
  count_first(keys, survival, t, shared.rank);
  const int32_t sums = block_sum((present ? 1 + own : 0) | eligible << 16, t, shared.rank.warp_sum[1]);
  const int64_t needed = sums & 0xFFFF, room = a.capacity - needed;
  const bool fits = room >= 0;
  present = present && fits;
  const int64_t wanted = budget < room ? budget : room;
  int32_t length = own;
  if (wanted >= (sums >> 16)) {
    length += eligible;
  } else if (wanted > 0) {
    length += admitted(keys, static_cast<int32_t>(wanted), t, shared.rank);
  }
  if (!present) length = 0;
  const int32_t count = present ? 1 + length : 0;
  int32_t total;
  const int32_t first = rows_before(count, t, shared.rank.warp_sum[0], total);

  if (mine) {
    copied();
    const int32_t begin = __shfl_sync(kWholeWarp, first, 0), end = __shfl_sync(kWholeWarp, first + count, 31);
    if (t.lane == 0) shared.first = begin, shared.local = end - begin;
    DSPARK_UNROLL
    for (int j = 0; j <= kDrafts; ++j)
      if (j < count) shared.row[first - begin + j] = static_cast<uint16_t>(t.lane * 16 + j);
  }
  __syncthreads();
  if (mine && id < requests) {
    a.lengths[id] = a.host[id] = length;
    a.kv_lengths[id] = present ? static_cast<int32_t>(shared.start[t.lane]) + count : 0;
    a.cu_rows[id + 1] = first + count;
    if (id == 0) a.cu_rows[0] = 0, a.host[requests] = fits ? total : -static_cast<int32_t>(needed);
    DSPARK_UNROLL
    for (int j = 0; j <= kDrafts; ++j) {
      if (j < kDrafts) a.survival[id * kDrafts + j] = present ? survival[j < kDrafts ? j : 0] : 0.0f;
      a.row_of[id * (kDrafts + 1) + j] = j < count ? first + j : -1;
    }
  }
  // The warp that writes its requests comes last here, so that most others have the rows.
  const int turned = (t.warp + t.warps - index - 1) % t.warps * 32 + t.lane;
  for (int i = turned; i < shared.local; i += threads) {
    const int request = shared.row[i] / 16, place = shared.row[i] % 16, at = shared.first + i;
    a.owner[at] = index * 32 + request;
    a.place[at] = place;
    a.source[at] = shared.slot[request] * (kDrafts + 1) + place;
    a.input_tokens[at] = shared.token[request][place];
    a.positions[at] = shared.start[request] + place;
  }
  for (int64_t i = total + static_cast<int64_t>(index) * threads + id; i < a.capacity;
       i += static_cast<int64_t>(blocks) * threads) {
    a.owner[i] = a.source[i] = -1;
    a.place[i] = 0;
    a.input_tokens[i] = a.positions[i] = 0;
  }
}

}  // namespace dspark_kernels::cuda
