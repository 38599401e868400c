// The end of a request: the first row that does not stand ends it, and a rejected draft is redrawn by several blocks of
// threads.
//
// Rows are decided in any order. Bits of a request say which are and which stand, so that one arrival alone ends it,
// and that rows behind its end, which nobody will ask for, are left unread. Redraws wait in a list from which every
// block of threads that has done its own work takes a part. Nobody waits for another block of the same launch.
#pragma once

#include "cuda/sm90/row_ops.cuh"

namespace dspark_kernels::cuda {

// A token from max(p - q, 0), or from p where that has no mass. A lane holds kAtOnce values of each row at a time.
template <int kAtOnce>
struct Residual {
  const Row& row;
  const Law& p;
  const float* draft;
  const Law& q;
  float p_share, q_share;

  // Of kAtOnce values of a lane from chunk `from` on
  __device__ __forceinline__ void weights(int block, int from, int lane, bool rest, float (&w)[kAtOnce]) const {
    float other[kAtOnce];
    load_chunks(row, block, from, lane, w);
    if (rest) load_chunks(Row(draft, row.vocab), block, from, lane, other);
    DSPARK_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t id = Row::first(block, from + i / 4, lane) + i % 4;
      w[i] = p.weight(w[i], id) * p_share;
      if (rest) w[i] = fmaxf(w[i] - q.weight(other[i], id) * q_share, 0.0f);
    }
  }

  // The blocks' sums by one of `parts`, into their statistics
  __device__ __forceinline__ void measure(BlockStats* stats, bool rest, int part, int parts, const Team& t) const {
    for (int b = part * t.warps + t.warp; b < row.blocks; b += parts * t.warps) {
      float sum = 0;
      DSPARK_KEEP_LOOP
      for (int from = 0; from < kChunks; from += kAtOnce / 4) {
        float w[kAtOnce];
        weights(b, from, t.lane, rest, w);
        DSPARK_UNROLL
        for (int i = 0; i < kAtOnce; ++i) sum += w[i];
      }
      sum = warp_add(sum);
      if (t.lane == 0) stats[b].kept = sum;
    }
  }

  __device__ __forceinline__ double total(const BlockStats* stats, const Team& t, LawShared& shared) const {
    double mine = 0;
    for (int b = t.id; b < row.blocks; b += t.threads) mine += shared.sums[b] = fresh(&stats[b].kept);
    return team_add(mine, t, shared);
  }

  // After every part's sums
  __device__ __forceinline__ int64_t draw(BlockStats* stats, double u, const Team& t, LawShared& shared) const {
    double mass = total(stats, t, shared);
    const bool rest = mass > 0;
    if (!rest) {
      measure(stats, false, 0, 1, t);
      __threadfence();
      __syncthreads();
      mass = total(stats, t, shared);
    }
    if (t.warp == 0) {
      const int64_t token = reach(
          row.blocks, u * mass, t.lane, [&](int b) { return shared.sums[b]; },
          [&](int b, int lane, float (&w)[kLaneValues]) {
            DSPARK_UNROLL
            for (int from = 0; from < kChunks; from += kAtOnce / 4) {
              float some[kAtOnce];
              weights(b, from, lane, rest, some);
              DSPARK_UNROLL
              for (int i = 0; i < kAtOnce; ++i) w[4 * from + i] = some[i];
            }
          });
      if (t.lane == 0) shared.result = token;
    }
    __syncthreads();
    return shared.result;
  }
};

// What ends a request and does not come from its rows' launches. Lane j holds place j.
struct EndInputs {
  int64_t first, length, slot;  // length: drafts with a row; -1 for padding
  Law q;                        // of draft j
  double u;

  __device__ __forceinline__ EndInputs(const Verify& a, int64_t r, int lane)
      : first(a.cu_rows[r]), length(a.cu_rows[r + 1] - first - 1), slot(a.slots ? a.slots[r] : r), u(0) {
    length = min(length, a.drafts);
    if (lane >= length) return;
    const int64_t at = slot * a.drafts + lane;
    q = {a.draft_top[at], a.draft_factor[at], a.draft_mass[at], static_cast<uint64_t>(a.draft_cut[at])};
    u = uniform(a.seeds[r], a.positions[first + lane] + 1, kResidual);
  }
};

