// Sampling, draft steps and verification by rows: statistics of blocks, one decision a row, one end a request.
#pragma once

#include "cuda/sm90/row_filter.cuh"
#include "random.hpp"

namespace dspark_kernels::cuda {

KC_HD Params params_of(const Rows& a, int64_t request) {
  return {a.temperature[request], a.top_p[request], a.top_k ? a.top_k[request] : 0};
}

// Block `block` of place `place` of request `request`, by one warp
template <bool Bias>
__device__ __forceinline__ void measure_block(const Rows& a, int64_t request, int place, int block, int lane) {
  const int64_t index = a.index(request, place);
  if (index < 0) return;
  float* at = a.logits + index * a.row_stride;
  const Row row(at, a.vocab);
  const Params params = params_of(a, request);
  float x[kLaneValues];
  load_block(row, block, lane, x);
  if (Bias) {
    float more[kLaneValues];
    load_block(Row(a.bias + request * a.vocab, a.vocab), block, lane, more);
    DSPARK_UNROLL
    for (int i = 0; i < kLaneValues; ++i)
      if (Row::first(block, i / 4, lane) + i % 4 < a.vocab) x[i] += more[i];
    store_block(row, at, block, lane, x);
  }
  const BlockStats stats = block_stats(x, params.temperature < kGreedyBelow ? 1.0f : 1.0f / params.temperature);
  if (lane == 0) a.stats[index * row.blocks + block] = stats;
  if (block == 0 && lane == 0) a.work[index] = {};
  if (params.filtered(a.vocab)) {
    const int each = (kFilterBins + row.blocks - 1) / row.blocks, end = min(kFilterBins, (block + 1) * each);
    for (int i = block * each + lane; i < end; i += 32)
      a.bin_mass[index * kFilterBins + i] = 0, a.bin_count[index * kFilterBins + i] = 0;
  }
}

KC_HD float token_logprob(float x, const Known& known) {
  return static_cast<float>(static_cast<double>(x) - static_cast<double>(known.law.top) - log(known.plain));
}

__device__ __forceinline__ void sample_row(const Sample& a, int64_t t, const Row& row, const BlockStats* stats,
                                           const Known& known, const Team& team, LawShared& shared) {
  int64_t token = -1;
  if (known.usable) token = draw(row, stats, known, uniform(a.seeds[t], a.positions[t], a.draw), team, shared);
  if (team.id != 0) return;
  a.chosen[t] = token;
  a.logprobs[t] = token < 0 ? nan_value() : token_logprob(row.x[token], known);
}

__device__ __forceinline__ void draft_row(const DraftStep& a, int64_t b, const Row& row, const BlockStats* stats,
                                          const Known& known, const Team& team, LawShared& shared) {
  const int64_t number = a.coupled && a.coupled[b] ? kTarget : kDraft;
  int64_t token = -1;
  if (known.usable)
    token = draw(row, stats, known, uniform(a.seeds[b], a.positions[b] + 1 + a.step, number), team, shared);
  if (team.id != 0) return;
  const int64_t at = b * a.drafts + a.step;
  const bool has = token >= 0;
  a.chosen[b] = a.tokens[at] = token;
  a.logprobs[at] = has ? static_cast<float>(known.law.log_probability(row.x[token], token)) : nan_value();
  a.top[at] = has ? known.law.top : nan_value();
  a.factor[at] = has ? known.law.factor : nan_value();
  a.mass[at] = has ? known.law.mass : static_cast<double>(nan_value());
  a.cut[at] = has ? static_cast<int64_t>(known.law.cut) : 0;
}

// What is settled about a row before it is known whether the rows before it stand.
enum Verdict : int32_t { kFails, kEnds, kStands, kRedrawn };

struct Decision {
  Law law;
  double plain;
  int64_t token;  // but for kRedrawn
  int32_t verdict;
};

// What decide_row reads of its inputs, towards the cache while the statistics are still measured
__device__ __forceinline__ void prefetch_decision(const Verify& a, int64_t r, int place, int64_t index) {
  prefetch(a.positions + index);
  prefetch(a.seeds + r);
  if (!a.draft_tokens || place + 1 >= a.cu_rows[r + 1] - a.cu_rows[r] || place >= a.drafts) return;
  const int64_t at = (a.slots ? a.slots[r] : r) * a.drafts + place;
  prefetch(a.draft_logprobs + at);
  const int64_t draft = a.draft_tokens[at];
  if (draft >= 0 && draft < a.vocab) prefetch(a.logits + index * a.vocab + draft);
}

__device__ __forceinline__ void decide_row(const Verify& a, Decision* decisions, int64_t r, int place, int64_t index,
                                           const Row& row, const BlockStats* stats, const Known& known,
                                           const Team& team, LawShared& shared) {
  const int64_t length = min(static_cast<int64_t>(a.cu_rows[r + 1] - a.cu_rows[r]) - 1, a.drafts);
  const int64_t position = a.positions[index] + 1, seed = a.seeds[r];
  Decision decision{known.law, known.plain, -1, kFails};
  if (known.usable) {
    const bool matched = a.temperature[r] < kGreedyBelow || (a.coupled && a.coupled[r]);
    const bool end = place == length;
    int64_t draft = -1;
    float log_q = nan_value();
    if (!end) {
      const int64_t at = (a.slots ? a.slots[r] : r) * a.drafts + place;
      draft = a.draft_tokens[at], log_q = a.draft_logprobs[at];
    }
    const bool valid = draft >= 0 && draft < a.vocab && log_q - log_q == 0.0f;
    int64_t number = kTarget;
    bool draws = true;
    decision.verdict = kEnds;
    if (!end && !matched) {
      if (valid) {
        const double chance = exp(known.law.log_probability(row.x[draft], draft) - static_cast<double>(log_q));
        decision.verdict = uniform(seed, position, kAccept) < chance ? kStands : kRedrawn;
        decision.token = draft;
        draws = false;
      } else {
        number = kResidual;
      }
    }
    if (draws) decision.token = draw(row, stats, known, uniform(seed, position, number), team, shared);
    if (matched && !end && decision.token == draft) decision.verdict = kStands;
  }
  if (team.id == 0) decisions[index] = decision;
}

// A token from max(p - q, 0), or from p where that has no mass. q is null for p alone.
struct Residual {
  const Row& row;
  const Law& p;
  const float* draft;
  const Law& q;
  float p_share, q_share;

