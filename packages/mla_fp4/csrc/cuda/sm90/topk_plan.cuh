// The arithmetic of the selection, for device and host: how scores order, what one digit of a radix search decides,
// and what a cut lets in afterwards.
#pragma once

#include "kernel_core/cuda/hd.cuh"

namespace mla_fp4::topk_plan {

inline constexpr int kIndexBits = 20;
inline constexpr uint32_t kIndexMask = (1u << kIndexBits) - 1;
inline constexpr uint32_t kLowest = 0x007FFFFF;  // of -inf, and of NaN. 0 is free for "no entry"

// Unsigned integers in the order of the floats; both zeros are one number.
KC_HD uint32_t order_key(float score) {
  const uint32_t raw = kernel_core::cuda::float_bits(score);
  const uint32_t bits = raw == 0x80000000u ? 0 : raw;
  const uint32_t flipped = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? kLowest : flipped;
}

// No two entries of a row are equal, and the better one is larger: by key, then by the lower index. So the k best are
// one set, in whatever order threads put entries into a list.
KC_HD uint64_t ranked(uint32_t key, uint32_t index) {
  return static_cast<uint64_t>(key) << kIndexBits | (kIndexMask - index);
}
KC_HD uint32_t rank_key(uint64_t entry) { return static_cast<uint32_t>(entry >> kIndexBits); }
KC_HD uint32_t rank_index(uint64_t entry) { return kIndexMask - (static_cast<uint32_t>(entry) & kIndexMask); }

// ---- radix search for the k-th largest entry ---------------------------------------------------------------------

inline constexpr int kBins = 2048;
inline constexpr int kKeyPasses = 3, kPasses = 5;

// Digits of 11, 11 and 10 bits of the key, then twice 10 of the index.
KC_HD int digit_shift(int pass) { return pass == 0 ? 41 : pass == 1 ? 30 : pass == 2 ? 20 : pass == 3 ? 10 : 0; }
KC_HD uint32_t digit_mask(int pass) { return pass < 2 ? 2047 : 1023; }

struct Bound {
  uint64_t prefix;  // digits found so far, zeros below
  int need;         // entries still to take among those that share the prefix
  int pass;
  bool done;

  KC_HD static Bound of(int k) { return {0, k, 0, false}; }

  KC_HD bool counts(uint64_t entry) const { return pass == 0 || (entry ^ prefix) >> digit_shift(pass - 1) == 0; }

  // Bins run from the largest digit down, so that a prefix sum counts what is better.
  KC_HD uint32_t bin(uint64_t entry) const {
    return (kBins - 1) - (static_cast<uint32_t>(entry >> digit_shift(pass)) & digit_mask(pass));
  }

  // The wanted entry is in `chosen`, which holds `count` entries; `before` are in better bins.
  KC_HD void advance(uint32_t chosen, int before, int count, int passes) {
    need -= before;
    prefix |= static_cast<uint64_t>((kBins - 1) - chosen) << digit_shift(pass);
    ++pass;
    done = count == need || pass == passes;
  }

  // Of a finished search over all digits: exactly k entries.
  KC_HD bool takes(uint64_t entry) const { return entry >= prefix; }

  // The lowest key that a later entry of the row needs to displace one of the k. Where the k-th key itself is known, an
  // equal one comes too late; before that, the zeros below the prefix let in more, never fewer.
  KC_HD uint32_t admits() const { return rank_key(prefix) + (pass >= kKeyPasses ? 1 : 0); }
};

// ---- a threshold from a sample -----------------------------------------------------------------------------------

// The score whose key this is; not for those of NaN and -inf.
KC_HD float key_score(uint32_t key) {
  return kernel_core::cuda::bits_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Sample i of `count`, one of each `length / count` neighbours, scattered so that no period of the row shows.
KC_HD uint32_t sample_index(uint32_t i, uint32_t count, uint32_t length) {
  const uint32_t stride = length / count;
  return i * stride + (i * 0x9E3779B1u >> 12) % stride;
}

// Which rank of a sample should bound the row: four standard deviations beyond the expected place of the k-th entry, so
// that hardly ever fewer than k entries reach it; and the rank that would fill `capacity` too far.
struct SampleRank {
  int wanted, most;
};

KC_HD SampleRank sample_rank(int64_t k, int64_t count, int64_t length, int64_t capacity) {
  const int64_t mean = k * count / length;
  int64_t deviation = 0;
  while ((deviation + 1) * (deviation + 1) <= mean) ++deviation;
  const int64_t wanted = mean + 4 * deviation + 4, full = capacity * 7 / 10 * count / length;
  const int64_t most = 2 * wanted < full ? 2 * wanted : full;
  return {static_cast<int>(wanted), static_cast<int>(most < wanted ? wanted : most)};
}

// Keys from `low` on in `count` steps of 2^shift, a bin each. Unlike digits, steps fit themselves to the keys there
// are.
struct KeySteps {
  uint32_t low;
  int shift;
  uint32_t count;  // at most kBins

  KC_HD static KeySteps of(uint32_t low, uint32_t high) {
    int shift = 0;
    while ((high - low) >> shift >= static_cast<uint32_t>(kBins)) ++shift;
    return {low, shift, kBins};
  }
  KC_HD bool counts(uint32_t key) const { return key >= low && (key - low) >> shift < count; }
  KC_HD int bin(uint32_t key) const { return kBins - 1 - static_cast<int>((key - low) >> shift); }
  KC_HD uint32_t lowest(int bin) const { return low + (static_cast<uint32_t>(kBins - 1 - bin) << shift); }
  KC_HD KeySteps inside(int bin) const {  // of one bin
    return {lowest(bin), shift > 11 ? shift - 11 : 0, shift > 11 ? kBins : 1u << shift};
  }
};

// ---- slices, candidate blocks ------------------------------------------------------------------------------------

// Entries of a row that are left when each slice keeps its k best next to each other. `slice` is at least k.
KC_HD int64_t merged_length(int64_t length, int64_t slice, int64_t k) {
  const int64_t whole = length / slice, rest = length - whole * slice;
  return whole * k + (rest < k ? rest : k);
}

// Visible positions among `count` ascending blocks, all of which hold one; `last` is the last of them.
KC_HD int64_t candidate_length(int64_t count, int64_t last, int64_t block, int64_t visible) {
  if (count == 0) return 0;
  const int64_t tail = visible - last * block;
  return (count - 1) * block + (tail < block ? tail : block);
}

}  // namespace mla_fp4::topk_plan
