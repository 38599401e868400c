// Update, coefficients, mix and norm of a tile of up to 16 tokens by a cluster of CTAs, in one pass over the streams.
//
// A warp takes chunks of 16 channels of all tokens: lane 4 g + c holds channels 4 c to 4 c + 3 of tokens g and g + 8 in
// all streams. These registers are at once what a 16-byte load brings, what the update needs and the left operand of
// the product with fn, whose rows come in the same order; so nothing is exchanged, and the streams are read and
// written once. A lane's copies to shared memory run some chunks ahead of it, and it alone reads them: no barrier
// stands between memory and the arithmetic. Sums over channels go through shared memory: each warp leaves one set for
// each of its units; they are added as a tree of neighbours, first in each CTA, then over the CTAs of the cluster, so
// that the order is that of the units alone. The mix waits in shared memory for its norm.
#pragma once

#include "cuda/sm90/hc_math.cuh"
#include "cuda/sm90/hc_ptx.cuh"
#include "kernel_core/cuda/ptx.cuh"

namespace mhc_engram::cuda {

namespace ptx = kernel_core::ptx;

template <bool Update_, bool Coefficients_, bool Mix_, int Halves_ = 2, int Warps_ = 8, int Channels_ = 0>
struct HcParts {
  static constexpr bool update = Update_, coefficients = Coefficients_, mix = Mix_;
  static constexpr int halves = Halves_;  // of 8 tokens, in a tile
  static constexpr int slots = 8 * halves;
  static constexpr int warps = Warps_, threads = 32 * warps;
  static constexpr int stages = hc_stages(halves);
  static constexpr int channels = Channels_;  // where known, most addresses are one register and a constant
  static constexpr bool lines = false;        // copies that bring whole lines of 128 bytes to the second-level cache
};

// What a lane loads of a chunk: four channels of its tokens in all streams, and y.
template <typename Parts>
struct HcChunk {
  float x[Parts::halves][4][4], y[Parts::halves][4];
};

// A lane's tokens, g and g + 8 of the tile, and where its channels of chunk 0 stand. From there on offsets take 32
// bits.
template <typename Parts>
struct HcTokens {
  float* x[Parts::halves];
  const float* y[Parts::halves];
  bool valid[Parts::halves];

  HcTokens() = default;
  __device__ __forceinline__ HcTokens(const HcParams& p, int64_t first, int count, int lane) {
    MHC_ENGRAM_UNROLL
    for (int h = 0; h < Parts::halves; ++h) {
      const int slot = lane / 4 + 8 * h;
      valid[h] = slot < count;
      const int64_t row = (valid[h] ? first + slot : 0) * (Parts::channels > 0 ? Parts::channels : p.channels);
      x[h] = p.streams + row * HcConfig::streams + lane % 4 * 4;
      if constexpr (Parts::update) y[h] = p.y + row + lane % 4 * 4;
    }
  }
};

// A warp's chunks in their order: those of its first unit, then those of the next one.
template <typename Parts>
struct HcWalk {
  int units, chunks, first, unit, chunk;  // units of the CTA, chunks of the row

