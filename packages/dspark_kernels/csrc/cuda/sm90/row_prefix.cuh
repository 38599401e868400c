// Where a row is cut by mass and by count, by one block of threads in steps: for rows whose cut falls among many tokens
// of about the same value, which row_filter.cuh leaves.
#pragma once

#include "cuda/sm90/row_law.cuh"

namespace dspark_kernels::cuda {

// Tokens of the row at or above each of the limits, ascending; blocks below the first one are not read.
__device__ __forceinline__ void shares_from(const Row& row, const Law& law, const float (&limits)[4], Share (&out)[4],
                                            const Team& t, LawShared& shared) {
  double mass[4] = {0, 0, 0, 0};
  int count[4] = {0, 0, 0, 0};
  for (int b = t.warp; b < row.blocks; b += t.warps) {
    if (shared.tops[b] < limits[0]) continue;
    float x[kLaneValues], part[4] = {0, 0, 0, 0};
    load_block(row, b, t.lane, x);
    DSPARK_UNROLL
    for (int i = 0; i < kLaneValues; ++i) {
      const float w = quick_exp((x[i] - law.top) * law.factor);
      DSPARK_UNROLL
      for (int l = 0; l < 4; ++l) {
        part[l] += x[i] >= limits[l] ? w : 0.0f;
        count[l] += x[i] >= limits[l];
      }
    }
    DSPARK_UNROLL
    for (int l = 0; l < 4; ++l) mass[l] += part[l];
  }
  DSPARK_UNROLL
  for (int l = 0; l < 4; ++l) {
    out[l].mass = team_add(mass[l], t, shared);
    out[l].count = static_cast<int64_t>(team_add(static_cast<double>(count[l]), t, shared));
  }
}

// A value that at least k tokens reach: the k-th largest of the blocks' tops, or the lowest number.
__device__ __forceinline__ float reached_by(int64_t k, const Row& row, const Team& t, LawShared& shared) {
  const float lowest = bits_float(0xFF7FFFFFu);
  if (k > row.blocks) return lowest;
  if (t.id == 0) shared.result_mass = static_cast<double>(lowest);
  __syncthreads();
  for (int b = t.id; b < row.blocks; b += t.threads) {
    int64_t rank = 0;
    for (int c = 0; c < row.blocks; ++c)
      rank += shared.tops[c] > shared.tops[b] || (shared.tops[c] == shared.tops[b] && c < b);
    if (rank == k - 1) shared.result_mass = static_cast<double>(fmaxf(lowest, shared.tops[b]));
  }
  __syncthreads();
  const float value = static_cast<float>(shared.result_mass);
  __syncthreads();
  return value;
}

// Cuts the law behind the n-th of the tokens equal to `value`, in id order.
__device__ __forceinline__ void cut_among_equals(const Row& row, Law& law, float value, const Share& outside,
                                                 double mass, int64_t k, const Team& t, LawShared& shared) {
  double mine = 0;
  for (int b = t.warp; b < row.blocks; b += t.warps) {
    float x[kLaneValues], equal = 0;
    if (shared.tops[b] >= value) {
      load_block(row, b, t.lane, x);
      DSPARK_UNROLL
      for (int i = 0; i < kLaneValues; ++i) equal += x[i] == value ? 1.0f : 0.0f;
    }
    equal = warp_add(equal);
    if (t.lane == 0) shared.sums[b] = equal, mine += equal;
  }
  const double equals = team_add(mine, t, shared);
  const double weight = static_cast<double>(quick_exp((value - law.top) * law.factor));
  double kept = static_cast<double>(k - outside.count);
  if (weight > 0) kept = fmin(kept, ceil((mass - outside.mass) / weight));
  kept = fmax(1.0, fmin(kept, equals));
  if (t.warp == 0) {
    const int64_t id = reach(
        row.blocks, kept - 0.5, t.lane, [&](int b) { return shared.sums[b]; },
        [&](int b, int lane, float (&w)[kLaneValues]) {
          load_block(row, b, lane, w);
          DSPARK_UNROLL
          for (int i = 0; i < kLaneValues; ++i) w[i] = w[i] == value ? 1.0f : 0.0f;
        });
    if (t.lane == 0) shared.result = id;
  }
  __syncthreads();
  law.cut = order_key(value, shared.result);
  law.mass = outside.mass + kept * weight;
  __syncthreads();
}

// Descending, by the whole team; `length` is a power of two.
__device__ __forceinline__ void sort_keys(int length, const Team& t, LawShared& shared) {
  for (int size = 2; size <= length; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      for (int i = t.id; i < length / 2; i += t.threads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const uint64_t a = shared.keys[low], b = shared.keys[high];
        if ((a < b) == ((low & size) == 0)) shared.keys[low] = b, shared.keys[high] = a;
      }
      __syncthreads();
    }
  }
}

