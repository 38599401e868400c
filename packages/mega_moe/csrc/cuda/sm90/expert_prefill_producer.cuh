// The warpgroup that fills stages: weights become E4M3 in shared memory, chunks of rows are copied as they are.
#pragma once

#include <cstddef>

#include "expert_prefill_plan.cuh"
#include "expert_prefill_ptx.cuh"

namespace mega_moe::sm90 {

// A product's operands in memory.
struct PrefillProduct {
  const uint8_t* images;
  const uint8_t* weights;
  int groups, steps;  // of 256 weight rows, of a stage's columns
};

// A place in the ring of stages, and the parity of its turn.
template <int kSize>
struct StageRing {
  int at = 0, parity = 0;
  KC_HD void next() {
    if (++at == kSize) at = 0, parity ^= 1;
  }
};

// Steps of all tiles of a CTA, as one lane asks for their chunks of rows.
template <typename C>
struct PrefillCopies {
  int number, step;
  int ahead;  // of the step that is expanded
  PrefillTile tile;
  const uint8_t* from;
  StageRing<C::kStages> stage;
};

// Steps of all tiles of a CTA, as weights are loaded, 128 rows at a time, or asked for.
struct PrefillLoads {
  int number, step, block;
  PrefillTile tile;
  const uint8_t* from;
};

template <typename C>
struct PrefillShared {
  alignas(1024) uint8_t stages[C::kStages][C::kStageBytes];
  PrefillPlan plan;
  uint64_t full[C::kStages], empty[C::kStages];
  PrefillCopies<C> copies;  // of one lane each, which have no registers for them
  PrefillLoads prefetches;
};

// As numbers: no instruction finds out where shared memory begins.
template <typename C>
KC_HD constexpr uint32_t full_barrier(int stage) {
  return kFirstShared + static_cast<uint32_t>(offsetof(PrefillShared<C>, full)) + stage * 8;
}
template <typename C>
KC_HD constexpr uint32_t empty_barrier(int stage) {
  return kFirstShared + static_cast<uint32_t>(offsetof(PrefillShared<C>, empty)) + stage * 8;
}

template <typename C>
__device__ PrefillTile uniform_tile(const PrefillPlan& plan, int number, int groups) {
  const PrefillTile t = prefill_tile<C>(plan, number, groups);
  return {uniform(t.expert), uniform(t.block), uniform(t.blocks), uniform(t.group), uniform(t.groups)};
}

template <typename C>
class PrefillProducer {
 public:
  __device__ PrefillProducer(const PrefillProduct& product, PrefillShared<C>& shared)
      : p_(product),
        s_(shared),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32) - C::kConsumers / 32) {}

  __device__ void run() {
    if constexpr (C::kExpanded)
      copy_all();
    else
      expand_all();
  }

  // What `full` waits for: the copies' announcement, and where weights are expanded here, each warp.
  static constexpr int kArrivals = C::kExpanded ? 1 : 5;

 private:
  static constexpr int kChunk = chunk_bytes(C::kFp8);

  // ---- copies: one lane ----------------------------------------------------------------------------------------

  using Copies = PrefillCopies<C>;

  __device__ void begin(Copies& c, int number) const {
    c.number = number, c.step = 0;
    c.tile = prefill_tile<C>(s_.plan, c.number, p_.groups);
    c.from = p_.images + chunks_bytes(s_.plan.blocks[c.tile.expert < 0 ? 0 : c.tile.expert] + c.tile.block,
                                      p_.steps * C::kColumns, C::kFp8);
  }

  // The launch before this one has written them; also for the copies' proxy.
  __device__ static void wait_for_images() {
    wait_for_earlier_launch();
    fence_proxy_async_all();
  }

  // The stage is free.
  __device__ void copy(Copies& c) const {
    namespace ptx = kernel_core::ptx;
    const uint32_t full = full_barrier<C>(c.stage.at);
    const uint32_t to = kFirstShared + c.stage.at * C::kStageBytes;
    const int weights = C::kExpanded ? c.tile.groups * C::kGroupBytes : 0;
    ptx::mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(c.tile.blocks * kChunk + weights));
    MEGA_MOE_NO_UNROLL
    for (int i = 0; i < c.tile.blocks; ++i)
      ptx::cp_async_bulk(to + C::kImagesAt + i * C::kImageBytes,
                         c.from + (static_cast<int64_t>(i) * p_.steps + c.step) * kChunk, kChunk, full);
    if constexpr (C::kExpanded) {
      const int64_t block = (static_cast<int64_t>(c.tile.expert) * p_.groups + c.tile.group) * 2;
      MEGA_MOE_NO_UNROLL
      for (int i = 0; i < 2 * c.tile.groups; ++i)
        ptx::cp_async_bulk(to + i * kExpandedStep, p_.weights + ((block + i) * p_.steps + c.step) * kExpandedStep,
                           kExpandedStep, full);
    }
    c.stage.next(), ++c.ahead;
    if (++c.step == p_.steps) begin(c, c.number + static_cast<int>(gridDim.x));
  }

  // A step is about to be expanded: its chunks, and those of later steps whose stages are free already.
  __device__ void copy_free_stages(Copies& c) const {
    namespace ptx = kernel_core::ptx;
    while (
        c.tile.expert >= 0 && c.ahead < C::kStages &&
        (c.ahead == 0 || ptx::mbarrier_test(empty_barrier<C>(c.stage.at), static_cast<uint32_t>(c.stage.parity ^ 1))))
      copy(c);
    --c.ahead;
  }

  __device__ void copy_all() const {
    namespace ptx = kernel_core::ptx;
    if (warp_ != 0 || lane_ != 0) return;
    wait_for_images();
    Copies c;
    begin(c, static_cast<int>(blockIdx.x));
    MEGA_MOE_NO_UNROLL
    while (c.tile.expert >= 0) {
      ptx::mbarrier_wait(empty_barrier<C>(c.stage.at), c.stage.parity ^ 1);
      copy(c);
    }
  }

  // ---- weights, all lanes ----------------------------------------------------------------------------------------

  // A thread's share of 128 rows and a stage's columns, one or two pieces of 64: both tiles of 64 rows.
  static constexpr int kOwnPieces = C::kColumns / 64;
  struct Share {
    uint4 codes[kTiles][kOwnPieces];
    uint32_t scales[kTiles][kOwnPieces];
  };

  using Loads = PrefillLoads;

  __device__ void begin(Loads& l, const PrefillTile& tile) const {
    l.tile = tile, l.step = 0, l.block = 0;
    const int64_t block = (static_cast<int64_t>(l.tile.expert) * p_.groups + l.tile.group) * 2;
    l.from = p_.weights + block * packed_steps() * kPackedStep;
  }

  __device__ int packed_steps() const { return C::kFp8 ? p_.steps : p_.steps / kPieces; }

  __device__ void load(Loads& l, Share& share) const {
    if (l.tile.expert < 0) return;
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int step = C::kFp8 ? l.step : l.step / kPieces, first = C::kFp8 ? 0 : l.step % kPieces;
    const uint8_t* const from = l.from + (l.block * packed_steps() + step) * kPackedStep;
    MEGA_MOE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      MEGA_MOE_UNROLL
      for (int piece = 0; piece < kOwnPieces; ++piece)
        share.codes[tile][piece] =
            load_early_16(from + tile * kTileCodes + (first + piece) * kPieceBytes + thread * 16);
      const uint8_t* const scales = from + kTiles * kTileCodes + tile * Step<Format::mxfp4>::kScaleBytes;
      if constexpr (C::kFp8) {
        const uint2 both = load_early_8(scales + thread / 4 * 8);
        share.scales[tile][0] = both.x, share.scales[tile][kOwnPieces - 1] = both.y;
      } else {
        share.scales[tile][0] = load_early_4(scales + thread / 4 * 8 + first * 4);
      }
    }
    if (++l.block < 2 * l.tile.groups) return;
    l.block = 0;
    if (++l.step < p_.steps) return;
    l.number += static_cast<int>(gridDim.x);
    begin(l, uniform_tile<C>(s_.plan, l.number, p_.groups));
  }

  // The next step's weights to the second-level cache, once for the token tiles that share them; one lane.
  __device__ void prefetch(Loads& l) const {
    if (l.tile.expert < 0) return;
    if (l.tile.block == 0 && (C::kFp8 || l.step % kPieces == 0)) {
      const int step = C::kFp8 ? l.step : l.step / kPieces;
      MEGA_MOE_NO_UNROLL
      for (int i = 0; i < 2 * l.tile.groups; ++i)
        kernel_core::ptx::prefetch_l2(l.from + (i * packed_steps() + step) * kPackedStep, kPackedStep);
    }
    if (++l.step == p_.steps) {
      l.number += static_cast<int>(gridDim.x);
      begin(l, prefill_tile<C>(s_.plan, l.number, p_.groups));
    }
  }

  __device__ void expand_all() const {
    namespace ptx = kernel_core::ptx;
    constexpr int kAhead = 6 * kPieces / kOwnPieces;
    const int thread = static_cast<int>(threadIdx.x % 128), row = thread / 32 * 16 + lane_ / 4;
    const uint32_t place = kFirstShared + kernel_core::wgmma::swizzle128(row, lane_ % 4 * 4);
    const bool copies = warp_ == 0 && lane_ == 0;
    Loads loads;
    loads.number = static_cast<int>(blockIdx.x);
    begin(loads, uniform_tile<C>(s_.plan, loads.number, p_.groups));
    const bool prefetches = warp_ == 1 && lane_ == 0;
    if (prefetches) {
      s_.prefetches = loads;
      MEGA_MOE_NO_UNROLL
      for (int i = 0; i < kAhead; ++i) prefetch(s_.prefetches);
    }
    __syncwarp();
    Share shares[2];
    load(loads, shares[0]);
    load(loads, shares[1]);
    if (copies) {
      wait_for_images();
      begin(s_.copies, static_cast<int>(blockIdx.x)), s_.copies.stage = {}, s_.copies.ahead = 0;
    }
    StageRing<C::kStages> stage;
    MEGA_MOE_NO_UNROLL
    for (int number = static_cast<int>(blockIdx.x);; number += static_cast<int>(gridDim.x)) {
      const PrefillTile tile = uniform_tile<C>(s_.plan, number, p_.groups);
      if (tile.expert < 0) return;
      MEGA_MOE_NO_UNROLL
      for (int step = 0; step < p_.steps; ++step) {
        ptx::mbarrier_wait(empty_barrier<C>(stage.at), stage.parity ^ 1);
        if (copies) copy_free_stages(s_.copies);
        if (prefetches) prefetch(s_.prefetches);
        __syncwarp();
        const uint32_t offset = stage.at * C::kStageBytes;
        MEGA_MOE_NO_UNROLL
        for (int group = 0; group < tile.groups; ++group) {
          MEGA_MOE_UNROLL
          for (int half = 0; half < 2; ++half) {
            expand(shares[half], place + offset + group * C::kGroupBytes + half * kExpandedStep);
            load(loads, shares[half]);
          }
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) ptx::mbarrier_arrive(full_barrier<C>(stage.at));
        stage.next();
      }
    }
  }

  // The swizzle is an exclusive or with the row, 16 bytes each; a row's partner is 8 rows below.
  __device__ static void expand(const Share& share, uint32_t place) {
    MEGA_MOE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      MEGA_MOE_UNROLL
      for (int piece = 0; piece < kOwnPieces; ++piece) {
        const uint4& v = share.codes[tile][piece];
        const uint32_t codes[4] = {v.x, v.y, v.z, v.w}, scales = share.scales[tile][piece];
        const uint32_t down = tile * (kTileRows * 128);
        if constexpr (C::kFp8) {
          uint32_t out[2][4];
          expand_piece_fp8(codes, scales, out[0], out[1]);
          MEGA_MOE_UNROLL
          for (int i = 0; i < 8; ++i)
            store_shared_4((place ^ (4 * piece + i / 2) * 16) + down + i % 2 * 8 * 128, out[i / 4][i % 4]);
        } else {
          const uint32_t both[2] = {scales, 0};
          uint32_t out[4][4];
          expand_piece(codes, both, out, Step<Format::mxfp4>{});
          MEGA_MOE_UNROLL
          for (int i = 0; i < 16; ++i)
            store_shared_4((place ^ (i / 2) * 16) + down + i % 2 * 8 * 128, out[i / 4][i % 4]);
        }
      }
    }
  }

  const PrefillProduct& p_;
  PrefillShared<C>& s_;
  const int lane_, warp_;
};

}  // namespace mega_moe::sm90
