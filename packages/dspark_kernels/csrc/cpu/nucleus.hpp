// Where a list of tokens, sorted in thought, is cut by mass and by count: found by bisection, without sorting it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "row.hpp"

namespace dspark_kernels {
namespace KERNEL_CORE_ISA {

// `size` candidates in ascending id order, in arrays that may be longer. They are padded to whole registers with values
// that no limit reaches and weights of 0.
struct Candidates {
  std::vector<int32_t> ids;
  std::vector<float> values, weights;
  int64_t size = 0;

  int64_t padded() const { return (size + F32::width - 1) / F32::width * F32::width; }
};

// The candidates of a row from `low` on, weighed by exp((x - top) * factor)
inline void collect(const Row& row, float low, float factor, Candidates& c) {
  c.size = row.collect(low, c.ids, c.values);
  if (static_cast<int64_t>(c.weights.size()) < c.padded()) c.weights.resize(c.padded());
  if (static_cast<int64_t>(c.values.size()) < c.padded()) c.values.resize(c.padded());
  std::fill(c.values.begin() + c.size, c.values.begin() + c.padded(), -kInfinity);
  weights_of(c.values.data(), c.padded(), row.top(), factor, c.weights.data());
}

struct Share {
  double mass;
  int64_t count;
};

// Mass and number of the candidates with value >= limit. Blocks of floats, summed in double in order.
inline Share at_least(const Candidates& c, float limit) {
  const F32 one = F32::set(1.0f), l = F32::set(limit);
  Share share{0, 0};
  for (int64_t start = 0; start < c.padded(); start += kBlock) {
    const int64_t end = std::min(c.padded(), start + kBlock);
    F32 mass = F32::zero(), count = F32::zero();
    for (int64_t i = start; i < end; i += F32::width) {
      const F32 v = F32::load(&c.values[i]);
      mass = mass + zero_below(v, l, F32::load(&c.weights[i]));
      count = count + zero_below(v, l, one);
    }
    share.mass += reduce_add(mass);
    share.count += static_cast<int64_t>(reduce_add(count));
  }
  return share;
}

// Places of the candidates with low <= value < high, ascending.
inline void band(const Candidates& c, float low, float high, std::vector<int32_t>& places) {
  const F32 one = F32::set(1.0f), l = F32::set(low), h = F32::set(high);
  places.clear();
  for (int64_t i = 0; i < c.padded(); i += F32::width) {
    const F32 v = F32::load(&c.values[i]);
    if (reduce_max(zero_below(v, l, one) - zero_below(v, h, one)) == 0.0f) continue;
    for (int64_t j = i; j < std::min<int64_t>(i + F32::width, c.size); ++j)
      if (c.values[j] >= low && c.values[j] < high) places.push_back(static_cast<int32_t>(j));
  }
}

// The place of the last candidate of the shortest prefix, in descending order of values and then ascending ids, that
// holds `mass` or has `count` candidates; of the very last candidate if neither is reached.
inline int64_t prefix_end(const Candidates& c, float low, float top, double mass, int64_t count) {
  thread_local std::vector<int32_t> places;
  constexpr int64_t kSmallBand = 64;
  constexpr int kSteps = 26;
  // The boundary is in [low, high); `outside` is the share of [high, ..), all of it inside the prefix.
  float high = std::nextafter(top, kInfinity);
  Share outside{0, 0};
  int64_t within = c.size;
  for (int step = 0; step < kSteps && within > kSmallBand; ++step) {
    const float middle = 0.5f * low + 0.5f * high;
    if (!(low < middle && middle < high)) break;
    const Share share = at_least(c, middle);
    if (share.mass >= mass || share.count >= count) {
      within = share.count - outside.count;
      low = middle;
    } else {
      within -= share.count - outside.count;
      high = middle;
      outside = share;
    }
  }
  band(c, low, high, places);
  const auto higher = [&](int32_t a, int32_t b) { return c.values[a] > c.values[b]; };
  if (!std::is_sorted(places.begin(), places.end(), higher)) std::stable_sort(places.begin(), places.end(), higher);
  double taken = outside.mass;
  for (size_t i = 0; i < places.size(); ++i) {
    taken += c.weights[places[i]];
    if (taken >= mass || outside.count + static_cast<int64_t>(i) + 1 >= count) return places[i];
  }
  return places.back();
}

}  // namespace KERNEL_CORE_ISA
}  // namespace dspark_kernels
