// Verification in one flow: whoever brings the last of what a step needs takes the step. A row is decided by the block
// of threads that measured the last part of it, a request ends with the row that settles it, and redraws wait in a list
// from which blocks that have done their own work take parts. Nobody waits for another block of the same launch.
//
// Rows are measured place by place, all requests' first rows first, so that most rows behind a rejected draft are never
// read: a request's bits say where it ends. What is emitted does not depend on it, as only rows that are reached count.
#pragma once

#include "cuda/sm90/row_request.cuh"

namespace dspark_kernels::cuda {

// Of a request: bit j where place j is decided, bit 16 + j where its draft stands too.
KC_HD uint32_t decided_bits(int place, bool stands) { return 1u << place | (stands ? 1u << (16 + place) : 0u); }
// Whether the first place that does not stand is decided.
KC_HD bool has_end(uint32_t bits) {
  const uint32_t open = ~(bits >> 16);
  return (bits & open & (0u - open) & 0xFFFFu) != 0;
}
// Whether a place before this one is decided and does not stand: the row will not be asked for.
KC_HD bool is_behind_end(uint32_t bits, int place) { return (bits & ~(bits >> 16) & ((1u << place) - 1)) != 0; }

// All 0 when a flow begins, as is the RowWork of its rows.
struct Flow {
  uint32_t* bits;    // [requests]
  int32_t* redraws;  // [requests + 1]; requests to be redrawn, plus 1, in the order of their arrival
  int32_t* taken;    // [requests + 1]; parts of them that somebody works on
  int32_t* ends;     // [2]; number of redraws, and how many have no part left
  int requests, parts;
};

// The same in every thread, though bits may come meanwhile
__device__ __forceinline__ bool place_is_behind_end(const Flow& flow, int64_t r, int place, const Team& team,
                                                    LawShared& shared) {
  if (team.id == 0) shared.count = is_behind_end(fresh(&flow.bits[r]), place);
  __syncthreads();
  const bool behind = shared.count != 0;
  __syncthreads();
  return behind;
}

// Part of a redraw that this team took, in every thread
struct Taken {
  int64_t request;  // -1 for none
  int part;
};

__device__ __forceinline__ Taken take_part(const Flow& flow, int slot, const Team& team, LawShared& shared) {
  if (team.id == 0) {
    const int32_t request = slot < flow.requests ? fresh(&flow.redraws[slot]) - 1 : -1;
    int32_t part = flow.parts;
    if (request >= 0) part = atomicAdd(&flow.taken[slot], 1);
    if (part == flow.parts - 1) atomicMax(&flow.ends[1], slot + 1);
    shared.count = part < flow.parts ? request : -1, shared.result = part;
  }
  __syncthreads();
  const Taken taken{shared.count, static_cast<int>(shared.result)};
  __syncthreads();
  if (taken.request >= 0) __threadfence();
  return taken;
}

__device__ __forceinline__ void redraw_taken(const Verify& a, const Rows& rows, const Decision* decisions,
                                             const Flow& flow, const Taken& taken, const Team& team,
                                             LawShared& shared) {
  const EndInputs in(a, taken.request, team.lane);
  const Ending e(decisions, in, team.lane);
  redraw_part<kLaneValues / 2>(a, rows, taken.request, in, e, taken.part, flow.parts, team, shared);
}

// Writes the tokens of a request whose end is known, or asks for a redraw.
__device__ __forceinline__ void finish_request(const Verify& a, const Decision* decisions, const Flow& flow, int64_t r,
                                               const Team& team) {
  const EndInputs in(a, r, team.lane);
  const Ending e(decisions, in, team.lane);
  if (!e.redrawn) {
    write_tokens(a, r, in, e, -1, team);
  } else if (team.id == 0) {
    const int slot = atomicAdd(&flow.ends[0], 1);
    __threadfence();
    atomicExch(&flow.redraws[slot], static_cast<int32_t>(r) + 1);
  }
}

// After decide_row of this place: whether it settles where the request ends, which one place alone does.
__device__ __forceinline__ bool settle_row(const Flow& flow, int64_t r, int place, Verdict verdict, const Team& team,
                                           LawShared& shared) {
  __syncthreads();
  if (team.id == 0) {
    __threadfence();
    const uint32_t mine = decided_bits(place, verdict == kStands), before = atomicOr(&flow.bits[r], mine);
    shared.result = !has_end(before) && has_end(before | mine);
  }
  __syncthreads();
  const bool settles = shared.result != 0;
  __syncthreads();
  if (settles) __threadfence();
  return settles;
}

struct Arrival {
  bool last;     // of the parts of a row that is decided now
  bool redraws;  // some part of a redraw waits
};

// Measures part `part` of a row by one team, whose warps take `each` blocks. Rows with filters are left to the readings
// that follow.
__device__ __forceinline__ Arrival measure_part(const Rows& rows, const Flow& flow, int64_t r, int place, int64_t index,
                                                int part, int parts, int each, const Team& team, LawShared& shared) {
  const int blocks = static_cast<int>(row_blocks(rows.vocab));
  DSPARK_KEEP_LOOP
  for (int e = 0; e < each; ++e) {
    const int block = (part * each + e) * team.warps + team.warp;
    if (block < blocks) measure_block<false>(rows, r, place, block, team.lane, false);
  }
  const bool decides = !params_of(rows, r).filtered(rows.vocab);
  __threadfence();
  __syncthreads();
  if (team.id == 0) shared.result = decides && atomicAdd(&rows.work[index].measured, 1) == parts - 1;
  if (team.id == team.threads - 1) {  // while the other thread waits for its answer
    const int32_t slot = fresh(&flow.ends[1]);
    shared.count = slot < flow.requests && fresh(&flow.redraws[slot]) != 0;
  }
  __syncthreads();
  const Arrival arrival{shared.result != 0, shared.count != 0};
  __syncthreads();
  if (arrival.last) __threadfence();
  return arrival;
}

// What a team does for a part of a place of a request; ready() comes before anything that another block of threads
// writes.
template <typename Ready>
__device__ __forceinline__ void flow_part(const Verify& a, const Rows& rows, Decision* decisions, const Flow& flow,
                                          int64_t r, int place, int part, int parts, int each, const Team& team,
                                          LawShared& shared, Ready ready) {
  const int64_t index = rows.index(r, place);
  bool ends = place == 0 && part == 0, redraws = true;  // as for a request without rows
  ready();
  if (index >= 0) {
    ends = false;
    if (place == 0 || !place_is_behind_end(flow, r, place, team, shared)) {
      const Arrival arrival = measure_part(rows, flow, r, place, index, part, parts, each, team, shared);
      redraws = arrival.redraws;
      if (arrival.last) {
        const Row row(rows.logits + index * rows.row_stride, rows.vocab);
        const BlockStats* stats = rows.stats + index * row.blocks;
        Known known = know_row(row, stats, params_of(rows, r), team, shared);
        known.filtered = false;
        const Verdict verdict = decide_row(a, decisions, r, place, index, row, stats, known, team, shared);
        ends = settle_row(flow, r, place, verdict, team, shared);
      }
    }
  }
  if (ends) finish_request(a, decisions, flow, r, team);
  if (!redraws && !ends) return;
  const Taken taken = take_part(flow, team.id == 0 ? fresh(&flow.ends[1]) : 0, team, shared);
  if (taken.request >= 0) redraw_taken(a, rows, decisions, flow, taken, team, shared);
}

// The parts that are left, by team `team_index` of `teams`, a multiple of flow.parts, when all rows are decided.
__device__ __forceinline__ void drain_redraws(const Verify& a, const Rows& rows, const Decision* decisions,
                                              const Flow& flow, int team_index, int teams, const Team& team,
                                              LawShared& shared) {
  const int count = fresh(&flow.ends[0]);
  for (int at = team_index / flow.parts; at < count; at += teams / flow.parts) {
    const Taken taken = take_part(flow, count - 1 - at, team, shared);  // the latest are those with parts left
    if (taken.request >= 0) redraw_taken(a, rows, decisions, flow, taken, team, shared);
    __syncthreads();
  }
}

}  // namespace dspark_kernels::cuda