  __device__ __forceinline__ HcWalk(const HcPlan& plan, int warp, uint32_t rank)
      : units(plan.units_a_cta),
        chunks(static_cast<int>(plan.chunks)),
        first(static_cast<int>(rank) * plan.units_a_cta),
        unit(warp),
        chunk(first + warp) {}
  __device__ __forceinline__ bool inside() const { return unit < units && chunk < chunks; }
  __device__ __forceinline__ void next() {
    chunk += HcConfig::units;
    if (chunk < chunks) return;
    unit += Parts::warps;
    chunk = first + unit;
  }
};

// The lane's places of a stage, 512 bytes of the warp from one to the next.
template <typename Parts>
__device__ __forceinline__ void copy_piece(uint32_t to, const float* from, bool valid) {
  if constexpr (Parts::lines)
    cp_async_16_of_line(to, from, valid);
  else
    ptx::cp_async_16(to, from, valid);
}

template <typename Parts>
__device__ __forceinline__ void fetch_chunk(const HcTokens<Parts>& of, int channels, int chunk, uint32_t stage) {
  MHC_ENGRAM_UNROLL
  for (int h = 0; h < Parts::halves; ++h) {
    const float* x = of.x[h] + chunk * HcConfig::chunk;
    MHC_ENGRAM_UNROLL
    for (int j = 0; j < 4; ++j)
      copy_piece<Parts>(stage + static_cast<uint32_t>(h * 5 + j) * 512, x + j * channels, of.valid[h]);
    if constexpr (Parts::update)
      copy_piece<Parts>(stage + static_cast<uint32_t>(h * 5 + 4) * 512, of.y[h] + chunk * HcConfig::chunk, of.valid[h]);
  }
}

template <typename Parts>
__device__ __forceinline__ void read_chunk(const float* stage, HcChunk<Parts>& out) {
  MHC_ENGRAM_UNROLL
  for (int h = 0; h < Parts::halves; ++h) {
    MHC_ENGRAM_UNROLL
    for (int j = 0; j < 4; ++j) load_values(stage + (h * 5 + j) * 128, out.x[h][j]);
    if constexpr (Parts::update) load_values(stage + (h * 5 + 4) * 128, out.y[h]);
  }
}

// The lane's part of the 24 rows of fn: [stream][tile of 8 rows][channel]. First that of one stream.
__device__ __forceinline__ void load_weights(const float* fn, int channels, int stream, float (&w)[3][4]) {
  MHC_ENGRAM_UNROLL
  for (int t = 0; t < 3; ++t) load_values(fn + (t * 8 * 4 + stream) * channels, w[t]);
}
__device__ __forceinline__ void load_weights(const float* fn, int channels, float (&w)[4][3][4]) {
  MHC_ENGRAM_UNROLL
  for (int j = 0; j < 4; ++j) load_weights(fn, channels, j, w[j]);
}

struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

// Dot products of the chunk with the rows of fn. Nine sums side by side, since a product waits for the
// one before on the same sum. after(j): w[j] is not read any more.
template <typename Parts, typename After>
__device__ __forceinline__ void chunk_products(const float (&x)[Parts::halves][4][4], const float (&w)[4][3][4],
                                               float (&made)[3][4], After after) {
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
    after(j);
  }
  MHC_ENGRAM_UNROLL
  for (int t = 0; t < 3; ++t) MHC_ENGRAM_UNROLL
  for (int i = 0; i < 4; ++i) made[t][i] = add_rn(add_rn(sum[0][t][i], sum[1][t][i]), sum[2][t][i]);
}

// What a lane sums over the channels of a unit.
template <typename Parts>
struct HcSums {
  float run[3][4], squares[2], mix_squares[2];

  __device__ __forceinline__ void add(const float (&made)[3][4]) {
    MHC_ENGRAM_UNROLL
    for (int t = 0; t < 3; ++t) MHC_ENGRAM_UNROLL
    for (int i = 0; i < 4; ++i) run[t][i] = add_rn(run[t][i], made[t][i]);
  }
};

// One chunk of channels: streams are updated and written, the mix goes to shared memory.
template <typename Parts, typename Sums, typename After = Nothing>
__device__ __forceinline__ void work_on_chunk(const HcPlan& plan, const HcTokens<Parts>& of, int channels, int chunk,
                                              HcChunk<Parts>& now, const float (&w)[4][3][4], const float* given,
                                              float* mix, Sums& sums, int lane, After after = {}) {
  const int g = lane / 4, c = lane % 4, width = static_cast<int>(plan.width) + HcConfig::pad;
  const int local = hc_local(plan, chunk) * HcConfig::chunk + 4 * c;
  MHC_ENGRAM_UNROLL
  for (int h = 0; h < Parts::halves; ++h) {
    const float* mine = given + (g + 8 * h) * HcConfig::given;
    if constexpr (Parts::update) {
      update_streams(now.x[h], now.y[h], mine);
      float* x = of.x[h] + chunk * HcConfig::chunk;
      if (of.valid[h]) MHC_ENGRAM_UNROLL
      for (int j = 0; j < 4; ++j) store_values(x + j * channels, now.x[h][j]);
    }
    if constexpr (Parts::mix) {
      float m[4];
      mix_streams(now.x[h], mine, m);
      MHC_ENGRAM_UNROLL
      for (int e = 0; e < 4; ++e) sums.mix_squares[h] = __fmaf_rn(m[e], m[e], sums.mix_squares[h]);
      if (of.valid[h])
        *reinterpret_cast<float4*>(mix + ((g + 8 * h) * width + local)) = make_float4(m[0], m[1], m[2], m[3]);
    }
    if constexpr (Parts::coefficients) {
      MHC_ENGRAM_UNROLL
      for (int j = 0; j < 4; ++j) MHC_ENGRAM_UNROLL
      for (int e = 0; e < 4; ++e) sums.squares[h] = __fmaf_rn(now.x[h][j][e], now.x[h][j][e], sums.squares[h]);
    }
  }
  if constexpr (Parts::coefficients) {
    float made[3][4];
    chunk_products<Parts>(now.x, w, made, after);
    sums.add(made);
  }
}

