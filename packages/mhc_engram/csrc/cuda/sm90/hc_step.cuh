// Update, coefficients, mix and norm of a tile of up to 16 tokens by a cluster of CTAs, in one pass over the streams.
//
// A warp takes chunks of 16 channels of all tokens: lane 4 g + c holds channels 4 c to 4 c + 3 of tokens g and g + 8 in
// all streams. These registers are at once what a 16-byte load brings, what the update needs and the left operand of
// the product with fn, whose rows come in the same order; so nothing is exchanged, and the streams are read and
// written once. Sums over channels go through shared memory: each warp leaves one set for each of its units, and after
// the cluster's barrier they are added in the units' order. The mix waits in shared memory for its norm.
#pragma once

#include "cuda/sm90/hc_math.cuh"
#include "cuda/sm90/hc_ptx.cuh"

namespace mhc_engram::cuda {

template <bool Update_, bool Coefficients_, bool Mix_, int Halves_ = 2>
struct HcParts {
  static constexpr bool update = Update_, coefficients = Coefficients_, mix = Mix_;
  static constexpr int halves = Halves_;  // of 8 tokens, in a tile
};

// What a lane loads of a chunk: four channels of its tokens in all streams, and y.
template <typename Parts>
struct HcChunk {
  float x[Parts::halves][4][4], y[Parts::halves][4];
};

// A lane's tokens: g and g + 8 of the tile.
template <typename Parts>
struct HcTokens {
  int64_t token[Parts::halves];
  bool valid[Parts::halves];
};

template <typename Parts>
__device__ __forceinline__ void load_chunk(const HcParams& p, const HcTokens<Parts>& of, int64_t channel,
                                           HcChunk<Parts>& out) {
  MHC_ENGRAM_UNROLL
  for (int h = 0; h < Parts::halves; ++h) {
    if (!of.valid[h]) continue;
    MHC_ENGRAM_UNROLL
    for (int j = 0; j < 4; ++j) load_values(p.streams + (of.token[h] * 4 + j) * p.channels + channel, out.x[h][j]);
    if constexpr (Parts::update) load_values(p.y + of.token[h] * p.channels + channel, out.y[h]);
  }
}

// The lane's part of the 24 rows of fn: [stream][tile of 8 rows][channel].
__device__ __forceinline__ void load_weights(const float* fn, int64_t channels, float (&w)[4][3][4]) {
  MHC_ENGRAM_UNROLL
  for (int j = 0; j < 4; ++j) MHC_ENGRAM_UNROLL
  for (int t = 0; t < 3; ++t) load_values(fn + (t * 8 * 4 + j) * channels, w[j][t]);
}

// Dot products of the chunk with the rows of fn, added to `run`. Nine sums side by side, since a product waits for the
// one before on the same sum.
template <typename Parts>
__device__ __forceinline__ void chunk_products(const float (&x)[Parts::halves][4][4], const float (&w)[4][3][4],
                                               float (&run)[3][4]) {
  constexpr int upper = Parts::halves - 1;
  float sum[3][3][4] = {};
  MHC_ENGRAM_UNROLL
  for (int j = 0; j < 4; ++j) {
    MHC_ENGRAM_UNROLL
    for (int s = 0; s < 4; s += 2) {
      Tf32 a[4] = {split_tf32(x[0][j][s]), split_tf32(x[upper][j][s]), split_tf32(x[0][j][s + 1]),
                   split_tf32(x[upper][j][s + 1])};
      if (Parts::halves == 1) a[1] = a[3] = {0, 0};
      MHC_ENGRAM_UNROLL
      for (int t = 0; t < 3; ++t) {
        const Tf32 b[2] = {split_tf32(w[j][t][s]), split_tf32(w[j][t][s + 1])};
        product_tf32(sum[0][t], a[0].rest, a[1].rest, a[2].rest, a[3].rest, b[0].upper, b[1].upper);
        product_tf32(sum[1][t], a[0].upper, a[1].upper, a[2].upper, a[3].upper, b[0].rest, b[1].rest);
        product_tf32(sum[2][t], a[0].upper, a[1].upper, a[2].upper, a[3].upper, b[0].upper, b[1].upper);
      }
    }
  }
  MHC_ENGRAM_UNROLL
  for (int t = 0; t < 3; ++t) MHC_ENGRAM_UNROLL
  for (int i = 0; i < 4; ++i) run[t][i] = add_rn(run[t][i], add_rn(add_rn(sum[0][t][i], sum[1][t][i]), sum[2][t][i]));
}

// The unit's channels of the tile; its sums go to `sums` [slot][26]. While a chunk is worked on, the next one and its
// part of fn are on their way.
template <typename Parts>
__device__ __forceinline__ void stream_unit(const HcParams& p, const HcPlan& plan, const HcTokens<Parts>& of,
                                            int64_t unit, const float* given, float* mix, float* sums, int lane) {
  const int g = lane / 4, c = lane % 4;
  const int64_t d = p.channels;
  float run[3][4] = {}, squares[2] = {}, mix_squares[2] = {};
  constexpr int step = HcConfig::units;
  HcChunk<Parts> next = {};
  if (unit < plan.chunks) load_chunk<Parts>(p, of, unit * HcConfig::chunk + 4 * c, next);
  for (int64_t k = unit; k < plan.chunks; k += step) {
    const int64_t channel = k * HcConfig::chunk + 4 * c;
    HcChunk<Parts> now = next;
    float w[4][3][4];
    if constexpr (Parts::coefficients) load_weights(p.fn + g * 4 * d + channel, d, w);
    if (k + step < plan.chunks) load_chunk<Parts>(p, of, channel + step * HcConfig::chunk, next);
    MHC_ENGRAM_UNROLL
    for (int h = 0; h < Parts::halves; ++h) {
      const float* mine = given + (g + 8 * h) * HcConfig::given;
      if constexpr (Parts::update) {
        update_streams(now.x[h], now.y[h], mine);
        if (of.valid[h]) MHC_ENGRAM_UNROLL
        for (int j = 0; j < 4; ++j) store_values(p.streams + (of.token[h] * 4 + j) * d + channel, now.x[h][j]);
      }
      if constexpr (Parts::mix) {
        float m[4];
        mix_streams(now.x[h], mine, m);
        MHC_ENGRAM_UNROLL
        for (int e = 0; e < 4; ++e) mix_squares[h] = __fmaf_rn(m[e], m[e], mix_squares[h]);
        float* to = mix + (g + 8 * h) * (plan.width + HcConfig::pad) + hc_local(plan, k) * HcConfig::chunk + 4 * c;
        if (of.valid[h]) *reinterpret_cast<float4*>(to) = make_float4(m[0], m[1], m[2], m[3]);
      }
      if constexpr (Parts::coefficients) {
        MHC_ENGRAM_UNROLL
        for (int j = 0; j < 4; ++j) MHC_ENGRAM_UNROLL
        for (int e = 0; e < 4; ++e) squares[h] = __fmaf_rn(now.x[h][j][e], now.x[h][j][e], squares[h]);
      }
    }
    if constexpr (Parts::coefficients) chunk_products<Parts>(now.x, w, run);
  }
  MHC_ENGRAM_UNROLL
  for (int h = 0; h < Parts::halves; ++h) {
    float* out = sums + (g + 8 * h) * HcConfig::sums;
    const auto of_lanes = [&](float v) {
      v = add_rn(v, __shfl_xor_sync(kAllLanes, v, 1));
      return add_rn(v, __shfl_xor_sync(kAllLanes, v, 2));
    };
    if constexpr (Parts::coefficients) {
      MHC_ENGRAM_UNROLL
      for (int t = 0; t < 3; ++t) MHC_ENGRAM_UNROLL
      for (int i = 0; i < 2; ++i) out[t * 8 + 2 * c + i] = run[t][2 * h + i];
      const float all = of_lanes(squares[h]);
      if (c == 0) out[HcConfig::coefficients] = all;
    }
    if constexpr (Parts::mix) {
      const float all = of_lanes(mix_squares[h]);
      if (c == 0) out[HcConfig::coefficients + 1] = all;
    }
  }
}

// Sum number `which` of a slot in unit `u` of the row, in whichever CTA it is.
__device__ __forceinline__ float unit_sum(const float* sums, const HcPlan& plan, int u, int slot, int which) {
  const int local = u & (plan.units_a_cta - 1);  // powers of two
  return load_of_rank(sums + (local * HcConfig::slots + slot) * HcConfig::sums + which,
                      static_cast<uint32_t>(u * plan.cluster / HcConfig::units));
}

// Four channels of a token: norm, result, and codes with one scale for 32 channels (8 lanes). `v` is the mix.
__device__ __forceinline__ void write_mix(const HcParams& p, float (&v)[4], const float (&weight)[4], float factor,
                                          int64_t token, int64_t channel, bool inside) {
  if (p.norm_weight) {
    MHC_ENGRAM_UNROLL
    for (int e = 0; e < 4; ++e) v[e] = mul_rn(mul_rn(v[e], factor), weight[e]);
  }
  if (p.mixed && inside) store_values(p.mixed + token * p.channels + channel, v);
  if (!p.codes) return;
  uint32_t largest = 0;
  MHC_ENGRAM_UNROLL
  for (int e = 0; e < 4; ++e) largest = max(largest, magnitude_bits(v[e]));
  const GroupScale scale = group_scale(WindowRow{}, lanes_max<8>(largest));
  if (!inside) return;
  uint32_t word = 0;
  MHC_ENGRAM_UNROLL
  for (int e = 0; e < 4; ++e) word |= encode_scaled<WindowRow>(v[e], scale) << (8 * e);
  *reinterpret_cast<uint32_t*>(p.codes + token * p.channels + channel) = word;
  if (channel % 32 == 0) p.code_scales[(token * p.channels + channel) / 32] = static_cast<uint8_t>(scale.byte);
}

// The CTA's channels of all tokens, 128 a warp at a time; four tokens are read before the first is written.
__device__ __forceinline__ void write_mixes(const HcParams& p, const HcPlan& plan, const float* mix,
                                            const float* factor, int64_t first, int count, uint32_t rank, int warp,
                                            int lane) {
  constexpr int batch = 4;
  const int pieces = static_cast<int>(plan.width / 128);  // whole: a CTA has at least 8 units
  for (int piece = warp; piece < pieces; piece += HcConfig::warps) {
    const int64_t local = piece * 128 + 4 * lane;
    const int64_t chunk = hc_chunk(plan, static_cast<int>(rank), local / HcConfig::chunk);
    const int64_t channel = chunk * HcConfig::chunk + local % HcConfig::chunk;
    const bool inside = chunk < plan.chunks;
    float weight[4] = {};
    if (p.norm_weight && inside) load_values(p.norm_weight + channel, weight);
    for (int slot = 0; slot < count; slot += batch) {
      float v[batch][4] = {}, scale[batch] = {};
      MHC_ENGRAM_UNROLL
      for (int i = 0; i < batch; ++i) {
        if (slot + i >= count) continue;
        if (inside) load_values(mix + (slot + i) * (plan.width + HcConfig::pad) + local, v[i]);
        scale[i] = factor[slot + i];
      }
      MHC_ENGRAM_UNROLL
      for (int i = 0; i < batch; ++i)
        if (slot + i < count) write_mix(p, v[i], weight, scale[i], first + slot + i, channel, inside);
    }
  }
}

template <typename Parts>
__device__ __forceinline__ void hc_block(const HcParams& p, const HcShape& shape, int64_t tile_index, uint32_t rank,
                                         float* shared) {
  const int thread = cta_thread(), warp = thread / 32, lane = thread % 32;
  const HcPlan plan = hc_plan(p.channels, shape.cluster);
  const HcShared at = hc_shared(plan, shape.tile, Parts::mix);
  float *given = shared + at.given, *factor = shared + at.factor, *sums = shared + at.sums, *mix = shared + at.mix;
  const int64_t first = tile_index * shape.tile;
  const int count = static_cast<int>(min(static_cast<int64_t>(shape.tile), p.tokens - first));

  for (int i = thread; i < HcConfig::slots * HcConfig::given; i += HcConfig::threads) {
    const int slot = i / HcConfig::given, k = i % HcConfig::given;
    float v = 0;
    if (slot < count) {
      if (k < 4 && Parts::update) v = p.post[(first + slot) * 4 + k];
      if (k >= 4 && k < 20 && Parts::update) v = p.comb[(first + slot) * 16 + k - 4];
      if (k >= 20 && Parts::mix) v = p.pre_mix[(first + slot) * 4 + k - 20];
    }
    given[i] = v;
  }
  __syncthreads();

  HcTokens<Parts> of;
  MHC_ENGRAM_UNROLL
  for (int h = 0; h < Parts::halves; ++h) {
    const int slot = lane / 4 + 8 * h;
    of.token[h] = first + slot, of.valid[h] = slot < count;
  }
  for (int u = warp; u < plan.units_a_cta; u += HcConfig::warps)
    stream_unit<Parts>(p, plan, of, static_cast<int64_t>(rank) * plan.units_a_cta + u, given, mix,
                       sums + u * HcConfig::slots * HcConfig::sums, lane);
  if constexpr (!Parts::coefficients && !Parts::mix) return;
  cluster_arrive();
  cluster_wait();

  if constexpr (Parts::mix) {
    for (int slot = warp; slot < count && p.norm_weight; slot += HcConfig::warps) {
      float sum = 0;
      for (int u = lane; u < HcConfig::units; u += 32)
        sum = add_rn(sum, unit_sum(sums, plan, u, slot, HcConfig::coefficients + 1));
      sum = warp_sum(sum);
      if (lane == 0) factor[slot] = inverse_rms(sum, static_cast<float>(p.channels), p.eps);
    }
  }
  // Tokens of the tile go to the CTAs in turn, and there to the warps.
  constexpr int most = HcConfig::slots / HcConfig::warps;
  float total[most] = {};
  if constexpr (Parts::coefficients) {
    MHC_ENGRAM_UNROLL
    for (int i = 0; i < most; ++i) {
      const int slot = static_cast<int>(rank) + (warp + i * HcConfig::warps) * shape.cluster;
      if (slot >= count || lane > HcConfig::coefficients) continue;
      MHC_ENGRAM_UNROLL_32
      for (int u = 0; u < HcConfig::units; ++u) total[i] = add_rn(total[i], unit_sum(sums, plan, u, slot, lane));
    }
  }
  cluster_arrive();  // this CTA reads no other one's memory any more
  if constexpr (Parts::mix) {
    __syncthreads();
    write_mixes(p, plan, mix, factor, first, count, rank, warp, lane);
  }
  if constexpr (Parts::coefficients) {
    MHC_ENGRAM_UNROLL
    for (int i = 0; i < most; ++i) {
      const int slot = static_cast<int>(rank) + (warp + i * HcConfig::warps) * shape.cluster;
      if (slot < count) write_coefficients(p, first + slot, total[i], lane);
    }
  }
  cluster_wait();  // and no other CTA reads this one's
}

}  // namespace mhc_engram::cuda
