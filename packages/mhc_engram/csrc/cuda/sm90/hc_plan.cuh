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
  static constexpr int warps = 8;
  static constexpr int threads = warps * 32;
  static constexpr int pad = 16;    // floats between rows of the mix, so that two rows share no bank
  static constexpr int given = 24;  // coefficients of a token that are read: post, comb, pre
  static constexpr int64_t largest_shared = 232448;
};

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
KC_HD int64_t hc_local(const HcPlan& plan, int64_t chunk) {
  return chunk / HcConfig::units * plan.units_a_cta + (chunk & (plan.units_a_cta - 1));  // powers of two
}
KC_HD int64_t hc_chunk(const HcPlan& plan, int rank, int64_t local) {
  const int shift = floor_log2(static_cast<uint32_t>(plan.units_a_cta));
  return (local >> shift) * HcConfig::units + rank * plan.units_a_cta + (local & (plan.units_a_cta - 1));
}

// Offsets in floats.
struct HcShared {
  int64_t given, factor, sums, mix, floats;
};

KC_HD HcShared hc_shared(const HcPlan& plan, int tile, bool mixes) {
  HcShared s{};
  s.given = 0;
  s.factor = s.given + HcConfig::slots * HcConfig::given;
  s.sums = s.factor + HcConfig::slots;
  s.mix = s.sums + static_cast<int64_t>(plan.units_a_cta) * HcConfig::slots * HcConfig::sums;
  s.floats = s.mix + (mixes ? tile * (plan.width + HcConfig::pad) : 0);
  return s;
}

KC_HD bool hc_fits(int64_t channels, const HcShape& shape, bool mixes) {
  const bool known = shape.cluster == 1 || shape.cluster == 2 || shape.cluster == 4 || shape.cluster == 8;
  if (!known || shape.tile < 1 || shape.tile > HcConfig::slots) return false;
  return hc_shared(hc_plan(channels, shape.cluster), shape.tile, mixes).floats * 4 <= HcConfig::largest_shared;
}

// Few tokens are spread over all multiprocessors; many are packed, so that the product's matrix is read seldom.
KC_HD HcShape hc_choose(int64_t tokens, int64_t channels, int64_t multiprocessors) {
  const auto tile_for = [&](int cluster) {
    const int64_t clusters = multiprocessors / cluster < 1 ? 1 : multiprocessors / cluster;
    const int64_t each = (tokens + clusters - 1) / clusters;
    return static_cast<int>(each < 1 ? 1 : each > HcConfig::slots ? HcConfig::slots : each);
  };
  const int first = tokens * 8 <= multiprocessors * 16 ? 8 : tokens * 4 <= multiprocessors * 16 ? 4 : 2;
  for (int cluster = first; cluster <= 8; cluster *= 2) {
    const HcShape shape{cluster, tile_for(cluster)};
    if (hc_fits(channels, shape, true)) return shape;
  }
  HcShape shape{8, HcConfig::slots};
  while (shape.tile > 1 && !hc_fits(channels, shape, true)) --shape.tile;
  return shape;
}

}  // namespace mhc_engram::cuda
