// The k best of a list, exactly, ties to the lower index, in ascending order of index.
#pragma once

#include <cstdint>

#include "kernel_core/isa.hpp"

namespace mla_fp4 {

// Writes min(n, k) indices of the largest scores to `out` and returns their number. NaN ranks as -inf.
KERNEL_CORE_DECLARE(int64_t, select_top, (const float* scores, int64_t n, int64_t k, int32_t* out))

// best[i] = the largest of scores[i * block ...], `n` in all; NaN counts as -inf
KERNEL_CORE_DECLARE(void, block_maxima, (const float* scores, int64_t n, int64_t block, float* best))

}  // namespace mla_fp4
