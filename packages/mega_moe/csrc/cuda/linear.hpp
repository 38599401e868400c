// Products of few rows with FP8 weights on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mega_moe::cuda {

// out[t, g, r] = sum over k of x[t, g, k] weight[g * rows + r, k] 2^(scale - 127), for `groups` matrices side by side.
struct LinearParams {
  int64_t tokens;  // up to 65535 tiles
  int64_t groups;
  int64_t rows;           // of a group; a multiple of 32 where there are several
  int64_t columns;        // a multiple of 64
  const float* x;         // [tokens, groups, columns], 16-byte aligned
  const uint8_t* weight;  // E4M3 [groups * rows, columns], 16-byte aligned
  const uint8_t* scale;   // UE8M0 [ceil(groups * rows / 32), columns / 32]
  float* out;             // [tokens, groups, rows]
};

// terms: bfloat16 numbers that stand for one of x: 1 rounds it, 2 keep 16 bits, 3 keep all 24. cluster (CTAs that share
// the columns: 1, 2, 4, 8) and terms are part of the result's definition; warps (2, 4 or 8, of 32 rows each), tile (8,
// 16, 32, 64 tokens that are multiplied at once) and stages (4 or 8 chunks of 64 columns that a warp has on their way)
// are not. Two warps need 8 stages, a tile of 64 needs 4.
struct LinearShape {
  int terms, cluster, warps, tile, stages = 4;
};

// The cut of a launch for `terms` and `cluster`; a tile of 0: there is none.
LinearShape linear_shape(const LinearParams& params, int terms, int cluster, int64_t multiprocessors);
cudaError_t linear(const LinearParams& params, const LinearShape& shape, cudaStream_t stream);

}  // namespace mega_moe::cuda