// One lane's copy, in every lane
__device__ __forceinline__ Law law_of(const Law& law, int lane) {
  return {__shfl_sync(kLanes, law.top, lane), __shfl_sync(kLanes, law.factor, lane),
          __shfl_sync(kLanes, law.mass, lane), __shfl_sync(kLanes, law.cut, lane)};
}

// Where a request ends, from what was decided about its rows; lane j holds place j. Rows behind the end may be
// undecided: what stands there is not looked at.
struct Ending {
  const Decision* own;
  int accepted;
  bool has, redrawn, failed;

  __device__ __forceinline__ Ending(const Decision* decisions, const EndInputs& in, int lane)
      : own(decisions + (lane <= in.length ? in.first + lane : 0)), has(lane <= in.length) {
    const Verdict verdict = has ? own->verdict : kFails;
    accepted = __ffs(~__ballot_sync(kLanes, lane < in.length && verdict == kStands)) - 1;
    const auto end = static_cast<Verdict>(__shfl_sync(kLanes, static_cast<int32_t>(verdict), accepted));
    redrawn = in.length >= 0 && end == kRedrawn, failed = in.length >= 0 && end == kFails;
  }
};

// The request's results, by the first warp. `redrawn` is the token that replaces a rejected draft.
__device__ __forceinline__ void write_tokens(const Verify& a, int64_t r, const EndInputs& in, const Ending& e,
                                             int64_t redrawn, const Team& team) {
  if (team.warp != 0) return;
  const int64_t width = a.drafts + 1;
  const int64_t decided = e.has && team.lane <= e.accepted ? e.own->token : -1;
  const int64_t before = __shfl_sync(kLanes, decided, max(e.accepted - 1, 0));
  const int64_t ended = __shfl_sync(kLanes, decided, e.accepted);
  const int64_t token = e.redrawn ? redrawn : in.length >= 0 && !e.failed ? ended : -1;
  if (team.lane < width) {
    const int64_t j = team.lane;
    const int64_t mine = j < e.accepted ? decided : j == e.accepted ? token : -1;
    a.tokens[r * width + j] = mine;
    float logprob = nan_value();
    if (mine >= 0)
      logprob = static_cast<float>(static_cast<double>(a.logits[(in.first + j) * a.vocab + mine]) -
                                   static_cast<double>(e.own->law.top) - log(e.own->plain));
    a.logprobs[r * width + j] = logprob;
  }
  if (team.lane == 0) {
    a.accepted[r] = e.accepted;
    a.counts[r] = token >= 0 ? e.accepted + 1 : e.accepted;
    a.failed[r] = e.failed;
    a.last[r] = token >= 0 ? token : e.accepted > 0 ? before : -1;
  }
}

// One of `parts` of a redraw; the last of them ends the request.
template <int kAtOnce>
__device__ __forceinline__ void redraw_part(const Verify& a, const Rows& rows, int64_t r, const EndInputs& in,
                                            const Ending& e, int part, int parts, const Team& team, LawShared& shared) {
  const int64_t index = in.first + e.accepted;
  const Law p = law_of(e.has ? e.own->law : Law{}, e.accepted), q = law_of(in.q, e.accepted);
  const double u = __shfl_sync(kLanes, in.u, e.accepted);
  const Row row(a.logits + index * a.vocab, a.vocab);
  const Residual<kAtOnce> residual{row,
                                   p,
                                   a.draft_logits + in.slot * a.draft_request + e.accepted * a.draft_step,
                                   q,
                                   static_cast<float>(1.0 / p.mass),
                                   static_cast<float>(1.0 / q.mass)};
  BlockStats* stats = rows.stats + index * row.blocks;
  residual.measure(stats, true, part, parts, team);
  if (!arrive_last(&rows.work[index].redrawn, parts, team, shared)) return;
  write_tokens(a, r, in, e, residual.draw(stats, u, team, shared), team);
}

// Part `part` of the end of request r, when all its rows are decided. Every part reads the decisions.
__device__ __forceinline__ void end_request(const Verify& a, const Rows& rows, const Decision* decisions, int64_t r,
                                            const EndInputs& in, int part, int parts, const Team& team,
                                            LawShared& shared) {
  const Ending e(decisions, in, team.lane);
  if (e.redrawn) {
    redraw_part<kLaneValues>(a, rows, r, in, e, part, parts, team, shared);
  } else if (part == 0) {
    write_tokens(a, r, in, e, -1, team);
  }
}

}  // namespace dspark_kernels::cuda
