// Cache rows on the device: norm, rotation, quantisation and the way into the pool in one pass.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/norm_rope.hpp"

namespace mla_fp4::cuda {

// The numbers of csrc/cpu/rows.hpp.
enum class RowFormat : int { main = 0, window = 1, index = 2, float32 = 3 };

struct KvRowsParams {
  const void* x;         // [rows, d], d one of 32, 64, 128, 256, 512; 16-byte aligned as are weight, rope and out
  const float* weight;   // [d], or null: no norm
  const float* rope;     // [rows, rope_dim], or null: no rotation
  const int64_t* slots;  // [rows]: row i goes to slot slots[i]; null: to slot i. Outside 0 to capacity - 1: skipped.
                         // Of two rows with one slot either stays, so callers keep slots distinct
  uint8_t* out;
  int64_t rows;
  int64_t d;
  int64_t rope_dim;        // a multiple of 16 up to d
  int64_t capacity;        // rows that `out` holds
  int64_t rows_per_block;  // 0: row-contiguous (main pool, window ring, plain rows); else index pages of that many rows
  float eps;
  RowFormat format;
  bool round_bf16;  // after the norm and after the rotation
  Dtype in;
};

cudaError_t kv_rows(const KvRowsParams& params, cudaStream_t stream);

// Finished rows to their slots, as above.
struct StoreRowsParams {
  const uint8_t* from;   // [rows, code_bytes + scale_bytes]
  const int64_t* slots;  // [rows]
  uint8_t* out;
  int64_t rows, code_bytes, scale_bytes, rows_per_block, capacity;
};

cudaError_t store_rows(const StoreRowsParams& params, cudaStream_t stream);

}  // namespace mla_fp4::cuda
