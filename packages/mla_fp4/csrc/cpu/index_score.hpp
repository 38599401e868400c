// Index scores: sum over heads of weight * relu(query . key), for rows of one request against some of its keys.
//
// Two implementations with one interface: float32 vectors at every instruction set, and AMX-BF16 for packed keys.
// In both a score depends on its query and its key alone, never on the tile that it was computed in.
#pragma once

#include <cstdint>

#include "kernel_core/isa.hpp"

namespace mla_fp4 {

// Where the keys are. A packed page holds the codes of all its rows, then their scales; a float32 page holds rows.
struct KeyPages {
  const uint8_t* base;
  int64_t rows_per_block;
  int64_t dim;
  bool packed;

  int64_t row_bytes() const { return packed ? dim / 2 + dim / 32 : dim * 4; }
  const uint8_t* page(int32_t block) const { return base + block * rows_per_block * row_bytes(); }
  const uint8_t* codes(int32_t block, int64_t offset) const {
    return page(block) + offset * (packed ? dim / 2 : dim * 4);
  }
  const uint8_t* scales(int32_t block, int64_t offset) const {
    return page(block) + rows_per_block * (dim / 2) + offset * (dim / 32);
  }
};

// Queries of `rows` neighbouring rows into the form that the kernel reads.
struct PackArgs {
  const float* q;        // [rows, heads, dim]
  const float* weights;  // [rows, heads]
  int64_t rows;
  int64_t heads;
  int64_t dim;
  bool quantize;  // to MXFP4 and back, the rule of packed keys
  void* packed;
  float* packed_weights;
};

struct ScoreArgs {
  const void* packed;
  const float* packed_weights;
  int64_t rows;
  int64_t heads;
  KeyPages keys;
  const int32_t* table;      // block table of the request
  const int32_t* positions;  // the keys to score, or null: first, first + 1, ...
  int64_t first;
  int64_t count;
  float* out;  // out[row * stride + i] is the score of key i
  int64_t stride;
};

struct PackedSize {
  int64_t bytes;    // of queries
  int64_t weights;  // floats
};

KERNEL_CORE_DECLARE(PackedSize, packed_size, (int64_t rows, int64_t heads, int64_t dim))
KERNEL_CORE_DECLARE(void, pack_queries, (const PackArgs&))
KERNEL_CORE_DECLARE(void, score_keys, (const ScoreArgs&))

namespace amx {
PackedSize packed_size(int64_t rows, int64_t heads, int64_t dim);
void pack_queries(const PackArgs&);
void score_keys(const ScoreArgs&);
constexpr int64_t kMaxHeads = 32;
}  // namespace amx

}  // namespace mla_fp4
