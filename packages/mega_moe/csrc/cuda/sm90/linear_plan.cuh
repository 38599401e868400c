// Which part of the matrix a CTA has, and where things lie in shared memory.
#pragma once

#include "cuda/linear.hpp"
#include "kernel_core/cuda/hd.cuh"

namespace mega_moe::cuda {

template <int Tiles_, int Warps_, int Stages_ = 4>
struct LinearConfig {
  static constexpr int tiles = Tiles_;  // of 8 tokens
  static constexpr int tokens = 8 * Tiles_;
  static constexpr int warps = Warps_, threads = 32 * Warps_;
  static constexpr int together = Warps_ == 8 && Tiles_ <= 2 ? 2 : 1;  // CTAs of a multiprocessor, at least
  static constexpr int tile_rows = 32;                                 // of a warp: one block of scales
  static constexpr int rows = tile_rows * Warps_;
  static constexpr int chunk = 64;                 // columns that a warp takes at once
  static constexpr int stages = Stages_;           // chunks on their way
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

// Tokens of a tile that shared memory holds: where there are fewer than 8, one of zeros stands for all that are
// missing.
KC_HD int linear_held(int tile, int64_t tokens) {
  return tile == 8 && tokens < 8 ? static_cast<int>(tokens) + 1 : tile;
}

// Byte offsets. Sums of the CTA take the place of x once that was read.
struct LinearShared {
  int64_t ring, scales, x, bytes;
};
KC_HD LinearShared linear_shared(int64_t tokens, int64_t columns, const LinearShape& shape) {
  LinearShared s{};
  s.ring = 0;
  s.scales = s.ring + shape.warps * shape.stages * 2048;
  s.x = s.scales + (shape.warps * linear_most_chunks(columns, shape.cluster) * 2 + 15) / 16 * 16;
  const int64_t x_bytes = shape.terms * linear_held(shape.tile, tokens) * linear_x_stride(columns, shape.cluster);
  const int64_t sum_bytes = static_cast<int64_t>(shape.tile) * (shape.warps * 32 + 4) * 4;
  s.bytes = s.x + (x_bytes > sum_bytes ? x_bytes : sum_bytes);
  return s;
}

inline constexpr int64_t kLinearMostShared = 232448;

// All but the pointers.
KC_HD bool linear_fits(const LinearParams& a, const LinearShape& shape) {
  if (a.tokens < 0 || a.groups < 1 || a.rows < 0 || a.columns < 64 || a.columns % 64) return false;
  if (a.groups > 1 && a.rows % 32) return false;
  if (shape.terms < 1 || shape.terms > 3) return false;
  if (shape.cluster != 1 && shape.cluster != 2 && shape.cluster != 4 && shape.cluster != 8) return false;
  if (shape.tile != 8 && shape.tile != 16 && shape.tile != 32 && shape.tile != 64) return false;
  if (shape.stages == 4 ? shape.warps == 2 : shape.stages != 8 || shape.tile == 64) return false;
  if (shape.warps != 2 && shape.warps != 4 && shape.warps != 8) return false;
  return linear_shared(a.tokens, a.columns, shape).bytes <= kLinearMostShared;
}

KC_HD int64_t linear_ctas(const LinearParams& a, const LinearShape& shape) {
  const int rows = 32 * shape.warps;
  return (a.rows + rows - 1) / rows * a.groups * shape.cluster * ((a.tokens + shape.tile - 1) / shape.tile);
}

// Few tokens: small CTAs, all of whose weights are on their way from the start. More tokens: wide CTAs, since each one
// reads and splits x for itself. Eight stages unless fewer of such CTAs can stand on a multiprocessor than there are.
KC_HD LinearShape linear_choose(const LinearParams& a, int terms, int cluster, int64_t multiprocessors) {
  LinearShape shape{terms, cluster, a.tokens <= 8 ? 4 : 8, a.tokens <= 8 ? 8 : a.tokens <= 16 ? 16 : 32, 4};
  while (shape.tile > 8 && !linear_fits(a, shape)) shape.tile /= 2;
  if (!linear_fits(a, shape)) shape.warps = 4;
  while (shape.tile > 16 && linear_ctas(a, shape) < multiprocessors) shape.tile /= 2;
  LinearShape deep = shape;
  deep.stages = 8;
  if (linear_ctas(a, deep) < multiprocessors) deep.warps /= 2;
  const auto together = [&](const LinearShape& s) {
    return multiprocessors * (kLinearMostShared / (linear_shared(a.tokens, a.columns, s).bytes + 1024));
  };
  const bool all = together(deep) >= linear_ctas(a, deep) || together(deep) >= together(shape);
  if (linear_fits(a, deep) && all) return deep;
  if (!linear_fits(a, shape)) shape.tile = 0;
  return shape;
}

}  // namespace mega_moe::cuda