// A unit's sums to `out` [slot][26].
template <typename Parts>
__device__ __forceinline__ void write_sums(const HcSums<Parts>& sums, float* out, int lane) {
  const int g = lane / 4, c = lane % 4;
  const auto of_lanes = [&](float v) {
    v = add_rn(v, __shfl_xor_sync(kAllLanes, v, 1));
    return add_rn(v, __shfl_xor_sync(kAllLanes, v, 2));
  };
  MHC_ENGRAM_UNROLL
  for (int h = 0; h < Parts::halves; ++h) {
    float* mine = out + (g + 8 * h) * HcConfig::sums;
    if constexpr (Parts::coefficients) {
      MHC_ENGRAM_UNROLL
      for (int t = 0; t < 3; ++t) MHC_ENGRAM_UNROLL
      for (int i = 0; i < 2; ++i) mine[t * 8 + 2 * c + i] = sums.run[t][2 * h + i];
      const float all = of_lanes(sums.squares[h]);
      if (c == 0) mine[HcConfig::coefficients] = all;
    }
    if constexpr (Parts::mix) {
      const float all = of_lanes(sums.mix_squares[h]);
      if (c == 0) mine[HcConfig::coefficients + 1] = all;
    }
  }
}

// The CTA's part of fn and of the norm's weight on their way to the second-level cache.
template <typename Parts>
__device__ __forceinline__ void prefetch_weights(const HcParams& p, const HcPlan& plan, uint32_t rank, int thread) {
  constexpr int line = 32;  // floats
  const int lines = (plan.units_a_cta * HcConfig::chunk + line - 1) / line;
  const int64_t first = static_cast<int64_t>(rank) * plan.units_a_cta * HcConfig::chunk;
  const int64_t runs = (plan.chunks + HcConfig::units - 1) / HcConfig::units;
  constexpr int rows = HcConfig::coefficients * HcConfig::streams;
  for (int i = thread; i < (rows + 1) * lines; i += Parts::threads) {
    const int row = i / lines;
    const float* from = row < rows ? p.fn + row * p.channels : p.norm_weight;
    if (row < rows ? !Parts::coefficients : !p.norm_weight) continue;
    for (int64_t run = 0; run < runs; ++run) {
      const int64_t channel = run * HcConfig::units * HcConfig::chunk + first + i % lines * line;
      if (channel < p.channels) prefetch_line(from + channel);
    }
  }
}

// Sums of all units of the CTA, as a tree of neighbours: each thread has some places of [slot][26], and what it leaves
// stands in the first unit.
template <typename Parts>
__device__ __forceinline__ void add_units(const HcPlan& plan, float* sums, int thread) {
  constexpr int places = Parts::slots * HcConfig::sums;
  for (int i = thread; i < places; i += Parts::threads)
    for (int step = 1; step < plan.units_a_cta; step *= 2)
      for (int u = 0; u < plan.units_a_cta; u += 2 * step)
        sums[u * places + i] = add_rn(sums[u * places + i], sums[(u + step) * places + i]);
}

// What the CTA has written to shared memory is there for the others of the cluster after this. One warp releases it for
// all: the others would first wait until memory has the streams that they wrote, and the last warp often wrote none.
__device__ __forceinline__ void share_of_cluster(bool releases) {
  __syncthreads();
  if (releases)
    cluster_arrive();
  else
    cluster_arrive_relaxed();
  cluster_wait();
}

