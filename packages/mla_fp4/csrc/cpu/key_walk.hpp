// Visits keys in order, looking into the block table once a page.
#pragma once

#include <algorithm>

#include "cpu/index_score.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

// Keys next to each other in a page; scales mean nothing for float32 pages.
struct KeyRun {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t count;
};

// Keys [begin, end) of a list, run by run.
class KeyWalk {
 public:
  KeyWalk(const ScoreArgs& a, int64_t begin, int64_t end) : a_(&a), at_(begin), end_(end) {}

  // At most `most` keys; none at the end
  KeyRun next(int64_t most) {
    if (left_ == 0 && !enter_page()) return {nullptr, nullptr, 0};
    const KeyRun run{codes_, scales_, std::min(most, left_)};
    codes_ += run.count * (a_->keys.packed ? a_->keys.dim / 2 : a_->keys.dim * 4);
    scales_ += run.count * (a_->keys.dim / 32);
    left_ -= run.count;
    at_ += run.count;
    return run;
  }

 private:
  bool enter_page() {
    if (at_ == end_) return false;
    const KeyPages& keys = a_->keys;
    // 32 bits are enough for a position and divide much faster
    const auto position = static_cast<uint32_t>(a_->positions ? a_->positions[at_] : a_->first + at_);
    const auto page_rows = static_cast<uint32_t>(keys.rows_per_block);
    const int32_t block = a_->table[position / page_rows];
    const int64_t offset = position % page_rows;
    codes_ = keys.codes(block, offset);
    scales_ = keys.scales(block, offset);
    const int64_t most = std::min(end_ - at_, keys.rows_per_block - offset);
    left_ = a_->positions ? consecutive(a_->positions + at_, most) : most;
    return true;
  }

  static int64_t consecutive(const int32_t* positions, int64_t most) {
    int64_t count = 1;
    while (count < most && positions[count] == positions[0] + count) ++count;
    return count;
  }

  const ScoreArgs* a_;
  int64_t at_, end_;
  const uint8_t *codes_ = nullptr, *scales_ = nullptr;
  int64_t left_ = 0;  // keys of the page that come next
};

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