  __device__ __forceinline__ void weights(int block, int lane, bool rest, float (&w)[kLaneValues]) const {
    float other[kLaneValues];
    load_block(row, block, lane, w);
    if (rest) load_block(Row(draft, row.vocab), block, lane, other);
    DSPARK_UNROLL
    for (int i = 0; i < kLaneValues; ++i) {
      const int64_t id = Row::first(block, i / 4, lane) + i % 4;
      w[i] = p.weight(w[i], id) * p_share;
      if (rest) w[i] = fmaxf(w[i] - q.weight(other[i], id) * q_share, 0.0f);
    }
  }

  // The blocks' sums by one of `parts`, into their statistics
  __device__ __forceinline__ void measure(BlockStats* stats, bool rest, int part, int parts, const Team& t) const {
    for (int b = part * t.warps + t.warp; b < row.blocks; b += parts * t.warps) {
      float w[kLaneValues], sum = 0;
      weights(b, t.lane, rest, w);
      DSPARK_UNROLL
      for (int i = 0; i < kLaneValues; ++i) sum += w[i];
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
          [&](int b, int lane, float (&w)[kLaneValues]) { weights(b, lane, rest, w); });
      if (t.lane == 0) shared.result = token;
    }
    __syncthreads();
    return shared.result;
  }
};

// What ends a request and does not come from its rows' launches: read while they still run. Lane j holds place j.
struct EndInputs {
  int64_t first, length, slot;
  Law q;  // of draft j
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

// The tokens of request r, from what was decided about its rows: a redraw is shared by `parts` blocks of threads, and
// the last of them ends the request.
__device__ __forceinline__ void end_request(const Verify& a, const Rows& rows, const Decision* decisions, int64_t r,
                                            const EndInputs& in, int part, int parts, const Team& team,
                                            LawShared& shared) {
  const int64_t first = in.first, length = in.length, width = a.drafts + 1;
  const bool has = team.lane <= length;
  const Decision* own = decisions + (has ? first + team.lane : 0);  // lane j: of place j
  const int32_t verdict = has ? own->verdict : kFails;
  const Law law = has ? own->law : Law{};
  const bool stands = team.lane < length && verdict == kStands;
  const int accepted = __ffs(~__ballot_sync(kLanes, stands)) - 1;
  const int32_t end = __shfl_sync(kLanes, verdict, accepted);
  const bool redrawn = length >= 0 && end == kRedrawn, failed = length >= 0 && end == kFails;
  if (!redrawn && part != 0) return;
  int64_t token = -1;
  if (redrawn) {
    const int64_t index = first + accepted;
    const Law p = law_of(law, accepted), q = law_of(in.q, accepted);
    const double u = __shfl_sync(kLanes, in.u, accepted);
    const Row row(a.logits + index * a.vocab, a.vocab);
    const Residual residual{row,
                            p,
                            a.draft_logits + in.slot * a.draft_request + accepted * a.draft_step,
                            q,
                            static_cast<float>(1.0 / p.mass),
                            static_cast<float>(1.0 / q.mass)};
    BlockStats* stats = rows.stats + index * row.blocks;
    residual.measure(stats, true, part, parts, team);
    if (!arrive_last(&rows.work[index].redrawn, parts, team, shared)) return;
    token = residual.draw(stats, u, team, shared);
  }
  if (team.warp != 0) return;
  const int64_t decided = has ? own->token : -1;
  const int64_t before = __shfl_sync(kLanes, decided, max(accepted - 1, 0));
  const int64_t ended = __shfl_sync(kLanes, decided, accepted);
  if (length >= 0 && !failed && !redrawn) token = ended;
  if (team.lane < width) {
    const int64_t j = team.lane;
    const int64_t mine = j < accepted ? decided : j == accepted ? token : -1;
    a.tokens[r * width + j] = mine;
    float logprob = nan_value();
    if (mine >= 0)
      logprob = static_cast<float>(static_cast<double>(a.logits[(first + j) * a.vocab + mine]) -
                                   static_cast<double>(own->law.top) - log(own->plain));
    a.logprobs[r * width + j] = logprob;
  }
  if (team.lane == 0) {
    a.accepted[r] = accepted;
    a.counts[r] = token >= 0 ? accepted + 1 : accepted;
    a.failed[r] = failed;
    a.last[r] = token >= 0 ? token : accepted > 0 ? before : -1;
  }
}

}  // namespace dspark_kernels::cuda
