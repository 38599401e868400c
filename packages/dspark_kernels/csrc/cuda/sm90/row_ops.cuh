// Sampling, draft steps and verification by rows: statistics of blocks, and one decision a row.
#pragma once

#include "cuda/sm90/row_filter.cuh"
#include "random.hpp"

namespace dspark_kernels::cuda {

KC_HD Params params_of(const Rows& a, int64_t request) {
  return {a.temperature[request], a.top_p ? a.top_p[request] : 1.0f, a.top_k ? a.top_k[request] : 0};
}

// Block `block` of place `place` of request `request`, by one warp. `clears`: nobody has set the row's work to 0.
template <bool Bias>
__device__ __forceinline__ void measure_block(const Rows& a, int64_t request, int place, int block, int lane,
                                              bool clears = true) {
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
  if (clears && block == 0 && lane == 0) a.work[index] = {};
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
  Verdict verdict;
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

// In every thread
__device__ __forceinline__ Verdict decide_row(const Verify& a, Decision* decisions, int64_t r, int place, int64_t index,
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
  return decision.verdict;
}

}  // namespace dspark_kernels::cuda
