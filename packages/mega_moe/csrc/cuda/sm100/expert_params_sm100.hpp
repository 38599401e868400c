// Arguments of the SM100 expert kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mega_moe::sm100 {

struct ExpertsParams {
  const void* x;  // [tokens, d], bfloat16 or float32
  int x_is_float;
  int tokens, slots, d, inter, experts;
  const int32_t* ids;                 // [tokens, slots]; outside of [0, experts): an empty slot
  const float* weights;               // [tokens, slots]
  const int32_t* offsets;             // [experts + 1], one more with a shared expert: prefix sums of rows by expert
  const int32_t* rows;                // position to token * slots + slot; of the shared expert: tokens * slots + token
  const uint8_t *w13, *w2;            // E2M1 pairs as stored, [experts, 2 inter, d / 2] and [experts, d, inter / 2]
  const uint8_t *shared13, *shared2;  // E4M3 as stored, [2 inter, d] and [d, inter], or null
  const uint8_t *scale13, *scale2;    // in the order of expert_plan_sm100.cuh; the shared expert's behind the others'
  float limit;
  void* out;  // [tokens, d], bfloat16 or float32
  int out_is_float;
  uint8_t *images, *hidden;  // of x, and of the first product's result
  float* parts;              // [tokens * slots, d], with a shared expert then [tokens, d]
};

struct ExpertsSizes {
  int64_t images, hidden, parts;  // bytes
};

// Token tile and CTAs that work together: (16, 1), (64, 1), (64, 2) or (96, 2).
bool experts_shape(int tile, int ctas, int64_t d, int64_t inter);

ExpertsSizes experts_sizes(int64_t tokens, int64_t slots, int64_t d, int64_t inter, int64_t experts, bool shared,
                           int tile);

// Four launches: rows to images, first product, second product, sum over slots. `grid`: CTAs of a product's launch.
// cudaErrorInvalidValue, before anything is written, where the sizes do not fit.
cudaError_t experts(const ExpertsParams& p, int tile, int ctas, int grid, cudaStream_t stream);

}  // namespace mega_moe::sm100
