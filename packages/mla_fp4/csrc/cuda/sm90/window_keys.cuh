// The keys of window prefill: filling a run's ring before its first row, and one warp that adds a key a row.
#pragma once

#include "cuda/sm90/unroll.cuh"
#include "cuda/sm90/window_plan.cuh"
#include "cuda/sm90/window_ptx.cuh"

namespace mla_fp4::cuda::window {

inline constexpr int kRowUnits = 33, kCodeUnits = 32;  // 16 bytes each; the last one holds the scales

// What every warp knows of its run.
struct RunKeys {
  int32_t known;      // known_positions of the first row
  int32_t slot;       // of its position
  int64_t first_row;  // counted through the batch
};

// Shared addresses.
struct KeyBuffers {
  uint32_t ring;
  uint32_t wild;   // a byte for each slot: its key may hold infinities or NaN
  uint32_t ready;  // kAhead barriers, 1 arrival: the key of row r is in the ring, barrier r mod kAhead
  uint32_t done;   // kAhead barriers, 4 arrivals: row r has read the ring to its end
};

__device__ __forceinline__ uint4 load_unit_global(const uint8_t* row, int unit) {
  return __ldg(reinterpret_cast<const uint4*>(row) + unit);
}

__device__ __forceinline__ void store_unit(uint32_t ring, int slot, int unit, const uint4& raw, uint32_t scale) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  decode_unit(words, scale,
              [&](int j, uint32_t a, uint32_t b) { store_shared_8(ring + unit_target(slot, unit, j), a, b); });
}

// All slots by eight warps: the keys of the run's first row, zeros elsewhere. A warp takes eight slots at a time, four
// lanes each, so that a store meets every bank; the rows of later turns are on their way while the first is decoded.
__device__ __forceinline__ void fill_ring(const WindowParams& a, const KeyBuffers& to, const RunKeys& run,
                                          const RowPlace& place, int warp, int lane) {
  constexpr int kTurns = (kSlots / 8 + 7) / 8;
  const int part = lane % 4, first = warp * 8 + lane / 4, window = static_cast<int>(a.window);
  uint4 raw[kTurns][8] = {}, scales[kTurns] = {};
  MLA_FP4_UNROLL
  for (int t = 0; t < kTurns; ++t) {
    const int slot = first + t * 64, at = slot < kSlots ? window - 1 - slot_age(run.slot, slot) : -1;
    const KeyRow key = at < 0 ? kNoKey : window_key(place, at, window, static_cast<uint32_t>(a.ring_rows));
    if (key == kNoKey) continue;
    const uint8_t* row = (key & kNewRow ? a.new_rows : a.ring) + window_offset(key);
    MLA_FP4_UNROLL
    for (int i = 0; i < 8; ++i) raw[t][i] = load_unit_global(row, i * 4 + part);
    scales[t] = load_unit_global(row, kCodeUnits);
  }
  MLA_FP4_UNROLL
  for (int t = 0; t < kTurns; ++t) {
    const int slot = first + t * 64;
    if (slot >= kSlots) break;
    const uint32_t words[4] = {scales[t].x, scales[t].y, scales[t].z, scales[t].w};
    MLA_FP4_UNROLL
    for (int i = 0; i < 8; ++i) {
      store_unit(to.ring, slot, i * 4 + part, raw[t][i], words[i / 2] >> (i % 2 * 16 + part / 2 * 8) & 0xFF);
    }
    if (part == 0) {
      const bool wild =
          word_is_wild(words[0]) || word_is_wild(words[1]) || word_is_wild(words[2]) || word_is_wild(words[3]);
      store_shared_1(to.wild + slot, wild);
    }
  }
  ptx::fence_proxy_async();
}

// One warp: rows 1, 2, ... of the run bring one key each, a unit a lane. Row 0's are there.
__device__ __forceinline__ void add_keys(const WindowParams& a, const KeyBuffers& to, const RunKeys& run, int rows,
                                         int lane) {
  const uint8_t* from = a.new_rows + run.first_row * kWindowRowBytes;
  const int window = static_cast<int>(a.window);
  int slot = run.slot;
  uint4 raw = {};
  uint32_t scale = 0;
  if (lane == 0) ptx::mbarrier_arrive(to.ready);
  const auto load = [&](int r) {
    raw = {}, scale = 0;
    if (r < rows && run.known + r > 0) {  // else the position is below the lower bound
      const uint8_t* row = from + static_cast<int64_t>(r) * kWindowRowBytes;
      raw = load_unit_global(row, lane);
      scale = __ldg(row + kCodeUnits * 16 + lane / 2);
    }
  };
  load(1);
  MLA_FP4_NO_UNROLL
  for (int r = 1; r < rows; ++r) {
    slot = slot_after(slot, 1);
    const int left = slot_after(slot, kSlots - window);  // of the key that row r no longer sees
    const bool wild = __any_sync(0xFFFFFFFF, word_is_wild(scale));
    const bool was_wild = load_shared_1(to.wild + left) != 0;
    // The slot's last reader is further back than kAhead rows. A wild key waits for all rows that do not see it.
    const int finished = wild || was_wild ? r - 1 : r - kAhead;
    for (int f = r - kAhead > 0 ? r - kAhead : 0; f <= finished; ++f) {
      ptx::mbarrier_wait(to.done + f % kAhead * 8, f / kAhead & 1);
    }
    if (was_wild) store_unit(to.ring, left, lane, uint4{}, 0);
    store_unit(to.ring, slot, lane, raw, scale);
    load(r + 1);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      if (was_wild) store_shared_1(to.wild + left, 0);
      store_shared_1(to.wild + slot, wild);
      ptx::mbarrier_arrive(to.ready + r % kAhead * 8);
    }
    __syncwarp();
  }
}

}  // namespace mla_fp4::cuda::window
