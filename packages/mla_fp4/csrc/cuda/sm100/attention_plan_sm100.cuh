// Sparse attention on SM100, the parts that are plain arithmetic and are tested on the host: where things stand in
// shared and tensor memory, which thread has which head, which operands each product reads.
//
// Two variants share it. One CTA: 64 heads, products with M = 64. A pair of CTAs: 128 heads, 64 each, products with
// M = 128; each CTA decodes 64 of a chunk's 128 keys, and both read both (PTX cta_group::2).
#pragma once

#include "cuda/sm100/attention_chunks_sm100.cuh"
#include "kernel_core/cuda/tcgen05.cuh"

namespace mla_fp4::sm100 {

namespace tcgen05 = kernel_core::tcgen05;
using kernel_core::cuda::add_rn;
using kernel_core::cuda::mul_rn;

template <bool kPair_>
struct AttentionConfig {
  static constexpr bool kPair = kPair_;
  static constexpr int kCtas = kPair ? 2 : 1, kHeads = 64;
  // Warpgroup 0 decodes, 1 makes weights, 2 merges; warp 12 issues products, warp 13 gathers rows.
  static constexpr int kThreads = 512, kProductWarp = 12, kGatherWarp = 13;
  static constexpr int kOwnTiles = kPair ? 1 : 2;  // of the two 64-key tiles of a chunk, those decoded here

  // Masks of four chunks: rows of the next but one are copied before the weights of this one are made.
  static constexpr int kMaskTurns = 4;

  // Shared memory. One CTA: two tiles of 64 keys x 512 columns, which are keys and values. A pair: the tile of this
  // CTA's keys, then the values: 128 keys x this CTA's 256 columns.
  static constexpr uint32_t kQ = 0, kK = kHeads * kDim * 2, kV = kPair ? kK + kTileBytes : kK, kP = kK + 2 * kTileBytes,
                            kPTile = kHeads * 128, kStaging = kP + kTiles * kPTile,
                            kStagingBytes = kTileKeys * kMainRowBytes, kControl = kStaging + kStagingBytes,
                            kTops = kControl, kMasks = kTops + 2 * kHeads * 4,
                            kBarriers = kMasks + kMaskTurns * kTiles * 8, kTmem = kBarriers + 15 * 8,
                            kBytes = kControl + 1024;
  static KC_HD constexpr uint32_t mask(int turn, int tile) { return kMasks + (turn % kMaskTurns * kTiles + tile) * 8; }
  // Rows of the window are longer. They come first, when there are no weights yet, and take that space too.
  static constexpr uint32_t kWindowStaging = kP;
  static_assert(kTmem + 4 <= kBytes && kBytes == 232448, "227 KiB");
  static_assert(kTileKeys * kWindowRowBytes <= kControl - kWindowStaging);

  // Barriers; arrivals of a CTA, which in a pair count twice where both CTAs arrive.
  static constexpr uint32_t kRawFull = kBarriers, kRawFree = kRawFull + 8, kFull = kRawFree + 8, kQFull = kFull + 16,
                            kScores = kQFull + 8, kWeights = kScores + 8, kSliceFull = kWeights + 8,
                            kSliceFree = kSliceFull + 16, kFree = kSliceFree + 16;
  static_assert(kFree + kSlices * 8 == kTmem);

  // Tensor memory, columns: 64 heads x 512 running sums, two slices of a chunk's sums, the scores of a chunk. Each of
  // them has two halves in different lanes: of 512 columns or of 128 keys.
  static constexpr uint32_t kSums = 0, kSlice = kSums + kDim / 2, kSliceColumns = 64,
                            kScoreColumns = kSlice + 2 * kSliceColumns, kTmemUsed = kScoreColumns + kChunkKeys / 2,
                            kTmemColumns = 512;
  static_assert(kTmemUsed <= kTmemColumns && kSums + kSlices * kSliceColumns == kSlice);
  static_assert(kSliceColumns % 32 == 0 && kSliceColumns * kSlices * 2 == kDim);

  static constexpr uint32_t kM = kCtas * 64, kN = kCtas * 64;
  static constexpr uint32_t kScoreKind = tcgen05::bf16_product(kM, kN, tcgen05::Major::k, tcgen05::Major::k);
  static constexpr uint32_t kValueKind = tcgen05::bf16_product(kM, kN, tcgen05::Major::k, tcgen05::Major::mn);
};

// What thread t of a warpgroup finds in its lane: the head and the half.
template <bool kPair>
KC_HD constexpr int lane_head(int t) {
  return kPair ? t % 64 : t / 32 * 16 + t % 16;
}
template <bool kPair>
KC_HD constexpr int lane_half(int t) {
  return kPair ? t / 64 : t / 16 % 2;
}
// Lane of an accumulator that a product of one CTA gets for a half; a pair's product fills both halves itself.
KC_HD constexpr uint32_t half_lane(int half) { return 16 * half; }

// Operands, as byte offsets in shared memory. S = Q K^T, step 0 .. 31 of 16 columns; `tile` 0 for a pair.
KC_HD constexpr uint32_t score_step(int step) { return step / 4 * kColumnBytes + step % 4 * 32; }
// O = P V, step 0 .. 7 of 16 keys.
template <typename C>
KC_HD constexpr uint32_t weight_step(int step) {
  return C::kP + step / 4 * C::kPTile + step % 4 * 32;
}
// V: slice s is 64 columns of each half. A pair's CTA has one half, of both tiles; one CTA both, in its key tiles.
template <typename C>
KC_HD constexpr uint32_t value_step(int step, int s, int half) {
  const uint32_t columns = C::kPair ? step / 4 * kSlices + s : step / 4 * (2 * kSlices) + half * kSlices + s;
  return C::kV + columns * kColumnBytes + step % 4 * 2048;
}
// Where a pair's decoder puts a piece besides the key tile: in the values of CTA `half`.
template <typename C>
KC_HD constexpr uint32_t value_own(int key, int tile) {
  return C::kV + tile * kSlices * kColumnBytes + key * 128 + ((key & 7) << 4);
}

// Column of the output: register i of a slice's lane.
KC_HD constexpr int output_column(int half, int s, int i) { return half * (kDim / 2) + s * 64 + i; }

// The inverse rotation of a pair of output columns.
KC_HD void turn_back(float& even, float& odd, float cosine, float sine) {
  const float turned = fma_rn(even, cosine, mul_rn(odd, sine));
  odd = fma_rn(odd, cosine, -mul_rn(even, sine));
  even = turned;
}

// Passes: the rows of one tile.
template <typename C>
KC_HD constexpr int pass_chunk(int pass, int first_chunk) {
  return first_chunk + pass / C::kOwnTiles;
}
template <typename C>
KC_HD constexpr int pass_tile(int pass, int rank) {
  return C::kPair ? rank : pass % C::kOwnTiles;
}

// The chunk's denominator of 64 weights: eight sums over every eighth weight, then those in pairs.
KC_HD float sum_weights(const float (&w)[64]) {
  float sums[8];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 8; ++i) {
    sums[i] = w[i];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int j = 8; j < 64; j += 8) sums[i] = add_rn(sums[i], w[i + j]);
  }
  return add_rn(add_rn(add_rn(sums[0], sums[1]), add_rn(sums[2], sums[3])),
                add_rn(add_rn(sums[4], sums[5]), add_rn(sums[6], sums[7])));
}

}  // namespace mla_fp4::sm100
