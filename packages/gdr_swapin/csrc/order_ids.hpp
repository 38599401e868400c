// The ids of a request: checked, and put in the order of growing slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gdr_swapin {

struct IdPair {
  int64_t slot, block;
};

// `count` pairs with slots in [0, slot_end) and distinct blocks in [1, block_end), by slot, equal slots as they came.
// False, and nothing sorted, where an id is out of range or a block comes twice: the caller finds out which.
inline bool order_ids(const int64_t* slots, const int64_t* blocks, int64_t count, int64_t slot_end, int64_t block_end,
                      int64_t* sorted_slots, int64_t* sorted_blocks) {
  constexpr int kBits = 11;
  constexpr uint64_t kDigits = uint64_t{1} << kBits;
  std::vector<uint64_t> seen(static_cast<size_t>(block_end > 0 ? block_end / 64 + 1 : 1));
  std::vector<IdPair> pairs(static_cast<size_t>(count));
  bool in_order = true;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = slots[i], block = blocks[i];
    if (slot < 0 || slot >= slot_end || block < 1 || block >= block_end) return false;
    uint64_t& word = seen[static_cast<size_t>(block / 64)];
    const uint64_t bit = uint64_t{1} << (block % 64);
    if (word & bit) return false;
    word |= bit;
    pairs[static_cast<size_t>(i)] = {slot, block};
    in_order = in_order && (i == 0 || slots[i - 1] <= slot);
  }
  std::vector<IdPair> other(in_order ? 0 : pairs.size());
  // Digit after digit; few thousand ids of a few million slots are two passes.
  for (int shift = 0; !in_order && (static_cast<uint64_t>(slot_end - 1) >> shift) > 0; shift += kBits) {
    uint32_t starts[kDigits + 1] = {};
    for (const IdPair& pair : pairs) ++starts[((static_cast<uint64_t>(pair.slot) >> shift) & (kDigits - 1)) + 1];
    for (uint64_t d = 0; d < kDigits; ++d) starts[d + 1] += starts[d];
    for (const IdPair& pair : pairs)
      other[starts[(static_cast<uint64_t>(pair.slot) >> shift) & (kDigits - 1)]++] = pair;
    std::swap(pairs, other);
  }
  for (int64_t i = 0; i < count; ++i) {
    sorted_slots[i] = pairs[static_cast<size_t>(i)].slot;
    sorted_blocks[i] = pairs[static_cast<size_t>(i)].block;
  }
  return true;
}

}  // namespace gdr_swapin
