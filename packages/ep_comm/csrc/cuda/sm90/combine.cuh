// Combine: results are pushed to their token's home, into the row of the slot (form "ranks": of the rank's first slot),
// and added there in a fixed order.
#pragma once

#include "cuda/sm90/rows.cuh"
#include "cuda/sm90/slots.cuh"

namespace ep_comm::cuda {

struct CombineShared {
  int word;
  int32_t starts[kMostRanks + 1];
};

// A row's results home, in parts of 32 * Vectors vectors; a warp takes a part with all its slots.
template <Format F, int Warps>
__device__ void send_results(const RankArgs& a, const Turn& turn, CombineShared& shared) {
  const Shape& s = a.shape;
  constexpr int kVectors = 2, n = kChannels<F>;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int vectors = s.hidden / n, parts = (vectors + 32 * kVectors - 1) / (32 * kVectors);
  prefix_counts(s, a.counts, shared.starts);
  const int32_t rows = shared.starts[s.ranks];
  const int64_t items = int64_t{rows} * parts;
  for (int64_t i = int64_t{turn.cta} * Warps + warp; i < items; i += int64_t{turn.ctas} * Warps) {
    const int64_t turned = i / parts + shared.starts[a.rank];
    const auto packed = static_cast<int32_t>(turned < rows ? turned : turned - rows);
    const int first = static_cast<int>(i % parts) * 32 * kVectors;
    const int home = source_of(s, shared.starts, packed);
    const int64_t row = a.fixed ? fixed_row(s, home, packed - shared.starts[home]) : packed;
    const int32_t token = a.rows_sources[row];
    if (token < 0 || token >= s.max_tokens) continue;  // the whole warp
    const int32_t id = lane < s.top_k ? a.rows_ids[row * s.top_k + lane] : -1;
    unsigned slots = __ballot_sync(kAll, static_cast<int>(id >= 0));
    if (a.form == Form::ranks) slots &= 0u - slots;  // the first
    uint8_t* base = a.peers[home] + a.region.results;
    for (; slots; slots &= slots - 1) {
      const int slot = __ffs(static_cast<int>(slots)) - 1;
      const int64_t from = (a.form == Form::ranks ? row : row * s.top_k + slot) * s.hidden;
      uint8_t* to = base + result_row(s, token, slot) * result_bytes(s);
      uint4 codes[kVectors];
      EP_COMM_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int vector = first + 32 * k + lane;
        float v[n] = {}, unused;
        if (vector < vectors) load_channels(a.y, a.y_narrow, from + int64_t{vector} * n, v);
        codes[k] = encode<F>(v, unused);
      }
      EP_COMM_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int vector = first + 32 * k + lane;
        if (vector < vectors) store_16(to + int64_t{16} * vector, codes[k]);
      }
    }
  }
}

// Of the lane's slot: its place among what is added, -1 if it is not. Slots in their order; form "ranks": the first
// slot of each rank, by rank.
__device__ inline int place_in_sum(const RankArgs& a, int32_t id) {
  const Shape& s = a.shape;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const unsigned filled = __ballot_sync(kAll, static_cast<int>(id >= 0));
  if (a.form == Form::slots) return id < 0 ? -1 : __popc(filled & ((1u << lane) - 1));
  const int32_t rank = rank_of(s, id);
  bool first = id >= 0;
  for (int j = 0; j < s.top_k; ++j) {
    const int32_t other = __shfl_sync(kAll, rank, j);
    if (j < lane && other == rank) first = false;
  }
  int place = 0;
  for (int j = 0; j < s.top_k; ++j) {
    const int32_t other = __shfl_sync(kAll, first ? rank : -1, j);
    if (other >= 0 && other < rank) ++place;
  }
  return first ? place : -1;
}

template <Format F, int Warps>
__device__ void add_results(const RankArgs& a, const Turn& turn) {
  const Shape& s = a.shape;
  constexpr int kAtOnce = 4, n = kChannels<F>;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int vectors = s.hidden / n, parts = (vectors + 31) / 32;
  uint8_t* own = a.peers[a.rank];
  const auto* sent = reinterpret_cast<const int32_t*>(own + a.region.sent_ids);
  const int64_t items = a.tokens * parts;
  for (int64_t i = int64_t{turn.cta} * Warps + warp; i < items; i += int64_t{turn.ctas} * Warps) {
    const int64_t token = i / parts;
    const int vector = static_cast<int>(i % parts) * 32 + lane;
    const bool inside = vector < vectors;
    const int place = place_in_sum(a, lane < s.top_k ? sent[token * s.top_k + lane] : -1);
    const int count = __popc(__ballot_sync(kAll, static_cast<int>(place >= 0)));
    float sum[n] = {};
    for (int first = 0; first < count; first += kAtOnce) {
      uint4 codes[kAtOnce];
      EP_COMM_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k >= count) continue;
        const int slot = __ffs(static_cast<int>(__ballot_sync(kAll, static_cast<int>(place == first + k)))) - 1;
        const uint8_t* row =
            own + a.region.results + result_row(s, static_cast<int32_t>(token), slot) * result_bytes(s);
        if (inside) codes[k] = reinterpret_cast<const uint4*>(row)[vector];
      }
      EP_COMM_UNROLL
      for (int k = 0; k < kAtOnce; ++k)
        if (first + k < count && inside) add_channels<F>(codes[k], sum);
    }
    if (!inside) continue;
    float* out = a.out + token * s.hidden + int64_t{vector} * n;
    EP_COMM_UNROLL
    for (int k = 0; k < n; k += 4)
      store_16(out + k,
               uint4{float_bits(sum[k]), float_bits(sum[k + 1]), float_bits(sum[k + 2]), float_bits(sum[k + 3])});
  }
}

template <Format F, int Warps>
__device__ void combine(const RankArgs& a, int cta, int ctas, CombineShared& shared) {
  Turn turn;
  const auto detail = static_cast<uint32_t>(a.form);
  if (!open_turn(a, Kind::combine, detail, cta, ctas, &shared.word, turn)) return;
  send_results<F, Warps>(a, turn, shared);
  post(a, turn);
  if (!wait_posted(a, turn)) return;
  add_results<F, Warps>(a, turn);
}

__device__ inline void barrier(const RankArgs& a, int cta, int ctas, int* word) {
  Turn turn;
  if (!open_turn(a, Kind::barrier, 0, cta, ctas, word, turn)) return;
  post(a, turn);
  wait_posted(a, turn);
}

}  // namespace ep_comm::cuda
