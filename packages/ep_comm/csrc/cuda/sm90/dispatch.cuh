// Dispatch. Fixed rows are pushed straight into their place at the target: one flag's way is all that a rank waits for.
// Packed rows are announced and fetched: a token's record stands once at its source whatever the number of ranks, and
// the host learns in between how many rows come.
#pragma once

#include "cuda/sm90/rows.cuh"
#include "cuda/sm90/slots.cuh"

namespace ep_comm::cuda {

struct DispatchShared {
  int word;
  int32_t starts[kMostRanks + 1];
  SlotsShared slots;
};

// Ids and weights of slots that `target` does not hold are -1 and 0.
__device__ inline void push_ids(const RankArgs& a, int64_t token, int target, int64_t row) {
  const Shape& s = a.shape;
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint8_t* base = a.peers[target];
  if (lane < s.top_k) {
    const int32_t local = local_expert(s, valid_id(s, a.ids[token * s.top_k + lane]), target);
    const float weight = a.weights[token * s.top_k + lane];
    reinterpret_cast<int32_t*>(base + a.region.ids)[row * s.top_k + lane] = local;
    reinterpret_cast<float*>(base + a.region.weights)[row * s.top_k + lane] = local < 0 ? 0.0f : weight;
  }
  if (lane == 0) reinterpret_cast<int32_t*>(base + a.region.sources)[row] = static_cast<int32_t>(token);
}

// Global ids, checked, into the own record, and the token's number into each target's list.
__device__ inline void announce_ids(const RankArgs& a, int64_t token, uint64_t mask, const int32_t* places) {
  const Shape& s = a.shape;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Record record = record_of(s);
  uint8_t* own = a.peers[a.rank] + a.region.records + token * record.bytes;
  if (lane < s.top_k) {
    reinterpret_cast<int32_t*>(own + record.ids)[lane] = valid_id(s, a.ids[token * s.top_k + lane]);
    reinterpret_cast<float*>(own + record.weights)[lane] = a.weights[token * s.top_k + lane];
  }
  if (lane == 0) *reinterpret_cast<int32_t*>(own + record.token) = static_cast<int32_t>(token);
  for (int r = lane; r < s.ranks; r += 32)
    if (mask >> r & 1)
      reinterpret_cast<int32_t*>(a.peers[r] + a.region.lists)[int64_t{a.rank} * s.max_tokens + places[r]] =
          static_cast<int32_t>(token);
}

// Part of a token: 32 * Vectors vectors from vector `first` on, by one warp.
template <Format F, bool Push, int Vectors>
__device__ void send_part(const RankArgs& a, int64_t token, int first, uint64_t mask, const int32_t* places) {
  const Shape& s = a.shape;
  const int lane = static_cast<int>(threadIdx.x % 32);
  constexpr int n = kChannels<F>;
  const int vectors = s.hidden / n;
  const int64_t bytes = int64_t{16} * vectors;
  const int groups = s.hidden / kGroup;
  uint4 codes[Vectors];
  float scales[Vectors];
  EP_COMM_UNROLL
  for (int i = 0; i < Vectors; ++i) {
    const int vector = first + 32 * i + lane;
    float v[n] = {};
    if (vector < vectors) load_channels(a.x, a.x_narrow, token * s.hidden + int64_t{vector} * n, v);
    codes[i] = encode<F>(v, scales[i]);
  }
  const auto store = [&](uint8_t* to, float* to_scales) {
    EP_COMM_UNROLL
    for (int i = 0; i < Vectors; ++i) {
      const int vector = first + 32 * i + lane;
      if (vector >= vectors) continue;
      store_16(to + int64_t{16} * vector, codes[i]);
      if (F == Format::fp8 && lane % 8 == 0) to_scales[vector / 8] = scales[i];
    }
  };
  if constexpr (Push) {
    for (int k = 0; k < s.ranks; ++k) {  // each rank begins with another target
      const int target = a.rank + k < s.ranks ? a.rank + k : a.rank + k - s.ranks;
      if (!(mask >> target & 1)) continue;
      const int64_t row = fixed_row(s, a.rank, places[target]);
      uint8_t* base = a.peers[target];
      store(base + a.region.x + row * bytes, reinterpret_cast<float*>(base + a.region.scales) + row * groups);
      if (first == 0) push_ids(a, token, target, row);
    }
  } else {
    const Record record = record_of(s);
    uint8_t* own = a.peers[a.rank] + a.region.records + token * record.bytes;
    store(own, reinterpret_cast<float*>(own + record.scales));
    if (first == 0) announce_ids(a, token, mask, places);
  }
}

// Tokens of this CTA, and, by the last one, how many rows each rank gets.
template <Format F, bool Push, int Warps>
__device__ void send_tokens(const RankArgs& a, const Turn& turn, DispatchShared& shared) {
  const Shape& s = a.shape;
  constexpr int kVectors = 2;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int64_t share = (a.tokens + turn.ctas - 1) / turn.ctas;
  const int64_t begin = min(share * turn.cta, a.tokens), end = min(begin + share, a.tokens);
  const int parts = (s.hidden / kChannels<F> + 32 * kVectors - 1) / (32 * kVectors);
  auto* sent = reinterpret_cast<int32_t*>(a.peers[a.rank] + a.region.sent_ids);
  count_before<Warps>(s, a.ids, begin, shared.slots);
  for (int64_t first = begin; first < end; first += kBlock) {
    const int n = static_cast<int>(min(int64_t{kBlock}, end - first));
    place_tokens<Warps>(s, a.ids, first, n, shared.slots);
    for (int item = warp; item < n * parts; item += Warps) {
      const int token = item / parts, part = item % parts;
      if (part == 0 && lane < s.top_k) {
        const int64_t at = (first + token) * s.top_k + lane;
        sent[at] = valid_id(s, a.ids[at]);
      }
      if (shared.slots.masks[token])
        send_part<F, Push, kVectors>(a, first + token, part * 32 * kVectors, shared.slots.masks[token],
                                     shared.slots.places[token]);
    }
    __syncthreads();  // before masks and places are written again
  }
  if (turn.cta == turn.ctas - 1 && static_cast<int>(threadIdx.x) < s.ranks)
    control_of(a, static_cast<int>(threadIdx.x)).counts[a.rank] =
        stamped_count(turn.epoch, static_cast<uint32_t>(shared.slots.counts[threadIdx.x]));
}

// Fixed rows that nobody filled have no experts.
__device__ inline void empty_rows(const RankArgs& a, const Turn& turn, const int32_t* counts) {
  const Shape& s = a.shape;
  uint8_t* own = a.peers[a.rank];
  const int64_t rows = int64_t{s.ranks} * s.max_tokens;
  const int64_t threads = int64_t{turn.ctas} * blockDim.x;
  for (int64_t row = int64_t{turn.cta} * blockDim.x + threadIdx.x; row < rows; row += threads) {
    if (row % s.max_tokens < counts[row / s.max_tokens]) continue;
    reinterpret_cast<int32_t*>(own + a.region.sources)[row] = -1;
    for (int j = 0; j < s.top_k; ++j) reinterpret_cast<int32_t*>(own + a.region.ids)[row * s.top_k + j] = -1;
  }
}

template <Format F, bool Push, int Warps>
__device__ void dispatch(const RankArgs& a, int cta, int ctas, DispatchShared& shared) {
  Turn turn;
  if (!open_turn(a, Kind::dispatch, Push ? 1 : 0, cta, ctas, &shared.word, turn)) return;
  send_tokens<F, Push, Warps>(a, turn, shared);
  post(a, turn);
  if (!wait_posted(a, turn)) return;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < a.shape.ranks) {
    const auto count = static_cast<int32_t>(count_in(turn.own->counts[thread]));
    shared.slots.counts[thread] = count;
    if (cta == 0) {
      a.counts[thread] = count;
      if (a.host_counts) a.host_counts[thread] = count;
    }
  }
  __syncthreads();
  if constexpr (Push) empty_rows(a, turn, shared.slots.counts);
}

