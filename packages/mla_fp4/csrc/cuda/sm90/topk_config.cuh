// Sizes of the selection, and what the threads of a block share.
#pragma once

#include "topk_plan.cuh"

namespace mla_fp4::sm90 {

namespace plan = topk_plan;

// kStages tiles on their way or in use; kBlocks run at once on a multiprocessor.
template <int kMaxK_, int kCapacity_, int kThreads_, int kBlocks_>
struct TopkConfig {
  static constexpr int kMaxK = kMaxK_, kCapacity = kCapacity_, kThreads = kThreads_, kBlocks = kBlocks_;
  static constexpr int kStages = 4;
  static constexpr int kVectors = 2;  // 16-byte loads of a thread and tile
  static constexpr int kValues = 4 * kVectors;
  static constexpr int kTile = kThreads * kValues;
  static constexpr int kLongestRow = kStages * kTile * 32;  // bits of the bitmap, which takes the stages' place
  static constexpr int kSamples = 2048 / kThreads, kMostSamples = 8192 / kThreads;  // of a thread
  static constexpr int kManySamplesFrom = 1 << 17;                                  // entries of a row
  static constexpr int kTies = 64;  // as many are ranked by comparing each with each
  static_assert(kCapacity >= 2 * kMaxK && kCapacity % kThreads == 0, "a cut has to make room");
};

template <typename C>
struct TopkShared {
  float4 coming[C::kStages][C::kVectors][C::kThreads];  // each thread reads what it has copied itself
  uint64_t list[C::kCapacity];
  uint64_t ties[C::kTies];
  int32_t sorted[C::kMaxK];
  int bins[plan::kBins];
  int warps[32];
  uint32_t lowest[32], highest[32];
  int found[3];     // bin, entries before it, entries in it
  int arrivals[3];  // of tile i in slot i % 3
  int kept;
  uint64_t cutoff;
};

struct TopkRow {
  const float* scores;
  int length;
};

}  // namespace mla_fp4::sm90
