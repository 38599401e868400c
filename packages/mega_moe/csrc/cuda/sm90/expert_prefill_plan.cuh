// Who computes what in the experts for many tokens, and how rows lie in memory. Host and device.
//
// An expert's rows are cut into blocks of 64; those of all experts follow each other. A chunk is 128 bytes of a block's
// rows, 128-byte swizzled: 128 channels in E4M3 with their float32 scales behind, or 64 in bfloat16;
// [block][channels / 128 or 64][chunk]. Rows behind an expert's last are never written: a row of a product reaches its
// own results only.
//
// The E4M3 form of a weight is [expert][128 rows][columns / 128][128 rows x 128 bytes], swizzled.
#pragma once

#include "expert_fp8.cuh"
#include "expert_prefill_params.hpp"

namespace mega_moe::sm90 {

inline constexpr int kPrefillExperts = 512;
inline constexpr int kBlockTokens = 64, kGroupRows = 256;  // what a warpgroup multiplies
inline constexpr int kChunkCodes = kBlockTokens * 128;
inline constexpr int kPackedStep = step_bytes(Format::mxfp4);  // 128 rows x 128 columns as packed
inline constexpr int kExpandedStep = kBlockRows * 128;         // and in E4M3

// Activations and what weights in memory are: E4M3 and MXFP4, E4M3 and E4M3, bfloat16 and MXFP4.
enum class PrefillKind { fp8, expanded, bf16 };

KC_HD constexpr int step_channels(bool fp8) { return fp8 ? kFp8Group : 64; }  // of a stage and of a chunk
KC_HD constexpr int chunk_bytes(bool fp8) { return kChunkCodes + (fp8 ? kBlockTokens * 4 : 0); }

// Two warpgroups multiply: two blocks of tokens by one group of weight rows, or one block by two groups.
template <int kTokens_, int kStages_, PrefillKind kKind>
struct PrefillConfig {
  static constexpr int kTokens = kTokens_, kStages = kStages_;
  static constexpr bool kFp8 = kKind != PrefillKind::bf16, kExpanded = kKind == PrefillKind::expanded;
  static constexpr int kColumns = step_channels(kFp8);
  static constexpr int kBlocks = kTokens / kBlockTokens, kGroups = 2 / kBlocks;
  static_assert(kBlocks * kGroups == 2);
  static constexpr int kConsumers = 256, kThreads = kConsumers + 128;
  static constexpr int kConsumerRegisters = 208, kProducerRegisters = 88, kLaunchRegisters = 168;
  static_assert(kConsumers * kConsumerRegisters + 128 * kProducerRegisters <= kThreads * kLaunchRegisters,
                "more registers than the launch gives: a warpgroup would wait for them forever");
  static constexpr int kGroupBytes = kGroupRows * 128;
  static constexpr int kImageBytes = (chunk_bytes(kFp8) + 1023) / 1024 * 1024;
  static constexpr int kImagesAt = kGroups * kGroupBytes;  // in a stage, behind the weights
  static constexpr int kStageBytes = kImagesAt + kBlocks * kImageBytes;
};

// Prefix sums over experts.
struct PrefillPlan {
  int experts;
  int first[kPrefillExperts + 1];   // position of the first row
  int blocks[kPrefillExperts + 1];  // of 64 rows
  int tiles[kPrefillExperts + 1];   // of `kBlocks` blocks
};

// A token tile of an expert and one or two groups of weight rows.
struct PrefillTile {
  int expert;  // -1: there is none
  int block;   // of the expert: the tile's first
  int blocks;
  int group;  // the tile's first
  int groups;
};

// The last expert whose prefix is not above `value` < prefix[experts].
KC_HD int find_prefix(const int* prefix, int experts, int value) {
  int low = 0, high = experts - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (prefix[middle] <= value)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

KC_HD int smaller(int a, int b) { return a < b ? a : b; }

// Tiles that read the same weights are neighbours.
template <typename C>
KC_HD PrefillTile prefill_tile(const PrefillPlan& p, int number, int groups) {
  const int columns = (groups + C::kGroups - 1) / C::kGroups;
  if (number >= p.tiles[p.experts] * columns) return {-1, 0, 0, 0, 0};
  const int expert = find_prefix(p.tiles, p.experts, number / columns);
  const int tiles = p.tiles[expert + 1] - p.tiles[expert], rest = number - p.tiles[expert] * columns;
  const int column = rest / tiles, block = (rest - column * tiles) * C::kBlocks, group = column * C::kGroups;
  return {expert, block, smaller(C::kBlocks, p.blocks[expert + 1] - p.blocks[expert] - block), group,
          smaller(C::kGroups, groups - group)};
}

// Upper bounds for workspaces, from sizes that the host knows.
KC_HD constexpr int64_t most_blocks(int64_t tokens, int64_t slots, int64_t experts) {
  const int64_t rows = tokens * slots, active = experts < rows ? experts : rows;
  return rows / kBlockTokens + active;
}
KC_HD constexpr int64_t chunks_bytes(int64_t blocks, int64_t channels, bool fp8) {
  return blocks * (channels / step_channels(fp8)) * chunk_bytes(fp8);
}

}  // namespace mega_moe::sm90