// The records that were announced, into packed rows; a warp takes a row. Each rank begins with its own records.
template <Format F, int Warps>
__device__ void collect(const RankArgs& a, int cta, int ctas, DispatchShared& shared) {
  const Shape& s = a.shape;
  constexpr int kVectors = 4;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const Record record = record_of(s);
  const int vectors = s.hidden / kChannels<F>, groups = F == Format::fp8 ? s.hidden / kGroup : 0;
  prefix_counts(s, a.counts, shared.starts);
  const int32_t rows = shared.starts[s.ranks];
  const auto* lists = reinterpret_cast<const int32_t*>(a.peers[a.rank] + a.region.lists);
  for (int32_t i = cta * Warps + warp; i < rows; i += ctas * Warps) {
    const int64_t turned = int64_t{i} + shared.starts[a.rank];
    const auto row = static_cast<int32_t>(turned < rows ? turned : turned - rows);
    const int source = source_of(s, shared.starts, row);
    const int32_t token = lists[int64_t{source} * s.max_tokens + (row - shared.starts[source])];
    const uint8_t* from = a.peers[source] + a.region.records + int64_t{token} * record.bytes;
    uint8_t* to = a.rows_x + int64_t{row} * vectors * 16;
    for (int first = 0; first < vectors; first += 32 * kVectors) {
      uint4 codes[kVectors];
      EP_COMM_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int vector = first + 32 * k + lane;
        if (vector < vectors) codes[k] = reinterpret_cast<const uint4*>(from)[vector];
      }
      EP_COMM_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int vector = first + 32 * k + lane;
        if (vector < vectors) store_16(to + int64_t{16} * vector, codes[k]);
      }
    }
    for (int g = lane; g < groups; g += 32)
      a.rows_scales[int64_t{row} * groups + g] = reinterpret_cast<const float*>(from + record.scales)[g];
    if (lane < s.top_k) {
      const int32_t local = local_expert(s, reinterpret_cast<const int32_t*>(from + record.ids)[lane], a.rank);
      const float weight = reinterpret_cast<const float*>(from + record.weights)[lane];
      a.rows_ids[int64_t{row} * s.top_k + lane] = local;
      a.rows_weights[int64_t{row} * s.top_k + lane] = local < 0 ? 0.0f : weight;
    }
    if (lane == 0) a.rows_sources[row] = token;
  }
}

}  // namespace ep_comm::cuda
