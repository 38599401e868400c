// Index scores on SM100, the parts that are plain arithmetic and are tested on the host.
//
// A product takes 128 keys (M) and 128 columns (N), (query, head) pairs, as they are stored: E2M1 codes with a UE8M0
// scale for each 32 channels, two steps of 64 channels. The tensor core applies both scales. So unlike sm90 a dot
// product is one sum over 128 channels in float32, in the tensor core's order, which no launch parameter changes.
#pragma once

#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/tcgen05.cuh"

namespace mla_fp4::sm100 {

namespace tcgen05 = kernel_core::tcgen05;

struct IndexPlan {
  static constexpr int kDim = 128, kScales = 4, kCodeBytes = kDim / 2, kTileKeys = 128, kColumns = 128;
  static constexpr int kMaxGroups = 8;  // of 128 columns: the queries of a thread block
  static constexpr int kStages = 8, kBuffers = 3;
  static constexpr int kThreads = kBuffers * 128 + 128 + 32, kLoadWarp = kBuffers * 4, kProductWarp = kLoadWarp + 4;

  // Shared memory: tiles of keys, then queries, each codes and scales; weights; what a row sees; barriers.
  static constexpr uint32_t kCodes = kTileKeys * kCodeBytes, kScaleBytes = kTileKeys * kScales,
                            kTile = kCodes + kScaleBytes;
  static constexpr uint32_t kKeyCodes = 0, kKeyScales = kStages * kCodes,
                            kQueryCodes = kKeyScales + kStages * kScaleBytes,
                            kQueryScales = kQueryCodes + kMaxGroups * kCodes,
                            kWeights = kQueryScales + kMaxGroups * kScaleBytes,
                            kVisible = kWeights + kMaxGroups * kColumns * 4,
                            kFull = kVisible + kMaxGroups * kColumns / 8 * 4, kEmpty = kFull + kStages * 8,
                            kSumsFull = kEmpty + kStages * 8, kSumsFree = kSumsFull + kBuffers * 8,
                            kQueriesFull = kSumsFree + kBuffers * 8, kTmem = kQueriesFull + 8, kBytes = kTmem + 8;
  static_assert(kQueryCodes % 1024 == 0 && kQueryScales % 1024 == 0 && kBytes <= 232448, "227 KiB");

  // Tensor memory, columns: sums of three products, scales of the tiles of keys, scales of the queries.
  static constexpr uint32_t kSums = 0, kKeyScaleColumns = kSums + kBuffers * kColumns,
                            kQueryScaleColumns = kKeyScaleColumns + kStages * 4,
                            kTmemUsed = kQueryScaleColumns + kMaxGroups * 4, kTmemColumns = 512;
  static_assert(kTmemUsed <= kTmemColumns && kTileKeys == tcgen05::kLanes);
};

// Heads that a kernel is built for; the rest has zero codes and zero weights.
KC_HD constexpr int padded_heads(int heads) { return heads <= 8 ? 8 : heads <= 32 ? 32 : 64; }

// Where a channel pair of a (query, head) column stands in its row's image; column = query * heads + head and heads are
// a multiple of 8, so the swizzle depends on the head alone and images of rows follow each other.
KC_HD constexpr uint32_t image_byte(int head, int channel) {
  return tcgen05::swizzle64(static_cast<uint32_t>(head), static_cast<uint32_t>(channel / 2));
}

// 16-byte piece of a key's codes
KC_HD constexpr uint32_t key_piece(int key, int piece) {
  return tcgen05::swizzle64(static_cast<uint32_t>(key), static_cast<uint32_t>(piece * 16));
}

// Columns of a product with `rows` queries: N is a multiple of 16.
KC_HD constexpr uint32_t product_columns(int rows, int heads) {
  return static_cast<uint32_t>((rows * heads + 15) / 16 * 16);
}

KC_HD float relu(float x) {  // NaN passes
#if defined(__CUDA_ARCH__)
  float out;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(out) : "f"(x));
  return out;
#else
  return x < 0 ? 0 : x;
#endif
}

KC_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// Four sums over every fourth head, then those in pairs.
template <int kCount>
KC_HD void add_heads(float (&sums)[4], const float (&dots)[kCount], const float* weights) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < kCount; ++i) sums[i % 4] = fused(weights[i], relu(dots[i]), sums[i % 4]);
}
KC_HD float sum_heads(const float (&sums)[4]) {
  using kernel_core::cuda::add_rn;
  return add_rn(add_rn(sums[0], sums[1]), add_rn(sums[2], sums[3]));
}

// Keys of a thread block, a power of two: enough blocks for the device, not so few keys that reading queries shows.
KC_HD int64_t keys_of_thread_block(int64_t tiles, int64_t width, int64_t multiprocessors) {
  int64_t keys = 8192;
  while (keys > 512 && tiles * ((width + keys - 1) / keys) < 2 * multiprocessors) keys /= 2;
  return keys;
}

}  // namespace mla_fp4::sm100
