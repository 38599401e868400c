// Which channels a warp sums, and where things lie in shared memory.
#pragma once

#include "cuda/hyper_connection.hpp"
#include "kernel_core/cuda/hd.cuh"

namespace mhc_engram::cuda {

using namespace kernel_core::cuda;

struct HcConfig {
  static constexpr int streams = 4;
  static constexpr int coefficients = 24;
  static constexpr int sums = 26;   // 24 dot products, squares of the streams, squares of the mix
  static constexpr int slots = 16;  // tokens of a tile: the rows of one matrix product
  static constexpr int chunk = 16;  // channels that a warp takes at once
  static constexpr int units = 64;  // a row's channels are summed in so many parts, added in their order
  static constexpr int pad = 16;    // floats between rows of the mix, so that two rows share no bank
  static constexpr int given = 24;  // coefficients of a token that are read: post, comb, pre
  static constexpr int64_t largest_shared = 232448;
  static constexpr int64_t shared_of_two = 115712;  // of each of two CTAs of a multiprocessor
};

// Chunks that a warp has on their way. A stage holds the streams and y of a chunk: 16 bytes a lane of each.
KC_HD constexpr int hc_halves(int tile) { return tile <= 8 ? 1 : 2; }
KC_HD constexpr int hc_stages(int halves) { return halves == 1 ? 4 : 2; }
KC_HD constexpr int hc_stage_floats(int halves) { return halves * 5 * 32 * 4; }

// Unit u sums chunks u, u + 64, u + 128, ...; a CTA has consecutive units, and its warps neighbouring ones, so that
// they read neighbouring memory at the same time. Units follow from the channels alone, so that a row's bits do not
// depend on the launch.
struct HcPlan {
  int64_t chunks;
  int cluster, units_a_cta;
  int64_t width;  // channels of a CTA, the last ones may be missing
};

KC_HD HcPlan hc_plan(int64_t channels, int cluster) {
  const int64_t chunks = channels / HcConfig::chunk;
  const int64_t each = (chunks + HcConfig::units - 1) / HcConfig::units;
  const int units = HcConfig::units / cluster;
  return {chunks, cluster, units, units * each * HcConfig::chunk};
}

// A CTA keeps its chunks side by side: those of its units, then those of the next 64 chunks. Where chunk k of the row
// stands among them, and back.
KC_HD int hc_local(const HcPlan& plan, int chunk) {
  return chunk / HcConfig::units * plan.units_a_cta + (chunk & (plan.units_a_cta - 1));  // powers of two
}
KC_HD int64_t hc_chunk(const HcPlan& plan, int rank, int64_t local) {
  const int shift = floor_log2(static_cast<uint32_t>(plan.units_a_cta));
  return (local >> shift) * HcConfig::units + rank * plan.units_a_cta + (local & (plan.units_a_cta - 1));
}

// Offsets in floats. totals: the sums of the tokens whose coefficients this CTA computes.
struct HcShared {
  int64_t ring, given, factor, totals, sums, mix, floats;
};

KC_HD HcShared hc_shared(const HcPlan& plan, const HcShape& shape, bool coefficients, bool mixes) {
  const int halves = hc_halves(shape.tile), slots = 8 * halves;
  HcShared s{};
  s.ring = 0;
  s.given = s.ring + shape.warps * hc_stages(halves) * hc_stage_floats(halves);
  s.factor = s.given + slots * HcConfig::given;
  s.totals = s.factor + HcConfig::slots;
  s.sums = s.totals + (coefficients ? slots * HcConfig::sums : 0);
  const bool summed = coefficients || mixes;
  s.mix = s.sums + (summed ? static_cast<int64_t>(plan.units_a_cta) * slots * HcConfig::sums : 0);
  s.floats = s.mix + (mixes ? shape.tile * (plan.width + HcConfig::pad) : 0);
  return s;
}

KC_HD bool hc_known(const HcShape& shape) {
  const bool cluster = shape.cluster >= 1 && shape.cluster <= 16 && (shape.cluster & (shape.cluster - 1)) == 0;
  return cluster && (shape.warps == 4 || shape.warps == 8) && shape.tile >= 1 && shape.tile <= HcConfig::slots;
}

// Whether shared memory is enough for any parts.
KC_HD bool hc_fits(int64_t channels, const HcShape& shape, int64_t most = HcConfig::largest_shared) {
  return hc_known(shape) && hc_shared(hc_plan(channels, shape.cluster), shape, true, true).floats * 4 <= most;
}

// How many clusters of 2^i CTAs run at once with one CTA on a multiprocessor. Those of a cluster stand in one group of
// multiprocessors, so that some stay idle.
struct HcRoom {
  static constexpr int sizes = 5;
  int64_t clusters[sizes];
};

// What is safe to expect where the device was not asked.
KC_HD HcRoom hc_room(int64_t multiprocessors) {
  const int64_t used[HcRoom::sizes] = {132, 132, 112, 96, 64};  // of 132
  HcRoom room{};
  for (int i = 0; i < HcRoom::sizes; ++i) {
    const int64_t count = (multiprocessors * used[i] / 132) >> i;
    room.clusters[i] = count < 1 ? 1 : count;
  }
  return room;
}

// As measured on an H200: the widest cluster whose tiles all run at once, 16 CTAs for a few
// tokens; the work of a token is then spread over as many CTAs as there are. More tokens than that: pairs, and clusters
// of four from 2048 tokens on.
KC_HD HcShape hc_choose(int64_t tokens, int64_t channels, const HcRoom& room) {
  const auto fitting = [&](HcShape shape) {
    while (shape.tile > 1 && !hc_fits(channels, shape)) shape.tile /= 2;
    return shape;
  };
  const HcShape widest{16, 1, 8};
  if (tokens <= room.clusters[4] && hc_fits(channels, widest)) return widest;
  for (int i = 3; i >= 1; --i) {
    const int64_t tile = (tokens + room.clusters[i] - 1) / room.clusters[i];
    if (tile > (i == 1 ? HcConfig::slots / 2 : HcConfig::slots)) continue;
    const HcShape shape{1 << i, static_cast<int>(tile < 1 ? 1 : tile), 8};
    if (hc_fits(channels, shape)) return shape;
  }
  if (tokens < 2048) return fitting({2, HcConfig::slots / 2, 8});
  return fitting({4, HcConfig::slots, 8});
}

}  // namespace mhc_engram::cuda
