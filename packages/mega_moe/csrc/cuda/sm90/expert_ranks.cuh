// What ranks tell each other, and how the end of an item becomes known.
#pragma once

#include "expert_params.hpp"
#include "expert_plan.cuh"
#include "expert_ptx.cuh"

namespace mega_moe::sm90 {

// A row of another rank or of this one.
struct RankRow {
  int rank, row;
};
KC_HD RankRow rank_row(const Ranks& ranks, int number) {
  const int rank = ranks.world == 1 ? 0 : number / ranks.rows;
  return {rank, number - rank * ranks.rows};
}

__device__ inline int epoch(const ExpertsParams& p) { return load_acquire(p.state + kEpoch) + 1; }

// Sets this rank's flag of a kind (0: its inputs are there, world: its parts are stored) for all ranks. One thread.
__device__ inline void tell_ranks(const ExpertsParams& p, int kind) {
  const int now = epoch(p);  // before anybody can go on and count the launch
  for (int rank = 0; rank < p.ranks.world; ++rank) store_release_system(p.ranks.flags[rank] + kind + p.ranks.rank, now);
}

// Threads 0 to world - 1 wait for all ranks' flags of a kind.
__device__ inline void wait_for_ranks(const ExpertsParams& p, int kind, int thread) {
  if (kind == 0 && p.ranks.met) return;
  if (p.ranks.world > 1 && thread < p.ranks.world)
    wait_for_flag(p.ranks.flags[p.ranks.rank], kind + thread, p.state, epoch(p));
}

// An item's results are stored, and this thread has seen that. The last item of a rank tells the others.
__device__ inline void announce_item(const ExpertsParams& p, const ExpertPlan& plan, Kind kind, int tile) {
  fence_proxy_async_all();
  if (kind == Kind::first) return count_release(p.state + kTileDone + tile);
  if (p.ranks.world == 1) return count_release(p.state + kSecondDone);
  __threadfence_system();
  const bool last = atomicAdd(p.state + kSecondDone, 1) + 1 == second_items(plan);
  __threadfence_system();
  if (last) tell_ranks(p, p.ranks.world);
}

}  // namespace mega_moe::sm90
