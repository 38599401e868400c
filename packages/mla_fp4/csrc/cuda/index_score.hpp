// Index scores on the GPU: docs/model.md, Indexer and Candidate blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla_fp4::cuda {

inline constexpr int64_t kIndexDim = 128;
inline constexpr int64_t kIndexLargestHeads = 64;
inline constexpr int64_t kIndexMaximaBlock = 8;  // positions of an entry of `maxima`

struct IndexScoreParams {
  const void* q;         // [rows, heads, 128], rotated, float32 or bfloat16: quantised here by the rule of the keys
  const float* weights;  // [rows, heads]
  bool q_is_bf16;
  int64_t rows;
  int64_t heads;  // 1 to 64

  const uint8_t* pages;    // [blocks, rows_per_block * 68], 16-byte aligned: the codes of all rows, then their scales
  int64_t blocks;          // a table entry outside of them reads as zeros
  int64_t rows_per_block;  // a power of two, at least 16
  const int32_t* block_table;  // [batch, table_width]
  int64_t table_width;
  const int32_t* cu_seqlens;  // [batch + 1]
  int64_t batch;
  const int32_t* visible;   // [rows]
  int64_t longest_request;  // no request has more rows
  int64_t width;            // no row sees more positions; with candidates, no row has more entries

  // Only these blocks of positions are scored, next to each other: entry i stands for position
  // candidates[row, i / candidate_block] * candidate_block + i % candidate_block.
  const int32_t* candidates;  // [rows, candidates_width] ascending, -1 from the first unused entry on; or null
  int64_t candidates_width;
  int64_t candidate_block;  // a power of two

  float* scores =
      nullptr;  // [rows, stride]: what a row does not see is not written, or -inf with fill_hidden; null: not wanted
  int64_t stride = 0;
  bool fill_hidden = false;
  // The largest visible score of each 8 positions, NaN as -inf: [rows, maxima_stride], or null. Not with candidates.
  float* maxima = nullptr;
  int64_t maxima_stride = 0;

  void* workspace = nullptr;  // index_score_workspace(rows, heads) bytes, 16-byte aligned

  // A part of the problem: rows first_row to end_row - 1, and positions (not with candidates) from first_position on, a
  // multiple of 128. `scores` and `maxima` then begin with the first of both.
  int64_t first_row = 0, end_row = INT64_MAX, first_position = 0;
  int variant = 0;      // of the launch, for measurements; never changes a score
  bool packed = false;  // an earlier call has left the queries of all rows in the workspace
};

int64_t index_score_workspace(int64_t rows, int64_t heads);

cudaError_t index_score(IndexScoreParams const& p, cudaStream_t stream);

}  // namespace mla_fp4::cuda
