// Sparse attention in chunks of 128 keys, the parts that are plain arithmetic and are tested on the host: which keys
// make a chunk, where a key lies, how partial softmaxes are merged.
//
// Chunk 0 holds the window: place i is position p - window + 1 + i. Chunk c > 0 holds places 128 (c - 1) .. 128 c - 1
// of the index list. A place without a key is a row of zeros with score -inf. Nothing here depends on other rows, so a
// row's bits do not either.
#pragma once

#include "cuda/attention_params.hpp"
#include "kernel_core/cuda/hd.cuh"

#if !defined(__CUDACC__)
#include <cmath>
#endif

namespace mla_fp4::sm100 {

using cuda::AttentionParams;

inline constexpr int64_t kChunkKeys = 128;
constexpr int64_t chunk_count(int64_t selected) { return 1 + (selected + kChunkKeys - 1) / kChunkKeys; }

inline constexpr int kDim = 512, kRopeDim = 64, kTileKeys = 64, kTiles = kChunkKeys / kTileKeys;
inline constexpr int kWindowRowBytes = 528, kMainRowBytes = 288;

// --- where a key lies -----------------------------------------------------------------------------------------------

// A row of the pool, of the rings counted through all slots, or (top bit) of this step's rows.
using KeyRow = uint32_t;
inline constexpr KeyRow kNoKey = 0xFFFFFFFF, kNewRow = 0x80000000;

// What the window of a row at position p needs, as places: place i stands for position p - window + 1 + i.
struct RowPlace {
  int32_t lowest;       // the first place that is seen: not before position 0 or the request's lower bound
  int32_t first_new;    // places from here on are rows of this step; below 0 if the request began before the window
  uint32_t new_row;     // this step's row of place 0, modulo 2^32
  uint32_t slot_row;    // first row of the request's ring among all rings
  uint32_t first_turn;  // the ring row of place 0
};

KC_HD RowPlace row_place(int64_t row, int64_t first_row, int64_t start, int64_t lower, int32_t slot, int64_t window,
                         int64_t ring_rows) {
  const int64_t first = start + row - first_row - window + 1, lowest = (lower > 0 ? lower : 0) - first;
  const int64_t turn = first % ring_rows;
  RowPlace p;
  p.lowest = static_cast<int32_t>(lowest < 0 ? 0 : lowest < window ? lowest : window);
  p.first_new = static_cast<int32_t>(start - first);
  p.new_row = static_cast<uint32_t>(first_row - p.first_new);
  p.slot_row = static_cast<uint32_t>(slot) * static_cast<uint32_t>(ring_rows);
  p.first_turn = static_cast<uint32_t>(turn < 0 ? turn + ring_rows : turn);
  return p;
}

KC_HD KeyRow window_key(const RowPlace& p, int32_t place, int32_t window, uint32_t ring_rows) {
  if (place < p.lowest || place >= window) return kNoKey;
  if (place >= p.first_new) return kNewRow | (p.new_row + static_cast<uint32_t>(place));
  const uint32_t turn = p.first_turn + static_cast<uint32_t>(place);  // window <= ring_rows, so it wraps once at most
  return p.slot_row + (turn >= ring_rows ? turn - ring_rows : turn);
}

// An index that no table entry or block answers selects nothing: the CPU op refuses such input, a device cannot.
KC_HD bool index_in_reach(int32_t index, uint32_t rows_per_block, uint32_t table_width) {
  return index >= 0 && static_cast<uint32_t>(index) / rows_per_block < table_width;
}

KC_HD KeyRow selected_key(int32_t index, int32_t block, uint32_t rows_per_block, uint32_t blocks) {
  if (block < 0 || static_cast<uint32_t>(block) >= blocks) return kNoKey;
  return static_cast<uint32_t>(block) * rows_per_block + static_cast<uint32_t>(index) % rows_per_block;
}

KC_HD int64_t window_offset(KeyRow row) { return static_cast<int64_t>(row & ~kNewRow) * kWindowRowBytes; }
KC_HD int64_t main_offset(KeyRow row) { return static_cast<int64_t>(row) * kMainRowBytes; }

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

KC_HD float minus_infinity() { return kernel_core::cuda::bits_float(0xFF800000); }

KC_HD float exp_2(float x) {
#if defined(__CUDACC__)
  return exp2f(x);
#else
  return std::exp2(x);
#endif
}
KC_HD float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__CUDACC__)
  return fmaf(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

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

// What the sums are multiplied by in the end: 1 / (denominator + e^sink), all relative to the maximum. `sink` times
// log2 e. No keys and an infinite sink give 0.
KC_HD float finish_factor(float top, float denominator, float sink) {
  if (top == minus_infinity() || sink == -minus_infinity()) return 0.0f;
  const float both = sink > top ? sink : top;
  const float own = exp_2(top - both);
  return kernel_core::cuda::div_rn(own, fma_rn(denominator, own, exp_2(sink - both)));
}

inline constexpr float kLog2E = 1.4426950408889634f;

// --- checks ---------------------------------------------------------------------------------------------------------

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

inline bool attention_fits(const AttentionParams& a) {
  constexpr int64_t kMany = int64_t{1} << 31;
  const bool sizes = a.rows >= 0 && a.rows < kMany && a.heads > 0 && a.batch >= (a.rows > 0) && a.window > 0 &&
                     a.window <= kChunkKeys && a.ring_rows >= a.window && a.slots > 0 &&
                     a.slots < kMany / a.ring_rows && a.selected >= 0 && a.selected < 1 << 20 && a.rows_per_block > 0 &&
                     a.rows_per_block < kMany && a.blocks >= 0 && a.blocks < kMany / a.rows_per_block &&
                     a.table_width >= 0 && a.table_width < kMany && a.rows * a.heads < kMany / 2;
  const bool places =
      aligned16(a.q) && aligned16(a.out) && aligned16(a.new_rows) && aligned16(a.ring) && aligned16(a.pages);
  const bool there =
      a.rows == 0 || (a.q && a.out && a.cu_seqlens && a.start_pos && a.new_rows && a.ring && a.ring_slot && a.lower &&
                      a.sink && a.rope && (a.selected == 0 || (a.indices && a.block_table)));
  return sizes && places && there;
}

}  // namespace mla_fp4::sm100
