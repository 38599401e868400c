// Experts on SM100, the parts that are plain arithmetic and are tested on the host: tiles, items, where bytes stand.
//
// Operands are swapped: weight rows are M, the rows of an expert's token tile are N. A step takes 128 columns of K.
//
//   weights   E2M1 as the checkpoint stores them; the copy engine puts 16 codes into 16 bytes, 8 of them padding. The
//             shared expert, which is one more expert behind the others, has E4M3
//   scales    [expert][block][step][2 products][512]: UE8M0 of 128 rows in the order that tensor memory wants
//   images    [tile][step][512 + kTokens * 128]: scales of a tile's rows likewise, then E4M3 rows, 128-byte swizzled
//
// A CTA has two products of 128 weight rows at once: the gate and the up rows of 128 channels, or 256 rows of the
// second weight; a pair has twice as many rows and each CTA brings half of the tile's rows.
#pragma once

#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/tcgen05.cuh"

namespace mega_moe::sm100 {

namespace cuda = kernel_core::cuda;
namespace tcgen05 = kernel_core::tcgen05;

inline constexpr int kMostExperts = 512;
inline constexpr int kBlockRows = 128, kStepColumns = 128, kProducts = 2;
inline constexpr int kScaleBytes = 512;                         // 128 words of four
inline constexpr int kWeightBytes = kBlockRows * kStepColumns;  // in shared memory
inline constexpr int kCodesCounted = kWeightBytes / 2;          // what a copy counts at its barrier: without padding
inline constexpr int kWeightScales = kProducts * kScaleBytes;

template <int kTokens_, int kCtas_, int kStages_>
struct ExpertConfig {
  static constexpr int kTokens = kTokens_, kCtas = kCtas_, kStages = kStages_, kBuffers = 2;
  static constexpr int kThreads = 192, kProductWarp = 4, kCopyWarp = 5;  // warps 0 to 3 take the sums
  static constexpr int kImageBytes = kTokens / kCtas * kStepColumns, kImageTile = kScaleBytes + kTokens * kStepColumns;
  static constexpr int kStepScales = kWeightScales + kScaleBytes;
  static_assert(kTokens % (16 * kCtas) == 0 && kTokens <= 128 && kCtas <= 2);

  // Shared memory
  static constexpr uint32_t kWeights = 0, kImages = kWeights + kStages * kProducts * kWeightBytes,
                            kScales = kImages + kStages * kImageBytes, kRows = kScales + kStages * kStepScales,
                            kGains = kRows + kBuffers * kTokens * 4, kFull = kGains + kBuffers * kTokens * 4,
                            kReady = kFull + kStages * 8, kEmpty = kReady + kStages * 8,
                            kSumsFull = kEmpty + kStages * 8, kSumsFree = kSumsFull + kBuffers * 8,
                            kTmem = kSumsFree + kBuffers * 8, kPlan = kTmem + 8,
                            kBytes = kPlan + (kMostExperts + 2) * 4;
  static_assert(kImages % 1024 == 0 && kImageBytes % 1024 == 0 && kScales % 128 == 0 && kBytes <= 232448, "227 KiB");

  // Tensor memory, columns: sums of two items, two products each; scales of every stage
  static constexpr uint32_t kSumColumns = kProducts * kTokens, kScaleColumns = kBuffers * kSumColumns,
                            kTmemColumns = 512;
  static_assert(kScaleColumns + kStages * 12 <= kTmemColumns);

  static constexpr uint32_t sums(int buffer, int product) { return buffer * kSumColumns + product * kTokens; }
  static constexpr uint32_t weight_scales(int stage, int product) { return kScaleColumns + stage * 12 + product * 4; }
  static constexpr uint32_t image_scales(int stage) { return kScaleColumns + stage * 12 + 8; }
};

// kind::mxf8f6f4 with E4M3 rows of N, UE8M0 scales for each 32 of K: a step of the instruction has one of a scale
// word's four bytes. M of both CTAs together.
enum class Weight : uint32_t { e4m3 = 0, e2m1 = 5 };
KC_HD constexpr uint32_t mx_product(Weight weight, uint32_t m, uint32_t n, uint32_t byte) {
  constexpr uint32_t kE4M3 = 0;
  return byte << 4 | static_cast<uint32_t>(weight) << 7 | kE4M3 << 10 | (n >> 3) << 17 | 1u << 23 | (m >> 7) << 27 |
         byte << 29;
}

// Columns of the product for `rows` rows of a tile; each CTA brings whole groups of eight.
template <int kCtas>
KC_HD constexpr int product_columns(int rows) {
  return (rows + 16 * kCtas - 1) / (16 * kCtas) * (16 * kCtas);
}

// Byte of column k of row r in a tile of 128-byte rows
KC_HD constexpr uint32_t swizzle128(uint32_t row, uint32_t k) {
  return row * 128 + ((k / 16 ^ (row & 7)) * 16) + k % 16;
}

// Of a row of codes in the padded form: the byte with columns k and k + 1, k even, before the swizzle.
KC_HD constexpr uint32_t padded_byte(uint32_t k) { return k / 16 * 16 + k % 16 / 2; }

// Where the scale byte of row i and the 32 columns `part` of a step stands among the 512 bytes.
KC_HD constexpr uint32_t scale_place(uint32_t row, uint32_t part) { return tcgen05::scale_byte(row) + part; }

// --- scales of activations: the model's, for 32 channels of a row
// -----------------------------------------------------

KC_HD uint32_t activation_scale(uint32_t amax_bits) { return cuda::group_scale(cuda::WindowRow{}, amax_bits).byte; }

// fl(1 / scale), exact for the bytes that activation_scale gives; NaN for its NaN, so that every code becomes NaN.
KC_HD float inverse_scale(uint32_t byte) { return cuda::bits_float(byte == 255 ? 0x7FC00000 : (254 - byte) << 23); }

// --- items
// ------------------------------------------------------------------------------------------------------------

struct Work {
  int expert, block;  // of kCtas CTAs
  int tile;           // over all experts: its image
  int rows, first;    // of the tile; place of the first one among the sorted rows
};

// The expert that has tile `tile`: tiles[expert] <= tile < tiles[expert + 1]. `at` reads a prefix sum.
template <typename At>
KC_HD int find_expert(const At& at, int experts, int tile) {
  int low = 0, high = experts - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (at(middle) <= tile)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// Item `item` of all tiles times `blocks`; items of the same weight rows are neighbours.
template <typename At>
KC_HD Work find_work(const At& at, const int32_t* offsets, int experts, int blocks, int tokens, int item) {
  const int expert = find_expert(at, experts, item / blocks);
  const int before = at(expert), tiles = at(expert + 1) - before, rest = item - before * blocks;
  const int block = rest / tiles, tile = rest - block * tiles;
  const int left = offsets[expert + 1] - offsets[expert] - tile * tokens;
  return {expert, block, before + tile, left < tokens ? left : tokens, offsets[expert] + tile * tokens};
}

// Weight row of product `product`, of a CTA's block.
KC_HD constexpr int weight_row(bool second, int inter, int d, int expert, int block, int product) {
  return second ? expert * d + block * 256 + product * 128 : expert * 2 * inter + product * inter + block * 128;
}

// Upper bound of tiles, from sizes that the host knows.
KC_HD constexpr int64_t most_tiles(int64_t tokens, int64_t slots, int64_t experts, bool shared, int64_t tile) {
  const int64_t routed = tokens * slots;
  return routed / tile + (experts < routed ? experts : routed) + (shared ? (tokens + tile - 1) / tile : 0);
}

}  // namespace mega_moe::sm100
