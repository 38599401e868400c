// Publish: a barrier that also says what there is to read. Includers bring memory.cuh or its emulation.
#pragma once

#include "cuda/publish.hpp"
#include "cuda/sm90/flags.cuh"
#include "cuda/sm90/rows.cuh"
#include "cuda/sm90/slots.cuh"

namespace ep_comm::cuda {

constexpr uint32_t kPublishDetail = 1;  // of a barrier's flag: ranks agree on which of the two they are in

// The physical expert of a slot, -1 for an empty one and for a row that goes nowhere.
__device__ inline int32_t choose(const PublishArgs& a, int64_t token, int32_t id) {
  const Copies& c = a.copies;
  if (a.padding && a.padding[token]) return -1;
  if (!c.counts) return valid_id(a.rank.shape, id);
  if (id < 0 || id >= c.logical) return -1;
  if (c.own[id] >= 0) return c.own[id];
  const int32_t count = c.counts[id];
  return count > 0 ? c.copies[int64_t{id} * a.rank.shape.ranks + (token + a.rank.rank) % count] : -1;
}

// A thread does a slot: its weight at home, its expert to all ranks.
__device__ inline void send_slots(const PublishArgs& a, const Turn& turn) {
  const RankArgs& r = a.rank;
  const Shape& s = r.shape;
  const int64_t all = int64_t{s.max_tokens} * s.top_k, used = r.tokens * s.top_k;
  const int64_t step = int64_t{turn.ctas} * blockDim.x;
  for (int64_t i = int64_t{turn.cta} * blockDim.x + threadIdx.x; i < all; i += step) {
    int32_t id = -1;
    if (i < used) {
      const int32_t wanted = r.ids[i];
      id = choose(a, i / s.top_k, wanted);
      a.physical[i] = id, a.weights[i] = r.weights[i];
      if (a.routed && id >= 0) atomicAdd(a.routed + wanted, 1);
    }
    for (int target = 0; target < s.ranks; ++target) a.slots[target][r.rank * all + i] = local_expert(s, id, target);
  }
}

// bfloat16 rows; a thread rounds eight channels.
__device__ inline void lay_rows(const PublishArgs& a, const Turn& turn) {
  constexpr int n = kChannels<Format::bfloat16>;
  const int64_t vectors = a.rank.tokens * a.rank.shape.hidden / n, step = int64_t{turn.ctas} * blockDim.x;
  for (int64_t i = int64_t{turn.cta} * blockDim.x + threadIdx.x; i < vectors; i += step) {
    float v[n], unused;
    load_channels(a.rank.x, a.rank.x_narrow, i * n, v);
    store_16(a.rows + i * n, encode<Format::bfloat16>(v, unused));
  }
}

// Slots of all ranks that this rank's experts get. One CTA.
__device__ inline void count_received(const PublishArgs& a, int* word) {
  const Shape& s = a.rank.shape;
  const int64_t all = int64_t{s.ranks} * s.max_tokens * s.top_k;
  const int32_t* slots = a.slots[a.rank.rank];
  if (threadIdx.x == 0) *word = 0;
  __syncthreads();
  int mine = 0;
  for (int64_t i = threadIdx.x; i < all; i += blockDim.x) mine += slots[i] >= 0;
  if (mine) atomicAdd(word, mine);
  __syncthreads();
  if (threadIdx.x == 0) *a.received = *word;
}

__device__ inline void publish(const PublishArgs& a, int cta, int ctas, int* word) {
  Turn turn;
  if (!open_turn(a.rank, Kind::barrier, kPublishDetail, cta, ctas, word, turn)) return;
  send_slots(a, turn);
  lay_rows(a, turn);
  post(a.rank, turn);
  if (!wait_posted(a.rank, turn)) return;
  if (a.received && cta == 0) count_received(a, word);
}

}  // namespace ep_comm::cuda
