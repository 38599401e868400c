// Which part of the matrix a CTA has, and where things lie in shared memory.
#pragma once

#include "cuda/linear.hpp"
#include "kernel_core/cuda/hd.cuh"

namespace mega_moe::cuda {

template <int Tiles_, int Warps_>
struct LinearConfig {
  static constexpr int tiles = Tiles_;  // of 8 tokens
  static constexpr int tokens = 8 * Tiles_;
  static constexpr int warps = Warps_, threads = 32 * Warps_;
  static constexpr int tile_rows = 32;  // of a warp: one block of scales
  static constexpr int rows = tile_rows * Warps_;
  static constexpr int chunk = 64;                 // columns that a warp takes at once
  static constexpr int stages = 4;                 // chunks on their way
  static constexpr int stage_bytes = 4 * 32 * 16;  // of a warp: 4 rows a lane, 16 bytes each
};

// Chunks of CTA `rank`: as even as whole chunks allow. From the columns and the cluster alone.
struct LinearSlice {
  int64_t begin, end;
};
KC_HD LinearSlice linear_slice(int64_t columns, int cluster, int rank) {
  const int64_t chunks = columns / 64;
  return {chunks * rank / cluster, chunks * (rank + 1) / cluster};
}

KC_HD int64_t linear_most_chunks(int64_t columns, int cluster) { return (columns / 64 + cluster - 1) / cluster; }

// Bytes of a token's part of x in shared memory; 16 more, so that rows do not start at the same bank.
KC_HD int64_t linear_x_stride(int64_t columns, int cluster) { return linear_most_chunks(columns, cluster) * 128 + 16; }

// Byte offsets. Sums of the CTA take the place of x once that was read.
struct LinearShared {
  int64_t ring, scales, x, bytes;
};
template <typename Config>
KC_HD LinearShared linear_shared(int64_t columns, const LinearShape& shape) {
  LinearShared s{};
  s.ring = 0;
  s.scales = s.ring + Config::warps * Config::stages * Config::stage_bytes;
  s.x = s.scales + (Config::warps * linear_most_chunks(columns, shape.cluster) * 2 + 15) / 16 * 16;
  const int64_t x_bytes = shape.terms * Config::tokens * linear_x_stride(columns, shape.cluster);
  const int64_t sum_bytes = static_cast<int64_t>(Config::tokens) * (Config::rows + 4) * 4;
  s.bytes = s.x + (x_bytes > sum_bytes ? x_bytes : sum_bytes);
  return s;
}

inline constexpr int64_t kLinearMostShared = 232448;

}  // namespace mega_moe::cuda
