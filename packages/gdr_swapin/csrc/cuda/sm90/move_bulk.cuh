// One thread keeps a ring of asynchronous copies going: source to shared memory, shared memory to the pools.
//
// The link to the host needs bytes in flight, not threads: at 1.5 us of latency and 55 GB/s some 80 KB, a part of one
// CTA's shared memory. Both copies are asynchronous, so the thread only counts stages.
#pragma once

#include "cuda/sm90/bulk_store.cuh"
#include "cuda/sm90/move_plan.cuh"
#include "kernel_core/cuda/ptx.cuh"

namespace gdr_swapin::cuda {

// Groups of stores that may still read their stages when a stage is filled again.
inline constexpr int kStoresBehind = 2;
inline constexpr int kFewestStages = kStoresBehind + 2;
inline constexpr int kMostStages = 64;
inline constexpr uint32_t kRingAlignment = 128;

// Barriers and where each stage goes stand before the ring.
struct RingHead {
  uint64_t full[kMostStages];
  Piece piece[kMostStages];
};
inline constexpr uint32_t kHeadBytes = (sizeof(RingHead) + kRingAlignment - 1) / kRingAlignment * kRingAlignment;

__device__ __forceinline__ void fill_stage(const MoveParams& p, RingHead* head, uint32_t ring, int stage,
                                           int64_t item) {
  const Piece piece = piece_at(p, item);
  head->piece[stage] = piece;
  const uint32_t bytes = piece.to_index + piece.to_main;
  const uint32_t barrier = kernel_core::ptx::shared_address(&head->full[stage]);
  kernel_core::ptx::mbarrier_arrive_expect_tx(barrier, bytes);
  const uint32_t to = ring + static_cast<uint32_t>(stage) * p.piece;
  if (p.stream_once)
    bulk_load_once(to, piece.from, bytes, barrier);
  else
    kernel_core::ptx::cp_async_bulk(to, piece.from, bytes, barrier);
}

__device__ __forceinline__ void empty_stage(const MoveParams& p, const RingHead* head, uint32_t ring, int stage) {
  const Piece piece = head->piece[stage];
  const uint32_t from = ring + static_cast<uint32_t>(stage) * p.piece;
  if (piece.to_index) bulk_store(piece.index, from, piece.to_index);
  if (piece.to_main) bulk_store(piece.main, from + piece.to_index, piece.to_main);
  bulk_commit();
}

// Says which groups are over: those that end at or before item `written`, below which this CTA has written all of its.
struct Progress {
  int group = 0, layer = 0;
  int64_t end;  // item behind the next group to be told of

  __device__ __forceinline__ explicit Progress(const MoveParams& p)
      : end(p.done ? p.count * group_from(p, 0).parts : INT64_MAX) {}
  __device__ __forceinline__ void tell(const MoveParams& p, int64_t written) {
    while (end <= written) {
      count_up(p.done + group++);
      layer = group_from(p, layer).end;
      end = layer < p.layers ? end + p.count * group_from(p, layer).parts : INT64_MAX;
    }
  }
};

// By one thread of CTA `cta` of `ctas`; items are dealt in turn, so that all CTAs work at the same layer.
__device__ __forceinline__ void move_ring(const MoveParams& p, int stages, int64_t cta, int64_t ctas, uint8_t* shared) {
  using namespace kernel_core::ptx;
  RingHead* head = reinterpret_cast<RingHead*>(shared);
  const uint32_t ring = shared_address(shared) + kHeadBytes;
  const int64_t all = item_count(p);
  const int64_t mine = all > cta ? (all - cta - 1) / ctas + 1 : 0;
  for (int s = 0; s < stages; ++s) mbarrier_init(shared_address(&head->full[s]), 1);
  fence_barrier_init();
  for (int s = 0; s < stages && s < mine; ++s) fill_stage(p, head, ring, s, cta + s * ctas);
  int stage = 0, behind = stages - kStoresBehind;  // the stage whose stores are kStoresBehind old
  uint32_t parity = 0;
  Progress progress(p);
  for (int64_t k = 0; k < mine; ++k) {
    mbarrier_wait(shared_address(&head->full[stage]), parity);
    empty_stage(p, head, ring, stage);
    const int64_t next = k - kStoresBehind + stages;
    if (k >= kStoresBehind && next < mine) {
      bulk_wait_read<kStoresBehind>();
      fill_stage(p, head, ring, behind, cta + next * ctas);
    }
    const int64_t unwritten = cta + (k - kStoresBehind + 1) * ctas;  // the first item that may not be in memory yet
    if (unwritten >= progress.end) {
      bulk_wait_written_but<kStoresBehind>();
      progress.tell(p, unwritten);
    }
    if (++stage == stages) stage = 0, parity ^= 1;
    if (++behind == stages) behind = 0;
  }
  bulk_wait_written();
  progress.tell(p, all);
}

}  // namespace gdr_swapin::cuda
