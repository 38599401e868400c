// Shape of an expert kernel, its shared memory and who does what.
#pragma once

#include "expert_fp8.cuh"
#include "expert_params.hpp"
#include "expert_plan.cuh"
#include "expert_ptx.cuh"
#include "expert_ranks.cuh"
#include "expert_trace.cuh"

namespace mega_moe::sm90 {

inline constexpr int kSlots = 4;  // items known to a CTA at once: more than the stages can hold

template <int kColumns_, int kBlocks_, int kSteps_, int kStages_, bool kFp8_ = false, int kSplit_ = 1, int kPerSm_ = 1,
          int kGroup_ = (kColumns_ <= 32 && kSplit_ == 1 && kPerSm_ == 1) ? 2 : 1>
struct ExpertConfig {
  static constexpr int kColumns = kColumns_;  // largest token tile
  static constexpr int kLeast = least_columns(kColumns);
  static constexpr int kBlocks = kBlocks_;  // of an item
  static constexpr int kSteps = kSteps_;    // of a stage
  static constexpr int kStages = kStages_;
  static constexpr bool kFp8 = kFp8_;     // activations, else bfloat16
  static constexpr int kSplit = kSplit_;  // blocks that have two warpgroups each; the others are taken in turn
  static constexpr int kPerSm = kPerSm_;  // CTAs
  static constexpr int kGroup = kGroup_;  // pieces of weights between two waits for products: registers allow two
  static constexpr int kOwn = kBlocks / kSplit;  // blocks of a warpgroup
  static_assert(kBlocks % kSplit == 0);
  static constexpr int kConsumers = kTiles * 128 * kSplit;
  // Small tiles: x is read where it lies, by two warps. Others: through images, made once for all that read them.
  static constexpr bool kDirect = !kFp8 && kColumns <= 16;
  static constexpr int kImageWarps = kDirect ? 2 : 1;
  // Warps after the consumers: one asks for weights and takes items from the queue, one looks up which rows an item has
  // and says when it is stored, one or two bring activations.
  static constexpr int kWeightWarp = kConsumers / 32, kRowWarp = kWeightWarp + 1, kImageWarp = kWeightWarp + 2;
  static constexpr int kThreads = kConsumers + 128;  // a whole warpgroup, so that it can give registers away
  // At launch 168, 96 with four consuming warpgroups, 80 with two CTAs.
  static constexpr int kConsumerRegisters = kPerSm == 2 ? 96 : kSplit == 2 ? 104 : kDirect ? 216 : 232;
  static constexpr int kProducerRegisters = kPerSm == 2 ? 48 : kSplit == 2 ? 64 : kDirect ? 72 : 40;
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
  // known, its rows are known, its results are stored, it is finished; all items are.
  uint64_t full[C::kStages], empty[C::kStages];
  uint64_t known[kSlots], rows_known[kSlots], stored[kSlots], finished[kSlots], announced;
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
