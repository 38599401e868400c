// Sparse attention in chunks of 128 keys, the parts that are plain arithmetic and are tested on the host: which keys
// make a chunk and how partial softmaxes are merged.
//
// Chunk 0 holds the window: place i is position p - window + 1 + i. Chunk c > 0 holds places 128 (c - 1) .. 128 c - 1
// of the index list. A place without a key is a row of zeros with score -inf. Nothing here depends on other rows, so a
// row's bits do not either.
#pragma once

#include "cuda/attention_keys.cuh"

namespace mla_fp4::sm100 {

using cuda::aligned16;
using cuda::attention_fits;
using cuda::AttentionParams;
using cuda::block_of;
using cuda::BlockOf;
using cuda::exp_2;
using cuda::finish_factor;
using cuda::fma_rn;
using cuda::kDim;
using cuda::KeyRow;
using cuda::kLog2E;
using cuda::kMainRowBytes;
using cuda::kNewRow;
using cuda::kNoKey;
using cuda::kRopeDim;
using cuda::kWindowRowBytes;
using cuda::main_offset;
using cuda::minus_infinity;
using cuda::row_place;
using cuda::RowPlace;
using cuda::selected_key;
using cuda::window_key;
using cuda::window_offset;

inline constexpr int64_t kChunkKeys = 128;
constexpr int64_t chunk_count(int64_t selected) { return 1 + (selected + kChunkKeys - 1) / kChunkKeys; }

inline constexpr int kTileKeys = 64, kTiles = kChunkKeys / kTileKeys;

// --- the tile that rows become ---------------------------------------------------------------------------------------

// A tile in shared memory is eight columns of swizzled atoms, 64 bfloat16 wide (kernel_core/cuda/wgmma.cuh). A lane
// writes 16-byte pieces c = 0..7 of slices s = 0..3 of its key and half. `own` is piece 0 of slice 0: the swizzle is an
// exclusive or with bits that only c changes.
inline constexpr uint32_t kColumnBytes = kTileKeys * 128, kTileBytes = kDim / 64 * kColumnBytes;
inline constexpr int kSlices = 4;
KC_HD uint32_t tile_own(int key, int half) { return half * kSlices * kColumnBytes + key * 128 + ((key & 7) << 4); }
KC_HD uint32_t tile_piece(uint32_t own, int tile, int s, int c) {
  return (own ^ static_cast<uint32_t>(c << 4)) + tile * kTileBytes + s * kColumnBytes;
}

// --- softmax --------------------------------------------------------------------------------------------------------

// The weight of a score in a chunk whose maximum is `top` (both times log2 e). A chunk without keys has top = -inf and
// weights 0. The instruction behind exp2f without its care for subnormal results: those become 0.
KC_HD float weight(float score, float top) {
  const float x = score - (top == minus_infinity() ? 0.0f : top);
#if defined(__CUDA_ARCH__)
  float w;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(x));
  return w;
#else
  return exp_2(x);
#endif
}

// Joins what was so far with one more chunk. An empty chunk changes nothing; a NaN, having no maximum, gets factor 0
// and stays NaN.
struct Merge {
  float top, old_factor, new_factor;
};
KC_HD Merge merge_factors(float top, float chunk_top) {
  if (chunk_top == minus_infinity()) return {top, 1.0f, 0.0f};
  const float both = top > chunk_top ? top : chunk_top;
  return {both, exp_2(top - both), exp_2(chunk_top - both)};
}
KC_HD float merge_value(float old, float value, const Merge& m) {
  return fma_rn(value, m.new_factor, kernel_core::cuda::mul_rn(old, m.old_factor));
}

// --- checks ---------------------------------------------------------------------------------------------------------

// A tensor map counts the pool's rows in 31 bits.
inline bool chunks_fit(const AttentionParams& a) {
  return attention_fits(a) && a.blocks < (int64_t{1} << 31) / a.rows_per_block;
}

}  // namespace mla_fp4::sm100
