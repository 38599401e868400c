// Index scoring and selection of a ragged batch.
#pragma once

#include "cpu/index_score.hpp"

namespace mla_fp4 {

struct IndexArgs {
  const float* q;        // [rows, heads, dim]
  const float* weights;  // [rows, heads]
  KeyPages keys;
  int64_t blocks;        // pages there are
  const int32_t* table;  // [batch, table_width]
  int64_t table_width;
  const int32_t* cu_seqlens;  // [batch + 1]
  const int32_t* visible;     // [rows]
  int64_t batch;
  int64_t rows;
  int64_t heads;
};

struct CandidateArgs {
  const int32_t* blocks;  // [rows, width] ascending, -1 at the end
  int64_t width;          // -1: no restriction, every visible position is scored
  int64_t block;          // positions in a candidate block

  bool given() const { return width >= 0; }
};

// out [rows, k] and, with publish > 0, published [rows, publish]
void index_topk(const IndexArgs& a, const CandidateArgs& candidates, int64_t k, int32_t* out, int64_t publish,
                int32_t* published);

// out [rows, width], -inf beyond a row's visible positions
void index_scores(const IndexArgs& a, float* out, int64_t width);

}  // namespace mla_fp4
