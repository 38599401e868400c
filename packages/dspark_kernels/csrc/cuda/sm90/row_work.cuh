// The rows of an op, and what its launches leave for each other about them.
#pragma once

#include "cuda/sm90/row_blocks.cuh"

namespace dspark_kernels::cuda {

constexpr int kFilterBins = 2048;

// Of a row. The counts are set to 0 by the first launch.
struct RowWork {
  int32_t measured, counted, cut, redrawn;  // parts that are done
  int32_t band, bin;                        // tokens in the bin where the row is cut, and that bin
  uint32_t highest, lowest;                 // the ordered bits of the largest in it, and the inverse of the smallest's
  int64_t outside;                          // tokens above it, where they are limited
};

// Row r, or rows cu_rows[r] to cu_rows[r + 1] - 1 of request r.
struct Rows {
  float* logits = nullptr;
  int64_t row_stride = 0;
  const float* bias = nullptr;  // added in place; or null
  int64_t vocab = 0;
  const float *temperature = nullptr, *top_p = nullptr;
  const int32_t* top_k = nullptr;    // or null
  const int32_t* cu_rows = nullptr;  // or null
  BlockStats* stats = nullptr;       // [rows, blocks]
  RowWork* work = nullptr;           // [rows]
  // Of filtered rows: mass and number of tokens in each bin, and the tokens of one bin
  unsigned long long* bin_mass = nullptr;  // [rows, kFilterBins]
  int32_t* bin_count = nullptr;            // [rows, kFilterBins]; then tokens of each block in that bin
  uint64_t* band = nullptr;                // [rows, kBand]

  // -1 where the request has no such row
  KC_HD int64_t index(int64_t request, int place) const {
    if (!cu_rows) return request;
    const int64_t at = cu_rows[request] + place;
    return at < cu_rows[request + 1] ? at : -1;
  }
};

KC_HD int64_t row_blocks(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }

}  // namespace dspark_kernels::cuda
