// Sparse attention, what kernels of every architecture share and hosts test: where a key of a row lies, the arithmetic
// around the softmax, and the checks of a launch.
#pragma once

#include "cuda/attention_params.hpp"
#include "kernel_core/cuda/hd.cuh"
#include "kernel_core/cuda/ragged.cuh"

#if !defined(__CUDACC__)
#include <cmath>
#endif

namespace mla_fp4::cuda {

inline constexpr int kDim = 512, kRopeDim = 64, kLargestWindow = 128;
inline constexpr int kLargestRing = 65536;  // up to here ring_offset takes every position of 64 bits
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
  RowPlace p;
  p.lowest = static_cast<int32_t>(lowest < 0 ? 0 : lowest < window ? lowest : window);
  p.first_new = static_cast<int32_t>(start - first);
  p.new_row = static_cast<uint32_t>(first_row - p.first_new);
  p.slot_row = static_cast<uint32_t>(slot) * static_cast<uint32_t>(ring_rows);
  p.first_turn = kernel_core::cuda::ring_offset(first < 0 ? first + ring_rows : first, ring_rows);
  return p;
}

KC_HD KeyRow window_key(const RowPlace& p, int32_t place, int32_t window, uint32_t ring_rows) {
  if (place < p.lowest || place >= window) return kNoKey;
  if (place >= p.first_new) return kNewRow | (p.new_row + static_cast<uint32_t>(place));
  const uint32_t turn = p.first_turn + static_cast<uint32_t>(place);  // window <= ring_rows, so it wraps once at most
  return p.slot_row + (turn >= ring_rows ? turn - ring_rows : turn);
}

// An index that no table entry or block answers selects nothing: the CPU op refuses such input, a device cannot.
struct BlockOf {
  bool reached;
  uint32_t slot, offset;  // of the table, in the block
};
KC_HD BlockOf block_of(int32_t index, const AttentionParams& a) {
  const uint32_t i = static_cast<uint32_t>(index), size = static_cast<uint32_t>(a.rows_per_block);
  const bool power = (size & (size - 1)) == 0;  // a division is many instructions
  const int shift = kernel_core::cuda::floor_log2(size);
  const uint32_t slot = power ? i >> shift : i / size;
  return {index >= 0 && slot < static_cast<uint32_t>(a.table_width), slot, power ? i & (size - 1) : i - slot * size};
}

KC_HD KeyRow selected_key(int32_t block, uint32_t offset, const AttentionParams& a) {
  if (block < 0 || static_cast<uint32_t>(block) >= static_cast<uint32_t>(a.blocks)) return kNoKey;
  return static_cast<uint32_t>(block) * static_cast<uint32_t>(a.rows_per_block) + offset;
}

KC_HD int64_t window_offset(KeyRow row) { return static_cast<int64_t>(row & ~kNewRow) * kWindowRowBytes; }
KC_HD int64_t main_offset(KeyRow row) { return static_cast<int64_t>(row) * kMainRowBytes; }

// --- around the softmax
// --------------------------------------------------------------------------------------------------------

inline constexpr float kLog2E = 1.4426950408889634f;

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

// What the sums are multiplied by in the end: 1 / (denominator + e^sink), all relative to the reference. `sink` times
// log2 e. No keys and an infinite sink give 0.
KC_HD float finish_factor(float reference, float denominator, float sink) {
  if (reference == minus_infinity() || sink == -minus_infinity()) return 0.0f;
  const float both = sink > reference ? sink : reference;
  const float own = exp_2(reference - both);
  return kernel_core::cuda::div_rn(own, fma_rn(denominator, own, exp_2(sink - both)));
}

// --- checks ---------------------------------------------------------------------------------------------------------

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

inline bool attention_fits(const AttentionParams& a) {
  constexpr int64_t kMany = int64_t{1} << 31;
  const bool sizes = a.rows >= 0 && a.rows < kMany && a.heads > 0 && a.batch >= (a.rows > 0) && a.window > 0 &&
                     a.window <= kLargestWindow && a.ring_rows >= a.window && a.ring_rows <= kLargestRing &&
                     a.slots > 0 && a.slots < kMany / a.ring_rows && a.selected >= 0 && a.selected < 1 << 20 &&
                     a.rows_per_block > 0 && a.rows_per_block < kMany && a.blocks >= 0 &&
                     a.blocks < 2 * kMany / a.rows_per_block && a.table_width >= 0 && a.table_width < kMany &&
                     a.rows * a.heads < kMany / 2 && a.scale > 0;
  const bool places = aligned16(a.q) && aligned16(a.out) && aligned16(a.new_rows) && aligned16(a.ring) &&
                      aligned16(a.pages) && aligned16(a.rope);
  const bool there =
      a.rows == 0 || (a.q && a.out && a.cu_seqlens && a.start_pos && a.new_rows && a.ring && a.ring_slot && a.lower &&
                      a.sink && a.rope && (a.selected == 0 || (a.indices && a.block_table)));
  return sizes && places && there;
}

}  // namespace mla_fp4::cuda
