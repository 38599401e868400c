// The best positions of every row without all of its scores at once.
#pragma once

#include "index_score.hpp"

namespace mla_fp4::cuda {

struct IndexTopkParams {
  IndexScoreParams score;  // without scores, maxima, workspace and parts; fill_hidden has no effect
  int64_t k;               // a multiple of 4 where positions come in pieces
  int32_t* out;            // [rows, k] ascending positions, -1 from the first unused entry on
  void* workspace;         // 16-byte aligned
  int64_t workspace_bytes;
};

// Bytes with which index_topk needs at most `scores` bytes of scores at a time.
int64_t index_topk_workspace(int64_t rows, int64_t heads, int64_t width, int64_t k, int64_t scores);

// What index_score and topk would give, by value and then by the lower position: all at once where the workspace holds
// the scores, else by groups of rows, else by pieces of positions too.
cudaError_t index_topk(IndexTopkParams const& p, cudaStream_t stream);

}  // namespace mla_fp4::cuda
