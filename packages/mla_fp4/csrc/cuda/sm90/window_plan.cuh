// Window prefill, the parts that are plain arithmetic and are tested on the host: which rows a CTA takes, which slots
// of its key ring a row sees, and where values lie in shared memory.
#pragma once

#include "cuda/sm90/attention_tiles.cuh"
#include "cuda/window_params.hpp"
#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/ragged.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace mla_fp4::cuda::window {

// --- runs -----------------------------------------------------------------------------------------------------------

// Consecutive rows of one request.
struct Run {
  int32_t request, first, rows;  // first row, counted through the batch; no rows: nothing to do
};

// Items are numbered so that a request's first item needs no sum over the requests before it: those have at most this
// many runs. Numbers that are left over have no rows.
KC_HD int64_t run_items(int64_t rows, int64_t batch, int64_t run_rows) { return rows / run_rows + batch; }
KC_HD uint32_t first_item(uint32_t first_row, uint32_t request, uint32_t run_rows) {
  return first_row / run_rows + request;
}

// Run `index` of a request, all of nearly the same length.
KC_HD Run run_at(uint32_t request, uint32_t first_row, uint32_t rows, uint32_t index, uint32_t run_rows) {
  const uint32_t runs = (rows + run_rows - 1) / run_rows;
  Run run = {static_cast<int32_t>(request), static_cast<int32_t>(first_row), 0};
  if (index >= runs) return run;
  const uint32_t size = rows / runs, longer = rows % runs;
  run.first += static_cast<int32_t>(index * size + (index < longer ? index : longer));
  run.rows = static_cast<int32_t>(size + (index < longer));
  return run;
}

// --- the key ring ---------------------------------------------------------------------------------------------------

// Position p lies in slot p mod 144: a window and 16 rows more, so that the next rows' keys can come while earlier rows
// are at work. The products take all slots; scores of those that a row does not see are -inf.
inline constexpr int kSlots = 144, kMaxWindow = 128, kAhead = 8;
static_assert(kAhead <= kSlots - kMaxWindow + 1, "a slot is overwritten when its last reader has finished");

KC_HD int slot_age(int own_slot, int slot) { return own_slot - slot + (slot > own_slot ? kSlots : 0); }
KC_HD int slot_after(int slot, int steps) { return slot + steps < kSlots ? slot + steps : slot + steps - kSlots; }

// How many ages, from 0 on, a row sees: `known` positions from the lowest that its run's first row may see to that row,
// itself included, and `index` more since.
KC_HD int seen_ages(int32_t known, int index, int window) {
  const int n = known + index;
  return n < 0 ? 0 : n < window ? n : window;
}
KC_HD int32_t known_positions(int64_t position, int64_t lower) {
  constexpr int64_t kMany = 1 << 29;
  const int64_t n = position - (lower > 0 ? lower : 0) + 1;
  return static_cast<int32_t>(n > kMany ? kMany : n < -kMany ? -kMany : n);
}

// Weight 0 times infinity or NaN is NaN, so such a row may be in the ring only while every row at work sees it. Scale
// bytes below 240 give neither.
KC_HD bool word_is_wild(uint32_t w) { return (w & w << 1 & w << 2 & w << 3 & 0x80808080u) != 0; }

// --- shared memory --------------------------------------------------------------------------------------------------

// Keys: eight columns of swizzled atoms, 64 bfloat16 wide. Queries: eight slices of 64 heads in the same form.
inline constexpr uint32_t kKeyColumn = kSlots * 128, kRingBytes = 8 * kKeyColumn;
inline constexpr uint32_t kSliceBytes = 64 * 128, kQueryBytes = 8 * kSliceBytes;

// Within 32 columns the ring has them in another order: place 8 j + 2 c + b holds column 8 c + 2 j + b. Thread c of
// four holds places 8 j + 2 c + b of a fragment, so 16 contiguous bytes of a query make its fragments of two products,
// and its results are 16 contiguous bytes of the output.
KC_HD int place_column(int place) { return place / 32 * 32 + place % 8 / 2 * 8 + place % 32 / 8 * 2 + place % 2; }

// A unit of a stored row is 16 columns: two words of each of four pieces. Where those of piece j go in the ring.
KC_HD uint32_t unit_target(int slot, int unit, int j) {
  const uint32_t piece = unit / 2 % 2 * 4 + j;
  return unit / 4 * kKeyColumn + slot * 128 + ((piece ^ (slot & 7)) << 4) + unit % 2 * 8;
}

// Decodes a unit; store(j, word, word) takes what goes to unit_target(slot, unit, j).
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename Store>
KC_HD void decode_unit(const uint32_t (&raw)[4], uint32_t scale_byte, const Store& store) {
  const kernel_core::cuda::Mxfp8Scale scale = kernel_core::cuda::mxfp8_scale(scale_byte);
  uint32_t out[8];  // pair i: columns 2 i, 2 i + 1
  for (int w = 0; w < 4; ++w) {
    uint32_t pairs[2];
    kernel_core::cuda::e4m3x4_scaled(raw[w], scale, pairs);
    out[2 * w] = pairs[0], out[2 * w + 1] = pairs[1];
  }
  for (int j = 0; j < 4; ++j) store(j, out[j], out[4 + j]);
}

// The head that row m of a product stands for: of eight lanes that read 16 bytes each, four rows apart are those of
// neighbouring m, so that the swizzle sends them to different banks.
KC_HD int head_of(int m) { return (m & ~7) | (m & 1) << 2 | (m >> 1 & 3); }

// Where thread c of four finds 16 bytes of a head: columns 8 c to 8 c + 7 of half `g` of a slice.
KC_HD uint32_t fragment_source(int head, int c, int g) { return head * 128 + ((c ^ (head & 7)) << 4 ^ g << 6); }

// --- softmax --------------------------------------------------------------------------------------------------------

// Of a score that is already times log2 e.
KC_HD float weight(float score, float top) { return cuda::weight(score, 1.0f, top); }

// --- checks ---------------------------------------------------------------------------------------------------------

inline bool window_fits(const WindowParams& a) {
  constexpr int64_t kMany = int64_t{1} << 31;
  const bool sizes = a.rows >= 0 && a.rows < kMany && a.heads > 0 && a.heads % 64 == 0 && a.heads < 1 << 16 &&
                     a.batch >= (a.rows > 0) && a.batch < kMany && a.window > 0 && a.window <= kMaxWindow &&
                     a.ring_rows >= a.window && a.ring_rows <= kernel_core::cuda::kMaxRing && a.slots > 0 &&
                     a.slots < kMany / a.ring_rows && a.run_rows > 0 && a.run_rows < kMany;
  if (!sizes || run_items(a.rows, a.batch, a.run_rows) >= kMany / (a.heads / 64)) return false;
  const bool places =
      aligned16(a.q) && aligned16(a.out) && aligned16(a.new_rows) && aligned16(a.ring) && aligned16(a.rope);
  return places && (a.rows == 0 || (a.q && a.out && a.cu_seqlens && a.start_pos && a.new_rows && a.ring &&
                                    a.ring_slot && a.lower && a.sink && a.rope));
}

}  // namespace mla_fp4::cuda::window
