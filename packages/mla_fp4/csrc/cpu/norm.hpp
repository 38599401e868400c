// RMSNorm and rotary embedding of float32 rows.
#pragma once

#include <cstdint>

#include "kernel_core/isa.hpp"

namespace mla_fp4 {

struct NormArgs {
  const float* x;       // [rows * group, d]
  const float* weight;  // [d], or null: no norm
  const float* rope;    // [rows, rope_dim]: cosines, then sines; or null: no rotation
  float* out;           // may be x
  int64_t rows;
  int64_t group;  // vectors that share one row's angles
  int64_t d;
  int64_t rope_dim;
  float eps;
  bool inverse;
};

KERNEL_CORE_DECLARE(void, norm_rope, (const NormArgs&))

}  // namespace mla_fp4
