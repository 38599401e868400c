// Visits keys in order, looking into the block table once a page.
#pragma once

#include <algorithm>

#include "cpu/index_score.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

// Calls f(i, codes, scales) for keys [begin, end) of the list; scales mean nothing for float32 pages.
template <typename F>
inline void walk_keys(const ScoreArgs& a, int64_t begin, int64_t end, F&& f) {
  const KeyPages& keys = a.keys;
  for (int64_t i = begin; i < end;) {
    const int64_t position = a.positions ? a.positions[i] : a.first + i;
    const int32_t block = a.table[position / keys.rows_per_block];
    const int64_t offset = position % keys.rows_per_block;
    const int64_t run = a.positions ? 1 : std::min(end - i, keys.rows_per_block - offset);
    const uint8_t* codes = keys.codes(block, offset);
    const uint8_t* scales = keys.scales(block, offset);
    const int64_t code_step = keys.packed ? keys.dim / 2 : keys.dim * 4, scale_step = keys.dim / 32;
    for (int64_t j = 0; j < run; ++j) f(i + j, codes + j * code_step, scales + j * scale_step);
    i += run;
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
