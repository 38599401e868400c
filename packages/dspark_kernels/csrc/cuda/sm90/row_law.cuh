// A row's distribution after temperature and filters, by one block of threads, from the statistics of its blocks.
#pragma once

#include "arguments.hpp"
#include "cuda/sm90/row_draw.cuh"

namespace dspark_kernels::cuda {

constexpr int kBand = 512;  // tokens that are sorted where a filter cuts
constexpr int kMostWarps = 32;

struct LawShared {
  union {
    double sums[kMostBlocks];
    int32_t numbers[2 * kMostBlocks];
  };
  float tops[kMostBlocks];
  uint64_t keys[kBand];
  double warp_values[kMostWarps];
  int64_t result;
  double result_mass;
  int32_t count;
};

struct Team {
  int id, lane, warp, warps, threads;
  __device__ explicit Team(int count)
      : id(static_cast<int>(threadIdx.x)), lane(id % 32), warp(id / 32), warps(count / 32), threads(count) {}
};

// The sum over the team in a fixed order, in every thread.
__device__ __forceinline__ double team_add(double x, const Team& t, LawShared& shared) {
  x = warp_add(x);
  if (t.lane == 0) shared.warp_values[t.warp] = x;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < t.warps; ++w) sum += shared.warp_values[w];
  __syncthreads();
  return sum;
}
__device__ __forceinline__ float team_max(float x, const Team& t, LawShared& shared) {
  x = warp_max(x);
  if (t.lane == 0) shared.warp_values[t.warp] = static_cast<double>(x);
  __syncthreads();
  float top = -infinity();
  for (int w = 0; w < t.warps; ++w) top = fmaxf(top, static_cast<float>(shared.warp_values[w]));
  __syncthreads();
  return top;
}

// Whether this block of threads is the last of `parts` to come here: it then sees what the others wrote.
__device__ __forceinline__ bool arrive_last(int32_t* counter, int parts, const Team& t, LawShared& shared) {
  __threadfence();
  __syncthreads();
  if (t.id == 0) shared.result = atomicAdd(counter, 1) == parts - 1;
  __syncthreads();
  const bool last = shared.result != 0;
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// probability of v = e^((x_v - top) * factor) / mass if order_key(x_v, v) >= cut, else 0
struct Law {
  float top = 0, factor = 1;
  double mass = 1;
  uint64_t cut = 0;

  KC_HD float weight(float x, int64_t id) const {
    return cut == 0 || order_key(x, id) >= cut ? quick_exp((x - top) * factor) : 0.0f;
  }
  KC_HD double log_probability(float x, int64_t id) const {
    if (cut != 0 && order_key(x, id) < cut) return -static_cast<double>(infinity());
    return static_cast<double>((x - top) * factor) - log(mass);
  }
};

struct Params {
  float temperature, top_p;
  int64_t top_k;  // 0 = off

  KC_HD bool some(int64_t vocab) const { return top_k > 0 && top_k < vocab; }
  KC_HD bool filtered(int64_t vocab) const { return temperature >= kGreedyBelow && (top_p < 1.0f || some(vocab)); }
};

struct Share {
  double mass;
  int64_t count;
};

// What is known of a row: whether it has a distribution, its law before filters, and the mass before temperature.
struct Known {
  bool usable, filtered, summed;  // summed: shared memory holds the blocks' sums under the law
  Law law;
  double plain;
  int64_t best;  // where the temperature asks for the argmax, otherwise -1
};

__device__ __forceinline__ Known know_row(const Row& row, const BlockStats* stats, const Params& p, const Team& t,
                                          LawShared& shared) {
  Known known{};
  const bool greedy = p.temperature < kGreedyBelow;
  known.law.factor = greedy ? 1.0f : 1.0f / p.temperature;
  float top = -infinity();
  for (int b = t.id; b < row.blocks; b += t.threads) top = fmaxf(top, shared.tops[b] = stats[b].top);
  known.law.top = top = team_max(top, t, shared);
  double plain = 0, warm = 0;
  for (int b = t.id; b < row.blocks; b += t.threads) {
    const BlockStats s = stats[b];
    plain += static_cast<double>(s.sum) * static_cast<double>(expf(s.top - top));
    warm += static_cast<double>(s.warm) * static_cast<double>(expf((s.top - top) * known.law.factor));
  }
  known.plain = team_add(plain, t, shared);
  known.law.mass = team_add(warm, t, shared);
  known.usable = known.plain > 0;
  known.best = -1;
  if (!known.usable) return known;
  if (greedy) {
    if (t.warp == 0) {
      const int64_t best = first_of(row, stats, top, t.lane);
      if (t.lane == 0) shared.result = best;
    }
    __syncthreads();
    known.best = shared.result;
    __syncthreads();
    known.law.mass = 1;
    known.law.cut = order_key(top, known.best);
    return known;
  }
  known.filtered = p.filtered(row.vocab);
  return known;
}

// A token of the row's law: every thread returns it.
__device__ __forceinline__ int64_t draw(const Row& row, const BlockStats* stats, const Known& known, double u,
                                        const Team& t, LawShared& shared) {
  if (known.best >= 0) return known.best;
  const Law& law = known.law;
  double total = law.mass;
  if (known.filtered) {
    const float least = law.cut == 0 ? bits_float(0xFF7FFFFFu) : key_value(law.cut);  // 0 keeps all
    double mine = 0;
    for (int b = t.id; known.summed && b < row.blocks; b += t.threads) mine += shared.sums[b];
    for (int b = t.warp; !known.summed && b < row.blocks; b += t.warps) {
      float x[kLaneValues], part = 0;
      if (shared.tops[b] >= least) {
        load_block(row, b, t.lane, x);
        DSPARK_UNROLL
        for (int i = 0; i < kLaneValues; ++i) part += law.weight(x[i], Row::first(b, i / 4, t.lane) + i % 4);
      }
      part = warp_add(part);
      if (t.lane == 0) shared.sums[b] = part, mine += part;
    }
    total = team_add(mine, t, shared);
  }
  if (t.warp == 0) {
    const int64_t token = reach(
        row.blocks, u * total, t.lane,
        [&](int b) {
          if (known.filtered) return shared.sums[b];
          const BlockStats s = stats[b];
          return static_cast<double>(s.warm) * static_cast<double>(expf((s.top - law.top) * law.factor));
        },
        [&](int b, int lane, float (&w)[kLaneValues]) {
          load_block(row, b, lane, w);
          DSPARK_UNROLL
          for (int i = 0; i < kLaneValues; ++i) w[i] = law.weight(w[i], Row::first(b, i / 4, lane) + i % 4);
        });
    if (t.lane == 0) shared.result = token;
  }
  __syncthreads();
  const int64_t token = shared.result;
  __syncthreads();
  return token;
}

}  // namespace dspark_kernels::cuda
