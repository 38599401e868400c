// What every index_score checks of its arguments before it launches anything.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/index_score.hpp"

namespace mla_fp4::cuda {

constexpr bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

inline bool index_score_fits(IndexScoreParams const& p) {
  if (p.rows < 0 || p.rows > std::numeric_limits<int32_t>::max() || p.batch < 0 || p.width < 0 || p.width > 1 << 30) {
    return false;
  }
  if (p.heads < 1 || p.heads > kIndexLargestHeads || p.longest_request < 0 || p.table_width < 0) return false;
  if (!is_power_of_two(p.rows_per_block) || p.rows_per_block < 16 || p.rows_per_block > 1 << 16 || p.blocks < 0) {
    return false;
  }
  if (p.first_row < 0 || p.first_position < 0 || p.first_position % 64 != 0 || (p.candidates && p.first_position)) {
    return false;
  }
  if (p.rows == 0 || p.batch == 0 || p.width <= p.first_position) return true;
  const int64_t positions = p.width - p.first_position;
  const auto aligned = [](const void* at, uintptr_t to) { return at && reinterpret_cast<uintptr_t>(at) % to == 0; };
  if (!aligned(p.q, 16) || !p.weights || !aligned(p.pages, 16) || !p.block_table || !p.cu_seqlens || !p.visible ||
      !aligned(p.workspace, 16) || (!p.scores && !p.maxima) || (p.scores && p.stride < positions)) {
    return false;
  }
  if (p.maxima && (p.candidates || p.maxima_stride < (positions + kIndexMaximaBlock - 1) / kIndexMaximaBlock))
    return false;
  return !p.candidates || (is_power_of_two(p.candidate_block) && p.candidates_width > 0 &&
                           p.width <= p.candidates_width * p.candidate_block);
}

}  // namespace mla_fp4::cuda
