// Shape of an expert kernel, its shared memory and who does what.
#pragma once

#include "expert_fp8.cuh"
#include "expert_params.hpp"
#include "expert_plan.cuh"
#include "expert_ptx.cuh"

namespace mega_moe::sm90 {

inline constexpr int kSlots = 4;  // items known to a CTA at once: more than the stages can hold

template <int kColumns_, int kBlocks_, int kSteps_, int kStages_, bool kFp8_ = false>
struct ExpertConfig {
  static constexpr int kColumns = kColumns_;  // largest token tile
  static constexpr int kLeast = least_columns(kColumns);
  static constexpr int kBlocks = kBlocks_;  // of an item
  static constexpr int kSteps = kSteps_;    // of a stage
  static constexpr int kStages = kStages_;
  static constexpr bool kFp8 = kFp8_;  // activations, else bfloat16
  static constexpr int kConsumers = kTiles * 128;
  // Warps after the consumers: one asks for weights and takes items from the queue, one asks for activations, one
  // looks up which rows an item has.
  static constexpr int kWeightWarp = kConsumers / 32, kImageWarp = kWeightWarp + 1, kRowWarp = kWeightWarp + 2;
  static constexpr int kThreads = kConsumers + 128;  // a whole warpgroup, so that it can give registers away
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;  // 168 at launch
  // Bytes of an image's rows for a stage's columns, and of a row of all columns.
  KC_HD static constexpr int64_t stage_image_bytes(int rows, int columns) {
    return kFp8 ? fp8_chunk_bytes(rows) : int64_t{rows} * columns * 2;
  }
  KC_HD static constexpr int64_t row_bytes(int columns) {
    return kFp8 ? columns / kFp8Group * fp8_chunk_bytes(1) : int64_t{columns} * 2;
  }
  static constexpr int kImageBytes =
      static_cast<int>(stage_image_bytes(kColumns, kSteps* step_columns(Format::mxfp4)) + 1023) / 1024 * 1024;
  static_assert(!kFp8 || (kSteps == 1 && kLeast == 64), "a stage is a group of channels");
  static constexpr int kBlockBytes = kSteps * kLargestStep;
  static constexpr int kStageBytes = (kImageBytes + kBlocks * kBlockBytes + 1023) / 1024 * 1024;  // an image first
};

// A row of another rank or of this one.
struct RankRow {
  int rank, row;
};
KC_HD RankRow rank_row(const Ranks& ranks, int number) {
  const int rank = ranks.world == 1 ? 0 : number / ranks.rows;
  return {rank, number - rank * ranks.rows};
}

struct ItemSlot {
  Item item;
  float* part[kMostColumns];   // where each row's result goes
  float weight[kMostColumns];  // what it is multiplied by
};

template <typename C>
struct ExpertShared {
  alignas(1024) uint8_t stages[C::kStages][C::kStageBytes];
  ExpertPlan plan;
  ItemSlot slots[kSlots];
  // Barriers: a stage's bytes are there (weights and activations arrive once each) and may be overwritten; an item is
  // known, its rows are known, it is finished.
  uint64_t full[C::kStages], empty[C::kStages];
  uint64_t known[kSlots], rows_known[kSlots], finished[kSlots];
  int amax[2 * kMostColumns];  // of hidden rows, where they become FP8; items take turns
};

// A place in a ring of `size`, and the parity of its turn.
struct Ring {
  int at = 0, parity = 0;
  KC_HD void next(int size) {
    if (++at == size) at = 0, parity ^= 1;
  }
};

}  // namespace mega_moe::sm90
