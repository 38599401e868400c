// Saying that a rank has sent everything, and waiting for the others. Includers bring memory.cuh or its emulation.
#pragma once

#include "cuda/collectives.hpp"
#include "cuda/sm90/unroll.cuh"

namespace ep_comm::cuda {

constexpr unsigned kAll = 0xFFFFFFFFu;

__device__ __forceinline__ Control& control_of(const RankArgs& a, int rank) {
  return *reinterpret_cast<Control*>(a.peers[rank]);
}

// One collective of one rank, as one of its CTAs sees it.
struct Turn {
  Control* own;
  uint64_t epoch;
  uint64_t flag;
  Kind kind;
  int cta, ctas;
  int* shared;  // one word, to share a warp's finding
};

// The first to fail says why and ends the peers' waits. Called by one whole warp.
__device__ inline void fail(const RankArgs& a, const Turn& turn, Failure why, uint64_t missing, uint64_t seen) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int first = 0;
  if (lane == 0 && atomicMax(&turn.own->broken, 1) == 0) {
    first = 1;
    Report& report = *a.report;
    report.kind = static_cast<int32_t>(turn.kind), report.epoch = turn.epoch;
    report.missing = missing, report.seen = seen;
    fence_system();
    *const_cast<volatile int32_t*>(&report.state) = static_cast<int32_t>(why);
  }
  if (!__shfl_sync(kAll, first, 0) || why == Failure::ended) return;
  const Ended word = why == Failure::timeout ? Ended::timed_out : Ended::mismatched;
  for (int r = lane; r < a.shape.ranks; r += 32)
    if (r != a.rank) store_flag(&control_of(a, r).ended, ended_word(word, a.rank));
}

// Until `flags[r]` is at `target`'s epoch or past it for all ranks; one that is at the epoch with another kind or
// detail is a mismatch. One whole warp.
__device__ inline bool wait_by_warp(const RankArgs& a, const Turn& turn, const uint64_t* flags, uint64_t target) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint64_t begin = now();
  uint64_t flag[2] = {target, target};
  for (;;) {
    bool late[2] = {}, other[2] = {};
    EP_COMM_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int r = lane + 32 * half;
      if (r >= a.shape.ranks) continue;
      flag[half] = load_acquire(flags + r);
      late[half] = stamp_epoch(flag[half]) < stamp_epoch(target);
      other[half] = stamp_epoch(flag[half]) == stamp_epoch(target) && flag[half] != target;
    }
    const uint64_t missing = __ballot_sync(kAll, late[0]) | static_cast<uint64_t>(__ballot_sync(kAll, late[1])) << 32;
    const uint64_t elsewhere = __ballot_sync(kAll, other[0]) | static_cast<uint64_t>(__ballot_sync(kAll, other[1]))
                                                                   << 32;
    if (elsewhere) {
      const int who = __ffsll(static_cast<long long>(elsewhere)) - 1;
      const uint64_t seen = __shfl_sync(kAll, who < 32 ? flag[0] : flag[1], who % 32);
      fail(a, turn, Failure::mismatch, elsewhere, seen);
      return false;
    }
    if (missing == 0) return true;
    const uint64_t ended = __shfl_sync(kAll, lane == 0 ? load_acquire(&turn.own->ended) : 0, 0);
    if (ended) {
      fail(a, turn, Failure::ended, missing, ended);
      return false;
    }
    if (__shfl_sync(kAll, static_cast<int>(now() - begin > a.limit), 0)) {
      fail(a, turn, Failure::timeout, missing, 0);
      return false;
    }
    pause();
  }
}

// The same for a whole CTA, which all goes on or all ends.
__device__ inline bool wait_all(const RankArgs& a, const Turn& turn, const uint64_t* flags, uint64_t target) {
  if (threadIdx.x < 32) {
    const bool came = wait_by_warp(a, turn, flags, target);
    if (threadIdx.x == 0) *turn.shared = came;
  }
  __syncthreads();
  const bool came = *turn.shared != 0;
  __syncthreads();
  return came;
}

// Opens the next collective; false if the communicator is broken. A collective of the same kind as the last one waits
// until all ranks have come to it, and so are done with what it will write over.
__device__ inline bool open_turn(const RankArgs& a, Kind kind, uint32_t detail, int cta, int ctas, int* shared,
                                 Turn& turn) {
  Control* own = &control_of(a, a.rank);
  // Only the last CTA to arrive changes epoch and last, when all have read them.
  const uint64_t epoch = own->epoch + 1;
  turn = {own, epoch, stamp(epoch, kind, detail), kind, cta, ctas, shared};
  if (threadIdx.x < 32) {  // the others go by what one warp saw
    int broken = 0;
    if (threadIdx.x == 0) broken = *const_cast<volatile int32_t*>(&own->broken);
    broken = __shfl_sync(kAll, broken, 0);
    const uint64_t ended = __shfl_sync(kAll, threadIdx.x == 0 ? load_acquire(&own->ended) : 0, 0);
    if (ended && !broken) fail(a, turn, Failure::ended, 0, ended);
    if (threadIdx.x == 0) *shared = broken || ended;
  }
  __syncthreads();
  const bool over = *shared != 0;
  __syncthreads();
  if (over) return false;
  if (own->last != static_cast<int32_t>(kind) || kind == Kind::barrier) return true;
  if (cta == 0 && threadIdx.x < 32) {
    fence_system();
    for (int r = static_cast<int>(threadIdx.x); r < a.shape.ranks; r += 32)
      store_flag(&control_of(a, r).entered[a.rank], stamp(epoch, kind, 0));
  }
  return wait_all(a, turn, own->entered, stamp(epoch, kind, 0));
}

// This CTA has stored everything. The last one of the rank tells all ranks.
__device__ inline void post(const RankArgs& a, const Turn& turn) {
  __syncthreads();
  if (threadIdx.x >= 32) return;
  int last = 0;
  if (threadIdx.x == 0) {
    fence_system();
    last = atomicAdd(&turn.own->arrived, 1) == turn.ctas - 1;
  }
  if (!__shfl_sync(kAll, last, 0)) return;
  if (threadIdx.x == 0) {
    turn.own->arrived = 0;
    turn.own->epoch = turn.epoch;
    turn.own->last = static_cast<int32_t>(turn.kind);
  }
  fence_system();  // each lane's own: its store publishes what it covers
  for (int r = static_cast<int>(threadIdx.x); r < a.shape.ranks; r += 32)
    store_flag(&control_of(a, r).posted[a.rank], turn.flag);
}

__device__ inline bool wait_posted(const RankArgs& a, const Turn& turn) {
  return wait_all(a, turn, turn.own->posted, turn.flag);
}

}  // namespace ep_comm::cuda
