// Where a sorted list of tokens is cut by count and by mass, found without sorting it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dspark_kernels {
namespace KERNEL_CORE_ISA {

struct Candidate {
  uint64_t key;  // order_key: unique, higher comes first
  float weight;
};

// The lowest key of the shortest prefix, in descending order, that holds `mass` or has `count` candidates; the whole
// list if neither is reached. Quickselect on both bounds at once: linear on average, `list` is reordered.
inline uint64_t prefix_end(std::vector<Candidate>& list, double mass, int64_t count) {
  constexpr int64_t kSortBelow = 48;
  const auto before = [](const Candidate& a, const Candidate& b) { return a.key > b.key; };
  int64_t low = 0, high = static_cast<int64_t>(list.size());
  double taken = 0;  // mass of [0, low), all of it inside the prefix
  while (high - low > kSortBelow) {
    // Keys are unique, so a median of three leaves something on both sides.
    const uint64_t a = list[low].key, b = list[low + (high - low) / 2].key, c = list[high - 1].key;
    const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    const auto middle =
        std::partition(list.begin() + low, list.begin() + high, [&](const Candidate& x) { return x.key >= pivot; }) -
        list.begin();
    double upper = 0;
    for (int64_t i = low; i < middle; ++i) upper += list[i].weight;
    if (taken + upper < mass && middle < count) {
      low = middle;
      taken += upper;
    } else {
      high = middle;
    }
  }
  std::sort(list.begin() + low, list.begin() + high, before);
  for (int64_t i = low; i < high; ++i) {
    taken += list[i].weight;
    if (taken >= mass || i + 1 >= count) return list[i].key;
  }
  return high ? list[high - 1].key : 0;
}

}  // namespace KERNEL_CORE_ISA
}  // namespace dspark_kernels
