// Filters of rows in two readings by many blocks of threads: a histogram of mass and number over even steps of the
// logits, then the few tokens of the step where the row is cut, which are sorted.
//
// Masses are added as integers and whatever else is summed over blocks is summed in order, so that a row's result does
// not depend on how many blocks of threads share it.
#pragma once

#include "cuda/sm90/row_prefix.cuh"
#include "cuda/sm90/row_work.cuh"

namespace dspark_kernels::cuda {

constexpr float kMassUnit = 32768.0f;  // of a token as heavy as any in its bin; a part of a row sums up to 2^16 of them
constexpr int kMostBlocksAPart = 64;

constexpr int padded(int bin) { return bin + bin / 16; }  // threads that read 16 bins each meet in no bank
static_assert(2 * kMostBlocks >= kFilterBins);

struct FilterShared {
  LawShared law;  // its numbers: tokens of each bin of the whole row
  union {
    struct {
      uint32_t mass[kFilterBins];
      int32_t count[kFilterBins];
    } part;
    double mass[padded(kFilterBins)];  // of the whole row
  };
};

// What the filters ask for: the shortest prefix with `mass` or `k` tokens, which ends at a value of `low` or above.
struct Limits {
  float low, top, scale, step;  // bin = (top - x) * scale, step = 1 / scale
  double mass;
  int64_t k;
  bool masses, counts;

