// Cache rows: norm, rotation and quantisation in one pass, and their way into pages.
#pragma once

#include <cstdint>

#include "kernel_core/isa.hpp"

namespace mla_fp4 {

enum class RowFormat : int { main = 0, window = 1, index = 2, float32 = 3 };

struct RowArgs {
  const float* x;       // [rows, d]
  const float* weight;  // [d], or null: no norm
  const float* rope;    // [rows, rope_dim], or null: no rotation
  uint8_t* out;         // [rows, row_bytes]
  int64_t rows;
  int64_t d;
  int64_t rope_dim;
  int64_t row_bytes;
  float eps;
  RowFormat format;
  bool round_bf16;
};

KERNEL_CORE_DECLARE(void, kv_rows, (const RowArgs&))

}  // namespace mla_fp4
