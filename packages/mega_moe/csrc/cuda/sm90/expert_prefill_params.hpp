// Arguments of the SM90 experts for many tokens: a chain of launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mega_moe::sm90 {

// Launches, in this order; kPrefillExpand only where weights are expanded in memory.
enum PrefillStep : int {
  kPrefillRows = 1,
  kPrefillFirst = 2,
  kPrefillSecond = 4,
  kPrefillSum = 8,
  kPrefillAll = 15,
  kPrefillExpand = 16
};

struct PrefillParams {
  const void* x;  // [tokens, d], bfloat16 or float32 (rounded to bfloat16)
  int x_is_float;
  int tokens, slots, d, inter, experts;
  const int32_t* ids;       // [tokens, slots]; outside of [0, experts): an empty slot
  const float* weights;     // [tokens, slots]
  const int32_t* offsets;   // [experts + 1], prefix sums of rows sorted by expert
  const int32_t* rows;      // [tokens * slots], position to token * slots + slot
  const uint8_t *w13, *w2;  // as `mega_moe.cuda.layout` packs them
  // W4A8: as `layout_fp8` does, and rows' factors, [experts, 2 inter] and [experts, d]; else null
  const float *scale13, *scale2;
  float limit;
  void* out;  // [tokens, d], bfloat16 or float32
  int out_is_float;
  uint8_t *images, *hidden;  // of rows: see expert_prefill_plan.cuh
  void* parts;               // [tokens * slots, d], bfloat16 or float32; `out` where there is one slot of the same type
  int parts_are_float;
  uint8_t *expanded13, *expanded2;  // weights in E4M3, or null: expanded on their way to products
  int lag;    // steps that the second warpgroup begins behind the first, fewer than stages, so that one has the tensor
              // unit while the other stores
  int steps;  // PrefillStep
};

struct PrefillSizes {
  int64_t images, hidden, parts, expanded13, expanded2;  // bytes
};
PrefillSizes prefill_sizes(int64_t tokens, int64_t slots, int64_t d, int64_t inter, int64_t experts, bool fp8,
                           bool parts_are_float);

// `tile`: tokens that are multiplied at once, 64 or 128. No bit depends on it, on `ctas`, `lag` or expanded weights.
// cudaErrorInvalidValue, before anything is written, where the sizes do not fit.
cudaError_t prefill(const PrefillParams& p, int tile, int ctas, cudaStream_t stream);

}  // namespace mega_moe::sm90