// Cuts the law inside the `size` tokens in shared.keys, which follow those outside. Returns how many of them stay.
__device__ __forceinline__ int cut_among(Law& law, int size, const Share& outside, double mass, int64_t k,
                                         const Team& t, LawShared& shared) {
  int length = 2;
  while (length < size) length *= 2;
  for (int i = size + t.id; i < length; i += t.threads) shared.keys[i] = 0;
  __syncthreads();
  sort_keys(length, t, shared);
  if (t.warp == 0) {
    double before = outside.mass, end = outside.mass;
    int chosen = -1;
    for (int from = 0; from < size && chosen < 0; from += 32) {
      const int i = from + t.lane;
      const float w = i < size ? quick_exp((key_value(shared.keys[i]) - law.top) * law.factor) : 0.0f;
      const double upto = before + warp_scan(static_cast<double>(w), t.lane);
      const uint32_t reached =
          __ballot_sync(kLanes, i < size && (upto >= mass || outside.count + i + 1 >= k || i + 1 == size));
      const int at = reached ? __ffs(reached) - 1 : 31;
      end = before = __shfl_sync(kLanes, upto, at);
      if (reached) chosen = from + at;
    }
    if (t.lane == 0) {
      shared.result = static_cast<int64_t>(shared.keys[max(chosen, 0)]);
      shared.result_mass = end, shared.count = max(chosen, 0) + 1;
    }
  }
  __syncthreads();
  law.cut = static_cast<uint64_t>(shared.result);
  law.mass = shared.result_mass;
  const int kept = shared.count;
  __syncthreads();
  return kept;
}

// Cuts the law inside the at most kBand tokens with low <= value < high.
__device__ __forceinline__ void cut_in_band(const Row& row, Law& law, float low, float high, const Share& outside,
                                            double mass, int64_t k, const Team& t, LawShared& shared) {
  if (t.id == 0) shared.count = 0;
  __syncthreads();
  for (int b = t.warp; b < row.blocks; b += t.warps) {
    if (shared.tops[b] < low) continue;
    float x[kLaneValues];
    load_block(row, b, t.lane, x);
    DSPARK_UNROLL
    for (int i = 0; i < kLaneValues; ++i) {
      if (x[i] >= low && x[i] < high) {
        // The order of arrival is lost in the sort.
        const int place = atomicAdd(&shared.count, 1);
        if (place < kBand) shared.keys[place] = order_key(x[i], Row::first(b, i / 4, t.lane) + i % 4);
      }
    }
  }
  __syncthreads();
  const int size = min(shared.count, kBand);
  __syncthreads();
  cut_among(law, size, outside, mass, k, t, shared);
}

// Values that split [low, high) into four: evenly by value, or, where that is too coarse, by their order.
__device__ __forceinline__ void split(float low, float high, bool by_order, float (&limits)[4]) {
  const float middle = 0.5f * low + 0.5f * high;
  limits[0] = low, limits[1] = 0.5f * low + 0.5f * middle, limits[2] = middle, limits[3] = 0.5f * middle + 0.5f * high;
  if (!by_order && low < middle && middle < high) return;
  const uint32_t first = ordered_bits(low), end = ordered_bits(high), step = max(1u, (end - first) / 4);
  DSPARK_UNROLL
  for (int l = 1; l < 4; ++l) limits[l] = ordered_value(min(end, first + static_cast<uint32_t>(l) * step));
}

// The shortest prefix, in descending order of values and then ascending ids, that holds `mass` or has `k` tokens. It
// ends at a value of `low` or above. Four sections a step until few tokens or a single value are left.
__device__ __forceinline__ void keep_prefix(const Row& row, Law& law, float low, double mass, int64_t k, const Team& t,
                                            LawShared& shared) {
  constexpr int kEvenSteps = 10;
  constexpr float kCoarse = -1e30f;
  float high = ordered_value(ordered_bits(law.top) + 1);  // just above the top
  Share outside{0, 0};
  int64_t within = INT64_MAX;
  for (int step = 0; within > kBand && ordered_bits(high) - ordered_bits(low) > 1; ++step) {
    float limits[4];
    split(low, high, step >= kEvenSteps || low < kCoarse, limits);
    Share from[4];
    shares_from(row, law, limits, from, t, shared);
    // Reached by enough up to some limit, and not by the ones above.
    int64_t reached = from[0].count;
    DSPARK_UNROLL
    for (int l = 3; l > 0; --l)
      if (from[l].mass < mass && from[l].count < k) high = limits[l], outside = from[l];
    DSPARK_UNROLL
    for (int l = 1; l < 4; ++l)
      if (from[l].mass >= mass || from[l].count >= k) low = limits[l], reached = from[l].count;
    within = reached - outside.count;
  }
  if (within <= kBand) {
    cut_in_band(row, law, low, high, outside, mass, k, t, shared);
  } else {
    cut_among_equals(row, law, low, outside, mass, k, t, shared);
  }
}

}  // namespace dspark_kernels::cuda