// The sum at `place` over the CTAs of the cluster, again as a tree of neighbours.
__device__ __forceinline__ float add_ranks(const float* place, int cluster) {
  constexpr int most = 16;
  float v[most];
  MHC_ENGRAM_UNROLL
  for (int r = 0; r < most; ++r) v[r] = r < cluster ? load_of_rank(place, static_cast<uint32_t>(r)) : 0.0f;
  MHC_ENGRAM_UNROLL
  for (int step = 1; step < most; step *= 2) {
    if (step >= cluster) break;
    MHC_ENGRAM_UNROLL
    for (int r = 0; r < most; r += 2 * step) v[r] = add_rn(v[r], v[r + step]);
  }
  return v[0];
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
template <typename Parts>
__device__ __forceinline__ void write_mixes(const HcParams& p, const HcPlan& plan, const float* mix,
                                            const float* factor, int64_t first, int count, uint32_t rank, int warp,
                                            int lane) {
  constexpr int batch = 4;
  const int pieces = static_cast<int>((plan.width + 127) / 128);
  for (int piece = warp; piece < pieces; piece += Parts::warps) {
    const int64_t local = piece * 128 + 4 * lane;
    const int64_t chunk = hc_chunk(plan, static_cast<int>(rank), local / HcConfig::chunk);
    const int64_t channel = chunk * HcConfig::chunk + local % HcConfig::chunk;
    const bool inside = local < plan.width && chunk < plan.chunks;
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

// cold: weights come from memory, not from the second-level cache.
template <typename Parts>
__device__ __forceinline__ void hc_block(const HcParams& p, const HcShape& shape, bool cold, int64_t tile_index,
                                         uint32_t rank, float* shared) {
  const int thread = cta_thread(), warp = thread / 32, lane = thread % 32;
  const int d = Parts::channels > 0 ? Parts::channels : static_cast<int>(p.channels);
  const HcPlan plan = hc_plan(d, shape.cluster);
  const HcShared at = hc_shared(plan, shape, Parts::coefficients, Parts::mix);
  float *given = shared + at.given, *factor = shared + at.factor, *sums = shared + at.sums, *mix = shared + at.mix;
  const int64_t first = tile_index * shape.tile;
  const int count = static_cast<int>(min(static_cast<int64_t>(shape.tile), p.tokens - first));

  const HcTokens<Parts> of(p, first, count, lane);
  constexpr int stage_floats = hc_stage_floats(Parts::halves);
  float* ring = shared + at.ring + warp * Parts::stages * stage_floats + lane * 4;
  const uint32_t into = ptx::shared_address(ring);
  HcWalk<Parts> ahead(plan, warp, rank);
  const auto fetch = [&](int stage) {
    if (ahead.inside()) {
      fetch_chunk<Parts>(of, d, ahead.chunk, into + static_cast<uint32_t>(stage * stage_floats * 4));
      ahead.next();
    }
    ptx::cp_async_commit();
  };
  MHC_ENGRAM_UNROLL
  for (int stage = 0; stage < Parts::stages; ++stage) fetch(stage);
  if ((Parts::coefficients || Parts::mix) && cold) prefetch_weights<Parts>(p, plan, rank, thread);
  HcLogit logit{};
  if constexpr (Parts::coefficients) logit = load_logit(p, lane);

  for (int i = thread; i < Parts::slots * HcConfig::given; i += Parts::threads) {
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

  const float* fn = p.fn + (lane / 4) * 4 * d + 4 * (lane % 4);
  int stage = 0;
  for (int unit = warp; unit < plan.units_a_cta; unit += Parts::warps) {
    HcSums<Parts> run{};
    for (int chunk = ahead.first + unit; chunk < ahead.chunks; chunk += HcConfig::units) {
      float w[4][3][4];
      if constexpr (Parts::coefficients) load_weights(fn + chunk * HcConfig::chunk, d, w);
      ptx::cp_async_wait<Parts::stages - 1>();
      HcChunk<Parts> now;
      read_chunk<Parts>(ring + stage * stage_floats, now);
      fetch(stage);  // into the place that was just read
      stage = stage + 1 == Parts::stages ? 0 : stage + 1;
      work_on_chunk<Parts>(plan, of, d, chunk, now, w, given, mix, run, lane);
    }
    if constexpr (Parts::coefficients || Parts::mix)
      write_sums<Parts>(run, sums + unit * Parts::slots * HcConfig::sums, lane);
  }
  if constexpr (!Parts::coefficients && !Parts::mix) return;
  __syncthreads();
  add_units<Parts>(plan, sums, thread);
  share_of_cluster(warp == Parts::warps - 1);

  if constexpr (Parts::mix) {
    if (p.norm_weight && thread < Parts::slots) {
      const float sum = add_ranks(sums + thread * HcConfig::sums + HcConfig::coefficients + 1, shape.cluster);
      factor[thread] = inverse_rms(sum, static_cast<float>(p.channels), p.eps);
    }
  }
  // Tokens of the tile go to the CTAs in turn, and there to the warps.
  float* totals = shared + at.totals;
  const int step = Parts::warps * shape.cluster;
  if constexpr (Parts::coefficients) {
    for (int slot = static_cast<int>(rank) + warp * shape.cluster; slot < count; slot += step)
      if (lane <= HcConfig::coefficients)
        totals[slot * HcConfig::sums + lane] = add_ranks(sums + slot * HcConfig::sums + lane, shape.cluster);
  }
  cluster_arrive_relaxed();  // this CTA reads no other one's memory any more
  if constexpr (Parts::mix) {
    __syncthreads();
    write_mixes<Parts>(p, plan, mix, factor, first, count, rank, warp, lane);
  }
  if constexpr (Parts::coefficients) {
    for (int slot = static_cast<int>(rank) + warp * shape.cluster; slot < count; slot += step) {
      const float total = lane <= HcConfig::coefficients ? totals[slot * HcConfig::sums + lane] : 0.0f;
      write_coefficients(p, logit, first + slot, total, lane);
    }
  }
  cluster_wait();  // and no other CTA reads this one's
}

}  // namespace mhc_engram::cuda
