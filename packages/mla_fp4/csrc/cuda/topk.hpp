// The k best entries of rows of scores on the GPU: docs/model.md, Indexer and Candidate blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla_fp4::cuda {

inline constexpr int64_t kTopkLargestK = 2048;
inline constexpr int64_t kTopkLargestWidth = 1 << 20;

struct TopkParams {
  const float* scores;  // [rows, stride], 16-byte aligned, stride a multiple of 4
  int64_t stride;
  const int32_t* lengths;  // [rows]: only the first lengths[row] entries count. Clamped to 0 ... width
  int64_t rows;
  int64_t width;  // no row is longer: sizes the launch
  int64_t k;
  int32_t* out;  // [rows, k] ascending, -1 from the first unused entry on

  // Scores of candidate blocks, gathered next to each other: entry i stands for position
  // blocks[row, i / block] * block + i % block, `out` holds positions, and lengths[row] is the number of visible
  // positions instead. Null: entry i is position i.
  const int32_t* blocks;  // [rows, blocks_width] ascending, -1 from the first unused entry on
  int64_t blocks_width;
  int64_t block;

  // The last entry of a row is always among its k, whatever its score: the newest candidate block.
  bool keep_last;

  // A long row can be shared by several thread blocks: topk_workspace(p) bytes, 16-byte aligned, or null for one.
  void* workspace;
  int64_t slices;  // from topk_slices(), 1 without a workspace. It never changes the result

  // A row that comes in pieces: scores[row, k + i] is position piece_begin + i, up to width - 1. After each piece `out`
  // holds the k best so far and scores[row, 0 ... k) their scores, from where the next piece takes them. Pieces are no
  // shorter than k; the first begins at 0. Without candidate blocks, keep_last and slices. -1: rows are whole.
  int64_t piece_begin = -1;
};

// How many thread blocks should share a row on a device of `multiprocessors`.
int64_t topk_slices(int64_t rows, int64_t width, int64_t k, int64_t multiprocessors);
int64_t topk_workspace(int64_t rows, int64_t k, int64_t slices);  // bytes

cudaError_t topk(TopkParams const& p, cudaStream_t stream);

}  // namespace mla_fp4::cuda
