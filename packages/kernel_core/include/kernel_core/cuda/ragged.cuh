// The ragged batch on the device: request b owns rows cu_seqlens[b] to cu_seqlens[b + 1] - 1, the first of them at
// position start_pos[b]. Values live in device memory and cannot be checked before a launch, so every function here
// stays within its arrays whatever they hold.
#pragma once

#include "kernel_core/cuda/hd.cuh"

namespace kernel_core::cuda {

// The request that owns `row`, or `batch` if none does. Empty requests own nothing.
KC_HD int64_t request_of_row(const int32_t* cu_seqlens, int64_t batch, int64_t row) {
  int64_t low = 0, high = batch;  // the first b with cu_seqlens[b + 1] > row
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle + 1] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// A row's place in the batch; request == batch where it has none.
struct BatchRow {
  int64_t request, first;  // and the request's first row
  int64_t position, end;   // and the position after the request's last row
};

KC_HD BatchRow locate_row(const int32_t* cu_seqlens, const int64_t* start_pos, int64_t batch, int64_t row) {
  const int64_t b = request_of_row(cu_seqlens, batch, row);
  if (b >= batch) return {batch, 0, 0, 0};
  const int64_t first = cu_seqlens[b], start = start_pos[b];
  return {b, first, start + row - first, start + cu_seqlens[b + 1] - first};
}

// Whether a step's row at `position` goes into a ring of `ring` rows: of those from `floor` on, the last `ring` stay.
KC_HD bool ring_keeps(int64_t position, int64_t end, int64_t ring, int64_t floor) {
  return position >= floor && position >= end - ring;
}

inline constexpr int64_t kMaxRing = 65536;          // rows of a ring
inline constexpr int64_t kMaxSlots = 0xFFFFFFFFll;  // rows of a pool

// position mod ring for position >= 0 and ring up to kMaxRing. The device has no 64-bit division: it would be a call
// and a stack frame, so this divides by 16 bits at a time where 32 do not suffice.
KC_HD uint32_t ring_offset(int64_t position, int64_t ring) {
  const auto divisor = static_cast<uint32_t>(ring);
  const auto bits = static_cast<uint64_t>(position);
  if (bits >> 32 == 0) return static_cast<uint32_t>(bits) % divisor;
  uint32_t rest = 0;
  for (int shift = 48; shift >= 0; shift -= 16)
    rest = (rest << 16 | static_cast<uint32_t>(bits >> shift & 0xFFFF)) % divisor;
  return rest;
}

KC_HD int64_t ring_row(int64_t slot, int64_t position, int64_t ring) {
  return slot * ring + ring_offset(position, ring);
}

// Pairs (2j, 2j + 1) that a request completes with rows at positions start to end - 1.
KC_HD int64_t pairs_completed(int64_t start, int64_t end) { return end / 2 - start / 2; }

// Where a row's codes and scales lie, in bytes from the start of the pool. `rows_per_block` 0: row-contiguous, codes
// then scales. Otherwise a page holds the codes of all its rows, then their scales. Slots are below kMaxSlots.
struct RowPlace {
  int64_t codes, scales;
};

KC_HD RowPlace row_place(int64_t slot, int64_t code_bytes, int64_t scale_bytes, int64_t rows_per_block) {
  const int64_t row_bytes = code_bytes + scale_bytes;
  if (rows_per_block == 0) return {slot * row_bytes, slot * row_bytes + code_bytes};
  const auto rows = static_cast<uint32_t>(rows_per_block);
  const uint32_t block = static_cast<uint32_t>(slot) / rows, offset = static_cast<uint32_t>(slot) % rows;
  const int64_t page = static_cast<int64_t>(block) * rows_per_block * row_bytes;
  return {page + offset * code_bytes, page + rows_per_block * code_bytes + offset * scale_bytes};
}

}  // namespace kernel_core::cuda