  KC_HD int bin(float x) const { return static_cast<int>(fminf((top - x) * scale, kFilterBins - 1.0f)); }
};

__device__ __forceinline__ Limits limits_of(const Row& row, const Known& known, const Params& p, const Team& t,
                                            LawShared& shared) {
  constexpr double kWidest = 40;  // lighter tokens share the last bin
  const float top = known.law.top, lowest = bits_float(0xFF7FFFFFu);
  Limits limits{lowest, top, 0, 0, static_cast<double>(infinity()), INT64_MAX, p.top_p < 1.0f, p.some(row.vocab)};
  if (limits.masses) {
    // Tokens lighter than the mass left out, shared by all, come after the cut: together they are lighter than it.
    const double total = known.law.mass;
    limits.mass = static_cast<double>(p.top_p) * total;
    const double light = 0.5 * (1.0 - static_cast<double>(p.top_p)) * total / static_cast<double>(row.vocab);
    const double cut = static_cast<double>(top) + static_cast<double>(p.temperature) * log(fmin(1.0, light));
    limits.low = fmaxf(lowest, static_cast<float>(cut));
  }
  if (limits.counts) {
    limits.k = p.top_k;
    limits.low = fmaxf(limits.low, reached_by(p.top_k, row, t, shared));
  }
  const double range =
      fmin(static_cast<double>(top) - static_cast<double>(limits.low), kWidest * static_cast<double>(p.temperature));
  if (range > 1e-20) {
    limits.scale = static_cast<float>(kFilterBins / range);
    limits.step = static_cast<float>(range / kFilterBins);
  }
  return limits;
}

// The histogram's share of one of `parts`: into shared memory, then added to the row's.
__device__ __forceinline__ void count_part(const Row& row, const Law& law, const Limits& limits,
                                           unsigned long long* bin_mass, int32_t* bin_count, int part, int parts,
                                           const Team& t, FilterShared& shared) {
  for (int i = t.id; i < kFilterBins; i += t.threads) shared.part.mass[i] = 0, shared.part.count[i] = 0;
  __syncthreads();
  for (int b = part * t.warps + t.warp; b < row.blocks; b += parts * t.warps) {
    if (shared.law.tops[b] < limits.low) continue;
    float x[kLaneValues];
    load_block(row, b, t.lane, x);
    DSPARK_UNROLL
    for (int i = 0; i < kLaneValues; ++i) {
      if (!(x[i] >= limits.low)) continue;
      const int bin = limits.bin(x[i]);
      if (limits.masses) {
        const float share = quick_exp((x[i] - law.top + static_cast<float>(bin) * limits.step) * law.factor);
        atomicAdd(&shared.part.mass[bin], static_cast<uint32_t>(fminf(share, 1.0f) * kMassUnit + 0.5f));
      }
      if (limits.counts) atomicAdd(&shared.part.count[bin], 1);
    }
  }
  __syncthreads();
  for (int i = t.id; i < kFilterBins; i += t.threads) {
    if (shared.part.mass[i]) atomicAdd(&bin_mass[i], static_cast<unsigned long long>(shared.part.mass[i]));
    if (shared.part.count[i]) atomicAdd(&bin_count[i], shared.part.count[i]);
  }
}

// Finds the bin where the prefix ends; the last one with a token if rounding or masks leave it short.
__device__ __forceinline__ void find_cut(const Law& law, const Limits& limits, const unsigned long long* bin_mass,
                                         const int32_t* bin_count, RowWork& work, const Team& t, FilterShared& shared) {
  __syncthreads();
  DSPARK_UNROLL
  for (int i = t.id; i < kFilterBins; i += t.threads) {
    const double units = static_cast<double>(fresh(&bin_mass[i])) / static_cast<double>(kMassUnit);
    shared.mass[padded(i)] = units * static_cast<double>(expf(-static_cast<float>(i) * limits.step * law.factor));
    shared.law.numbers[i] = fresh(&bin_count[i]);
  }
  __syncthreads();
  const int each = (kFilterBins + t.threads - 1) / t.threads;
  const int begin = min(kFilterBins, t.id * each), end = min(kFilterBins, begin + each);
  double mass = 0;
  int64_t count = 0;
  int last = -1;
  for (int i = begin; i < end; ++i) {
    const double m = shared.mass[padded(i)];
    const int32_t c = shared.law.numbers[i];
    if (m > 0 || c > 0) last = i;
    mass += m, count += c;
  }
  const double mass_upto = warp_scan(mass, t.lane), count_upto = warp_scan(count, t.lane);
  if (t.lane == 31) shared.law.warp_values[t.warp] = mass_upto, shared.law.keys[t.warp] = count_upto;
  __syncthreads();
  double mass_before = 0, mass_all = 0;
  int64_t count_before = 0, count_all = 0;
  for (int w = 0; w < t.warps; ++w) {
    if (w == t.warp) mass_before = mass_all, count_before = count_all;
    mass_all += shared.law.warp_values[w], count_all += static_cast<int64_t>(shared.law.keys[w]);
  }
  const auto reached = [&](double m, int64_t c) { return m >= limits.mass || c >= limits.k; };
  const double mass_left = __shfl_up_sync(kLanes, mass_upto, 1);
  const int64_t count_left = __shfl_up_sync(kLanes, count_upto, 1);
  const double m0 = t.lane == 0 ? mass_before : mass_before + mass_left;
  const int64_t c0 = t.lane == 0 ? count_before : count_before + count_left;
  __syncthreads();
  const int last_bin = static_cast<int>(team_max(static_cast<float>(last), t, shared.law));
  const bool mine = reached(mass_all, count_all)
                        ? reached(mass_before + mass_upto, count_before + count_upto) && !reached(m0, c0)
                        : last == last_bin && last >= 0;
  if (mine) {
    const bool search = reached(mass_all, count_all);
    double m = m0;
    int64_t c = c0;
    int i = begin;
    for (; i < last; ++i) {
      const double next_mass = m + shared.mass[padded(i)];
      const int64_t next_count = c + shared.law.numbers[i];
      if (search && reached(next_mass, next_count)) break;
      m = next_mass, c = next_count;
    }
    work.bin = i, work.outside = c;
  }
}

// Leaves every block's mass above the bin in its statistics, and the tokens in the bin in the row's band, in any order.
__device__ __forceinline__ void collect_part(const Row& row, BlockStats* stats, const Law& law, const Limits& limits,
                                             RowWork& work, uint64_t* band, int32_t* in_block, int part, int parts,
                                             const Team& t, LawShared& shared) {
  const int cut = work.bin;
  for (int b = part * t.warps + t.warp; b < row.blocks; b += parts * t.warps) {
    float sum = 0;
    int all = 0;
    if (shared.tops[b] >= limits.low && limits.bin(shared.tops[b]) <= cut) {
      float x[kLaneValues];
      load_block(row, b, t.lane, x);
      uint32_t in = 0;
      DSPARK_UNROLL
      for (int i = 0; i < kLaneValues; ++i) {
        if (!(x[i] >= limits.low)) continue;
        const int bin = limits.bin(x[i]);
        if (bin < cut) sum += quick_exp((x[i] - law.top) * law.factor);
        if (bin == cut) in |= 1u << i;
      }
      sum = warp_add(sum);
      const int have = __popc(in), upto = warp_scan(have, t.lane);
      all = __shfl_sync(kLanes, upto, 31);
      int place = 0;
      if (t.lane == 0 && all) place = atomicAdd(&work.band, all);
      place = __shfl_sync(kLanes, place, 0) + upto - have;
      uint32_t highest = 0, lowest = 0;
      DSPARK_UNROLL
      for (int i = 0; i < kLaneValues; ++i) {
        if (!(in >> i & 1)) continue;
        const uint32_t bits = ordered_bits(x[i]);
        highest = max(highest, bits), lowest = max(lowest, ~bits);
        if (place < kBand) band[place] = order_key(x[i], Row::first(b, i / 4, t.lane) + i % 4);
        ++place;
      }
      highest = __reduce_max_sync(kLanes, highest), lowest = __reduce_max_sync(kLanes, lowest);
      if (t.lane == 0 && all) atomicMax(&work.highest, highest), atomicMax(&work.lowest, lowest);
    }
    if (t.lane == 0) stats[b].kept = sum, in_block[b] = all;
  }
}

// Cuts the law among the tokens of the bin where all are equal, by what is known of each block.
__device__ __forceinline__ void cut_equals(const Row& row, const BlockStats* stats, Known& known, const Limits& limits,
                                           const RowWork& work, const int32_t* in_block, const Team& t,
                                           LawShared& shared) {
  Law& law = known.law;
  const float value = ordered_value(fresh(&work.highest));
  const double weight = static_cast<double>(quick_exp((value - law.top) * law.factor));
  double mine = 0;
  for (int b = t.id; b < row.blocks; b += t.threads) {
    mine += shared.sums[b] = fresh(&stats[b].kept);
    shared.tops[b] = static_cast<float>(fresh(&in_block[b]));
  }
  const double outside = team_add(mine, t, shared);
  double kept = fmin(static_cast<double>(limits.k - work.outside), static_cast<double>(fresh(&work.band)));
  if (weight > 0) kept = fmin(kept, ceil((limits.mass - outside) / weight));
  kept = fmax(1.0, kept);
  for (int b = t.id; b < row.blocks; b += t.threads) {
    double before = 0;
    for (int c = 0; c < b; ++c) before += static_cast<double>(shared.tops[c]);
    shared.sums[b] += weight * fmin(fmax(kept - before, 0.0), static_cast<double>(shared.tops[b]));
  }
  if (t.warp == 0) {
    const int64_t id = reach(
        row.blocks, kept - 0.5, t.lane, [&](int b) { return static_cast<double>(shared.tops[b]); },
        [&](int b, int lane, float (&w)[kLaneValues]) {
          load_block(row, b, lane, w);
          DSPARK_UNROLL
          for (int i = 0; i < kLaneValues; ++i) w[i] = w[i] == value ? 1.0f : 0.0f;
        });
    if (t.lane == 0) shared.result = id;
  }
  __syncthreads();
  law.cut = order_key(value, shared.result);
  law.mass = outside + kept * weight;
  known.summed = true;
  __syncthreads();
}

// The law of the filtered row, and its blocks' sums where they are known. After collect_part of every part.
__device__ __forceinline__ void cut_row(const Row& row, const BlockStats* stats, Known& known, const Limits& limits,
                                        const RowWork& work, const uint64_t* band, const int32_t* in_block,
                                        const Team& t, LawShared& shared) {
  const int size = fresh(&work.band);
  if (size > kBand && fresh(&work.highest) == ~fresh(&work.lowest)) {
    cut_equals(row, stats, known, limits, work, in_block, t, shared);
    return;
  }
  if (size < 1 || size > kBand) {
    keep_prefix(row, known.law, limits.low, limits.mass, limits.k, t, shared);
    return;
  }
  double mine = 0;
  for (int b = t.id; b < row.blocks; b += t.threads) mine += shared.sums[b] = fresh(&stats[b].kept);
  for (int i = t.id; i < size; i += t.threads) shared.keys[i] = fresh(&band[i]);
  const Share outside{team_add(mine, t, shared), work.outside};
  const int kept = cut_among(known.law, size, outside, limits.mass, limits.k, t, shared);
  for (int b = t.id; b < row.blocks; b += t.threads) {
    double more = 0;
    for (int i = 0; i < kept; ++i) {
      const uint64_t key = shared.keys[i];
      const bool own = static_cast<int>((0xFFFFFFFFu - static_cast<uint32_t>(key)) / kBlock) == b;
      if (own) more += static_cast<double>(quick_exp((key_value(key) - known.law.top) * known.law.factor));
    }
    shared.sums[b] += more;
  }
  __syncthreads();
  known.summed = true;
}

// The first reading by one of `parts`: the histogram of a filtered row, and end(row, statistics, known) of another by
// the first part.
template <typename End>
__device__ __forceinline__ void read_first(const Rows& a, int64_t index, const Params& params, int part, int parts,
                                           const Team& t, FilterShared& shared, End end) {
  const bool filtered = params.filtered(a.vocab);
  if (!filtered && part != 0) return;
  const Row row(a.logits + index * a.row_stride, a.vocab);
  const BlockStats* stats = a.stats + index * row.blocks;
  Known known = know_row(row, stats, params, t, shared.law);
  if (!known.usable || !filtered) {
    known.filtered = false;  // so that the compiler leaves out what filtered rows need
    if (part == 0) end(row, stats, known);
    return;
  }
  const Limits limits = limits_of(row, known, params, t, shared.law);
  unsigned long long* mass = a.bin_mass + index * kFilterBins;
  int32_t* count = a.bin_count + index * kFilterBins;
  count_part(row, known.law, limits, mass, count, part, parts, t, shared);
  if (arrive_last(&a.work[index].counted, parts, t, shared.law))
    find_cut(known.law, limits, mass, count, a.work[index], t, shared);
}

// The second reading of a filtered row by one of `parts`, and end(row, statistics, known) by the one that comes last.
template <typename End>
__device__ __forceinline__ void read_again(const Rows& a, int64_t index, const Params& params, int part, int parts,
                                           const Team& t, LawShared& shared, End end) {
  const Row row(a.logits + index * a.row_stride, a.vocab);
  BlockStats* stats = a.stats + index * row.blocks;
  Known known = know_row(row, stats, params, t, shared);
  if (!known.usable) return;
  known.filtered = true, known.best = -1;
  const Limits limits = limits_of(row, known, params, t, shared);
  RowWork& work = a.work[index];
  uint64_t* band = a.band + index * kBand;
  int32_t* in_block = a.bin_count + index * kFilterBins;
  collect_part(row, stats, known.law, limits, work, band, in_block, part, parts, t, shared);
  if (!arrive_last(&work.cut, parts, t, shared)) return;
  cut_row(row, stats, known, limits, work, band, in_block, t, shared);
  end(row, stats, known);
}

}  // namespace dspark_kernels::cuda
