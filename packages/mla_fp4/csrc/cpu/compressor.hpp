// Ratio-2 pooling.
#pragma once

#include <cstdint>

#include "kernel_core/isa.hpp"

namespace mla_fp4 {

// One pair of neighbouring tokens.
struct Pair {
  const float *gate0, *kv0;  // even position
  const float *gate1, *kv1;  // odd position
};

struct PoolArgs {
  const Pair* pairs;
  float* out;  // [count, d]
  int64_t count;
  int64_t d;
};

KERNEL_CORE_DECLARE(void, pool_pairs, (const PoolArgs&))

}  // namespace mla_fp4
