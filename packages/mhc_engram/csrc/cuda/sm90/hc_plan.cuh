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
  static constexpr int64_t usual = 5120;            // channels of the model that instances are made for
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

// What a staying cluster's instance is cut to: slots of its tile, groups of 16 tokens that a warp takes in turn and has
// on their way, parts of the tile side by side, fn in shared memory or not.
struct HcStayCut {
  int slots, groups, across, stages;
  bool kept;
};

KC_HD HcStayCut hc_stay_cut(const HcShape& shape) {
  if (shape.stay == 2) return {32, 1, 2, 1, true};
  const int groups = (shape.tile + 15) / 16;
  return {16 * groups, groups, 1, groups == 3 ? 1 : 2, false};
}

// Offsets in floats. given: of this tile and of the next one. weights: of the norm.
struct HcStayShared {
  int64_t ring, given, factor, weights, totals, sums, squares, mix, kept, floats;
};

KC_HD HcStayShared hc_stay_shared(const HcPlan& plan, const HcShape& shape, const HcStayCut& cut) {
  constexpr int workers = 8, quad = 4;
  const int own = (cut.slots + plan.cluster - 1) / plan.cluster;  // tokens whose coefficients a CTA writes
  HcStayShared s{};
  s.ring = 0;
  s.given = s.ring + workers * cut.stages * hc_stage_floats(2);
  s.factor = s.given + 2 * cut.slots * HcConfig::given;
  s.weights = s.factor + cut.slots;
  s.totals = s.weights + plan.width;
  s.sums = s.totals + (own * HcConfig::sums + quad - 1) / quad * quad;
  s.squares = s.sums + static_cast<int64_t>(plan.units_a_cta) * cut.slots * HcConfig::sums;
  s.mix = s.squares + (cut.groups == 3 ? workers * cut.groups * 128 : 0);
  s.kept = s.mix + shape.tile * (plan.width + HcConfig::pad);
  s.floats = s.kept + (cut.kept ? plan.width * HcConfig::coefficients * HcConfig::streams : 0);
  return s;
}

// Instances with fn in shared memory, and those that take more than 16 tokens with one reading of it, are made for the
// usual width alone, and each for the cluster that has the room.
KC_HD bool hc_known(int64_t channels, const HcShape& shape) {
  const bool cluster = shape.cluster >= 1 && shape.cluster <= 16 && (shape.cluster & (shape.cluster - 1)) == 0;
  if (!cluster || shape.tile < 1 || shape.stay < 0 || shape.stay > 2) return false;
  if (!shape.stay) return (shape.warps == 4 || shape.warps == 8) && shape.tile <= HcConfig::slots;
  if (shape.warps != 8 || shape.cluster < 4) return false;
  if (shape.stay == 2) return channels == HcConfig::usual && shape.cluster == 16 && shape.tile <= 32;
  return shape.tile <= HcConfig::slots || (channels == HcConfig::usual && shape.cluster == 8 && shape.tile <= 48);
}

// Whether shared memory is enough for any parts.
KC_HD bool hc_fits(int64_t channels, const HcShape& shape, int64_t most = HcConfig::largest_shared) {
  if (!hc_known(channels, shape)) return false;
  const HcPlan plan = hc_plan(channels, shape.cluster);
  const int64_t floats =
      shape.stay ? hc_stay_shared(plan, shape, hc_stay_cut(shape)).floats : hc_shared(plan, shape, true, true).floats;
  return floats * 4 <= most;
}

// The shape with as large a tile as shared memory has room for.
KC_HD HcShape hc_fitting(int64_t channels, HcShape shape) {
  while (shape.tile > 1 && !hc_fits(channels, shape)) shape.tile /= 2;
  return shape;
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

// Clusters that stay, in as few rounds as tiles of `most` tokens allow, each tile as small as these rounds do.
KC_HD HcShape hc_staying(int64_t tokens, int64_t clusters, int cluster, int64_t most) {
  const int64_t rounds = (tokens + clusters * most - 1) / (clusters * most);
  const int64_t tile = (tokens + clusters * rounds - 1) / (clusters * rounds);
  return {cluster, static_cast<int>(tile < 1 ? 1 : tile), 8, 1};
}

// Many tokens in clusters that take one tile, as measured on an H200: pairs, and clusters of four from 2048 tokens on.
KC_HD HcShape hc_of_many(int64_t tokens, int64_t channels) {
  if (tokens < 2048) return hc_fitting(channels, {2, HcConfig::slots / 2, 8});
  return hc_fitting(channels, {4, HcConfig::slots, 8});
}

// As measured on an H200: the widest cluster whose tiles all run at once, 16 CTAs for a few tokens; the work of a token
// is then spread over as many CTAs as there are. More tokens than that: by an estimate, clusters of eight that stay,
// where the width has an instance of them.
KC_HD HcShape hc_choose(int64_t tokens, int64_t channels, const HcRoom& room) {
  const HcShape widest{16, 1, 8};
  if (tokens <= room.clusters[4] && hc_fits(channels, widest)) return widest;
  if (tokens > 256) {
    const HcShape staying = hc_staying(tokens, room.clusters[3], 8, 32);
    if (hc_fits(channels, staying)) return staying;
  }
  for (int i = 3; i >= 1; --i) {
    const int64_t tile = (tokens + room.clusters[i] - 1) / room.clusters[i];
    if (tile > (i == 1 ? HcConfig::slots / 2 : HcConfig::slots)) continue;
    const HcShape shape{1 << i, static_cast<int>(tile < 1 ? 1 : tile), 8};
    if (hc_fits(channels, shape)) return shape;
  }
  return hc_of_many(tokens, channels);
}

}  // namespace mhc_engram::cuda
