// The whole step for many tokens: a cluster stays and takes tiles in turn, and copies of the next tile run ahead while
// it adds up and writes the one before.
//
// The arithmetic is that of hc_step.cuh, sum for sum. What differs is what waits for what. A tile has up to 48 tokens:
// a warp reads its chunk of fn once and goes through groups of 16 tokens with it, so that the second-level cache gives
// fn a third or half as often; or it finds its chunk in shared memory, where a cluster of 16 has room for its part
// (`Kept`). Eight warps take chunks, with most of the registers. Four more bring the coefficients of the next tile and
// write those of the tile before: 39 dependent steps for each token, for which no chunk waits.
#pragma once

#include "cuda/sm90/hc_step.cuh"

namespace mhc_engram::cuda {

// Groups: of 16 tokens that a warp takes with one reading of fn. Across: parts of the tile that have warps of their
// own. Stages: groups that a warp has on their way.
template <bool Update_, int Groups_, int Across_, int Stages_, bool Kept_, int Channels_ = 0, int Cluster_ = 0>
struct HcStay {
  static constexpr bool update = Update_, coefficients = true, mix = true, kept = Kept_;
  static constexpr int halves = 2, groups = Groups_, across = Across_, stages = Stages_;
  static constexpr int slots = 16 * groups * across;
  static constexpr int workers = 8, abreast = workers / across, helpers = 4, warps = workers + helpers;
  static constexpr int threads = 32 * warps;
  static constexpr int most = 224, least = 56;  // registers of a worker and of a helper: 168 for each of 384 threads
  static constexpr int channels = Channels_, cluster = Cluster_;  // where known, places and strides are constants
  static constexpr bool lines = true;
  static constexpr HcStayCut cut{slots, groups, across, stages, kept};
};

// A lane's tokens of a tile: the first one, and how many tokens of the tile come from there on. Others stand at
// constant offsets where the width is known; of those that are not there nothing is read.
struct HcTile {
  int row, left;

  template <typename Parts>
  __device__ __forceinline__ HcTokens<Parts> group(const HcParams& p, int group, int channels, int lane) const {
    const int64_t at = static_cast<int64_t>(row) * channels;
    HcTokens<Parts> of;
    MHC_ENGRAM_UNROLL
    for (int h = 0; h < Parts::halves; ++h) {
      const int skip = 16 * group + 8 * h;
      of.x[h] = p.streams + at * HcConfig::streams + lane % 4 * 4 + skip * HcConfig::streams * channels;
      if constexpr (Parts::update) of.y[h] = p.y + at + lane % 4 * 4 + skip * channels;
      of.valid[h] = skip < left;
    }
    return of;
  }
};

// A warp's chunks in their order: those of its first unit, of its next one, then those of its next tile.
template <typename Parts>
struct HcChunks {
  int units, chunks, first, unit_of_warp;  // units of the CTA, chunks of the row

  __device__ __forceinline__ HcChunks(const HcPlan& plan, int warp, uint32_t rank)
      : units(plan.units_a_cta),
        chunks(Parts::channels > 0 ? Parts::channels / HcConfig::chunk : static_cast<int>(plan.chunks)),
        first(static_cast<int>(rank) * plan.units_a_cta),
        unit_of_warp(Parts::across == 1 ? warp : warp % Parts::abreast) {}
  __device__ __forceinline__ int begin() const { return first + unit_of_warp; }
  __device__ __forceinline__ bool none() const { return unit_of_warp >= units || begin() >= chunks; }
  // After the last one the first one again.
  __device__ __forceinline__ void next(int& unit, int& chunk) const {
    chunk += HcConfig::units;
    if (chunk < chunks) return;
    unit += Parts::abreast;
    if (unit >= units || first + unit >= chunks) unit = unit_of_warp;
    chunk = first + unit;
  }
};

// The coefficients that tile `first` is updated and mixed with, by `threads` threads.
template <typename Parts>
__device__ __forceinline__ void read_given(const HcParams& p, int64_t first, int count, float* given, int thread,
                                           int threads) {
  constexpr int n = HcConfig::streams, quads = HcConfig::given / n;  // post, comb, pre: 16 bytes at a time
  MHC_ENGRAM_ROLLED
  for (int i = thread; i < Parts::slots * quads; i += threads) {
    const int slot = i / quads, quad = i % quads;
    float v[n] = {};
    if (slot < count) {
      const int64_t token = first + slot;
      const float* from = quad == 0 ? p.post + token * n
                                    : (quad == quads - 1 ? p.pre_mix + token * n : p.comb + (token * n + quad - 1) * n);
      if (Parts::update || quad == quads - 1) MHC_ENGRAM_UNROLL
      for (int k = 0; k < n; ++k) v[k] = from[k];
    }
    MHC_ENGRAM_UNROLL
    for (int k = 0; k < n; ++k) given[i * n + k] = v[k];
  }
}

// The CTA's part of fn to shared memory, as its lanes read it: [chunk][stream][tile of 8 rows][lane][4].
__device__ __forceinline__ void keep_weights(const HcParams& p, const HcPlan& plan, int d, uint32_t rank, uint32_t kept,
                                             int warp, int warps, int lane) {
  constexpr int pieces = 12;
  const int places = static_cast<int>(plan.width) / HcConfig::chunk;
  for (int i = warp; i < places * pieces; i += warps) {
    const int64_t chunk = hc_chunk(plan, static_cast<int>(rank), i / pieces);
    const int j = i % pieces / 3, row = i % pieces % 3 * 8 + lane / 4;
    const bool inside = chunk < plan.chunks;
    const float* from = p.fn + (row * 4 + j) * d + (inside ? chunk : 0) * HcConfig::chunk + 4 * (lane % 4);
    ptx::cp_async_16(kept + static_cast<uint32_t>(i) * 512 + static_cast<uint32_t>(lane) * 16, from, inside);
  }
}

__device__ __forceinline__ void read_kept(const float* chunk, float (&w)[4][3][4]) {
  MHC_ENGRAM_UNROLL
  for (int j = 0; j < 4; ++j) MHC_ENGRAM_UNROLL
  for (int t = 0; t < 3; ++t) load_values(chunk + (j * 3 + t) * 128, w[j][t]);
}

// As add_units, with all units of a place read at once: at most 16.
template <typename Parts>
__device__ __forceinline__ void add_few_units(int units, float* sums, int thread) {
  constexpr int most = 16, places = Parts::slots * HcConfig::sums;
  for (int i = thread; i < places; i += Parts::threads) {
    float v[most];
    MHC_ENGRAM_UNROLL
    for (int u = 0; u < most; ++u) v[u] = u < units ? sums[u * places + i] : 0.0f;
    MHC_ENGRAM_UNROLL
    for (int step = 1; step < most; step *= 2) {
      if (step >= units) break;
      MHC_ENGRAM_UNROLL
      for (int u = 0; u < most; u += 2 * step) v[u] = add_rn(v[u], v[u + step]);
    }
    sums[i] = v[0];
  }
}

// The CTA's channels of all tokens of the tile: items of 128 channels of four tokens go to the warps in turn.
template <typename Parts>
__device__ __forceinline__ void write_tile(const HcParams& p, const HcPlan& plan, const float* mix, const float* factor,
                                           const float* weights, int64_t first, int count, uint32_t rank, int warp,
                                           int lane) {
  constexpr int batch = 4;
  const int width = static_cast<int>(plan.width), pieces = (width + 127) / 128;
  const int items = (count + batch - 1) / batch * pieces;
  for (int item = warp; item < items; item += Parts::workers) {
    const int slot = item / pieces * batch, local = item % pieces * 128 + 4 * lane;
    const int64_t chunk = hc_chunk(plan, static_cast<int>(rank), local / HcConfig::chunk);
    const int64_t channel = chunk * HcConfig::chunk + local % HcConfig::chunk;
    const bool inside = local < width && chunk < plan.chunks;
    float weight[4] = {}, v[batch][4] = {}, scale[batch] = {};
    if (inside) load_values(weights + local, weight);
    MHC_ENGRAM_UNROLL
    for (int i = 0; i < batch; ++i) {
      if (slot + i >= count) continue;
      if (inside) load_values(mix + (slot + i) * (width + HcConfig::pad) + local, v[i]);
      scale[i] = factor[slot + i];
    }
    MHC_ENGRAM_UNROLL
    for (int i = 0; i < batch; ++i)
      if (slot + i < count) write_mix(p, v[i], weight, scale[i], first + slot + i, channel, inside);
  }
}

// What both kinds of warps know of the CTA and its tiles.
template <typename Parts>
struct HcStayCta {
  const HcParams& p;
  const HcShape& shape;
  HcPlan plan;
  int d, own, clusters, tiles;  // this cluster takes tiles own, own + clusters, ...
  uint32_t rank;
  float *ring, *given, *factor, *weights, *totals, *sums, *squares, *mix, *kept;

  __device__ __forceinline__ HcStayCta(const HcParams& params, const HcShape& cut_to, int first, int count,
                                       uint32_t of_cluster, float* shared)
      : p(params),
        shape(cut_to),
        d(Parts::channels > 0 ? Parts::channels : static_cast<int>(params.channels)),
        own(first),
        clusters(count),
        tiles(static_cast<int>((params.tokens + cut_to.tile - 1) / cut_to.tile)),
        rank(of_cluster) {
    constexpr HcStayCut cut = Parts::cut;
    plan = hc_plan(d, cluster());
    const HcStayShared at = hc_stay_shared(plan, shape, cut);
    ring = shared + at.ring, given = shared + at.given, factor = shared + at.factor, weights = shared + at.weights;
    totals = shared + at.totals, sums = shared + at.sums, mix = shared + at.mix, kept = shared + at.kept;
    squares = shared + at.squares;
  }
  __device__ __forceinline__ int cluster() const { return Parts::cluster > 0 ? Parts::cluster : shape.cluster; }
  __device__ __forceinline__ int64_t first(int tile) const { return static_cast<int64_t>(tile) * shape.tile; }
  __device__ __forceinline__ int count(int tile) const {
    return static_cast<int>(min(static_cast<int64_t>(shape.tile), p.tokens - first(tile)));
  }
  // Those of the tile whose first token is `row` from slot `slot` on; beyond the last tile there are none.
  __device__ __forceinline__ HcTile lane_tokens(int row, int slot) const {
    return {row + slot, min(shape.tile, static_cast<int>(p.tokens) - row) - slot};
  }
  __device__ __forceinline__ float* given_of(int turn) const { return given + turn * Parts::slots * HcConfig::given; }
};

// Until the sums over the CTAs of the cluster may be read: those of this CTA are written, by all of its warps.
template <typename Parts>
__device__ __forceinline__ void share_sums(const HcStayCta<Parts>& cta, int thread, bool releases) {
  __syncthreads();
  add_few_units<Parts>(cta.plan.units_a_cta, cta.sums, thread);
  share_of_cluster(releases);
}

// What a lane sums over the channels of a unit, for one group of 16 tokens. Dot products wait in shared memory, where
// the unit's sums will stand, for all groups at once would take the registers of a third of the tile: [tile of 8
// rows][lane].
struct HcWaiting {
  static constexpr int floats = 3 * 32 * 4;
  static_assert(floats <= 16 * HcConfig::sums);
  float* mine;
  float squares[2] = {}, mix_squares[2] = {};

  __device__ __forceinline__ void begin(float* sums, int lane) {
    mine = sums + lane * 4;
    MHC_ENGRAM_UNROLL
    for (int t = 0; t < 3; ++t) *reinterpret_cast<float4*>(mine + t * 128) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __device__ __forceinline__ void add(const float (&made)[3][4]) {
    MHC_ENGRAM_UNROLL
    for (int t = 0; t < 3; ++t) {
      float run[4];
      load_values(mine + t * 128, run);
      MHC_ENGRAM_UNROLL
      for (int i = 0; i < 4; ++i) run[i] = add_rn(run[i], made[t][i]);
      *reinterpret_cast<float4*>(mine + t * 128) = make_float4(run[0], run[1], run[2], run[3]);
    }
  }
  // The squares wait in shared memory too where a lane has three groups.
  __device__ __forceinline__ void take_squares(const float* from) {
    float v[4];
    load_values(from, v);
    squares[0] = v[0], squares[1] = v[1], mix_squares[0] = v[2], mix_squares[1] = v[3];
  }
  __device__ __forceinline__ void leave_squares(float* to) const {
    *reinterpret_cast<float4*>(to) = make_float4(squares[0], squares[1], mix_squares[0], mix_squares[1]);
  }
  template <typename Parts>
  __device__ __forceinline__ void end(float* sums, int lane) const {
    HcSums<Parts> all;
    MHC_ENGRAM_UNROLL
    for (int t = 0; t < 3; ++t) load_values(mine + t * 128, all.run[t]);
    MHC_ENGRAM_UNROLL
    for (int h = 0; h < 2; ++h) all.squares[h] = squares[h], all.mix_squares[h] = mix_squares[h];
    __syncwarp();
    write_sums<Parts>(all, sums, lane);
  }
};

// A warp's ring of copies that run `stages` groups ahead, over the ends of tiles.
template <typename Parts>
struct HcRing {
  static constexpr int stage_floats = hc_stage_floats(Parts::halves);
  HcTile ahead;
  int unit, chunk;
  float* mine;
  uint32_t into;
  int stage = 0;

  __device__ __forceinline__ HcRing(const HcStayCta<Parts>& cta, const HcChunks<Parts>& chunks, int slot, int warp,
                                    int lane)
      : ahead(cta.lane_tokens(chunks.none() ? static_cast<int>(cta.p.tokens) : cta.own * cta.shape.tile, slot)),
        unit(chunks.unit_of_warp),
        chunk(chunks.begin()),
        mine(cta.ring + warp * Parts::stages * stage_floats + lane * 4),
        into(ptx::shared_address(mine)) {
    MHC_ENGRAM_UNROLL
    for (int i = 0; i < Parts::stages; ++i) fetch(cta, chunks, i % Parts::groups, i, slot, lane);
  }
  __device__ __forceinline__ void fetch(const HcStayCta<Parts>& cta, const HcChunks<Parts>& chunks, int group, int to,
                                        int slot, int lane) {
    if (ahead.left + slot > 0) {  // alike in all lanes
      fetch_chunk<Parts>(ahead.group<Parts>(cta.p, group, cta.d, lane), cta.d, chunk,
                         into + static_cast<uint32_t>(to * stage_floats * 4));
      if (group == Parts::groups - 1) {
        chunks.next(unit, chunk);
        if (chunk == chunks.begin()) ahead = cta.lane_tokens(ahead.row - slot + cta.clusters * cta.shape.tile, slot);
      }
    }
    ptx::cp_async_commit();
  }
  // The group of a chunk to registers; a later one is fetched into its place.
  __device__ __forceinline__ void take(const HcStayCta<Parts>& cta, const HcChunks<Parts>& chunks, int group,
                                       HcChunk<Parts>& now, int slot, int lane) {
    const int from = Parts::groups % Parts::stages == 0 ? group % Parts::stages : stage;
    ptx::cp_async_wait<Parts::stages - 1>();
    read_chunk<Parts>(mine + from * stage_floats, now);
    fetch(cta, chunks, (group + Parts::stages) % Parts::groups, from, slot, lane);
    stage = stage + 1 == Parts::stages ? 0 : stage + 1;
  }
};

template <typename Parts>
__device__ __forceinline__ void hc_stay_worker(const HcStayCta<Parts>& cta, int warp, int lane) {
  const HcPlan& plan = cta.plan;
  const HcChunks<Parts> chunks(plan, warp, cta.rank);
  const int d = cta.d, width = static_cast<int>(plan.width) + HcConfig::pad;
  const int part =
      Parts::across == 1 ? 0 : 16 * Parts::groups * (warp / Parts::abreast);  // the warp's first token of a tile
  const int slot = part + lane / 4;
  HcRing<Parts> ring(cta, chunks, slot, warp, lane);
  if constexpr (Parts::kept) {
    keep_weights(cta.p, plan, d, cta.rank, ptx::shared_address(cta.kept), warp, Parts::workers, lane);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }
  const float* fn = cta.p.fn + (lane / 4) * 4 * d + 4 * (lane % 4);
  float* squares = cta.squares + warp * Parts::groups * 128 + lane * 4;
  float w[4][3][4];
  if constexpr (!Parts::kept) load_weights(fn + (chunks.none() ? 0 : chunks.begin()) * HcConfig::chunk, d, w);
  __syncthreads();  // the helpers have left the first tile's coefficients and the norm's weights
  const float* given = cta.given_of(0) + part * HcConfig::given;
  for (int tile = cta.own; tile < cta.tiles; tile += cta.clusters) {
    const HcTile of = cta.lane_tokens(tile * cta.shape.tile, slot);
    float* mix = cta.mix + part * width;
    for (int unit = chunks.unit_of_warp; unit < plan.units_a_cta; unit += Parts::abreast) {
      float* sums = cta.sums + (unit * Parts::slots + part) * HcConfig::sums;
      HcWaiting run[Parts::groups];
      MHC_ENGRAM_UNROLL
      for (int group = 0; group < Parts::groups; ++group) {
        run[group].begin(sums + group * 16 * HcConfig::sums, lane);
        if constexpr (Parts::groups == 3) run[group].leave_squares(squares + group * 128);
      }
      for (int chunk = chunks.first + unit; chunk < chunks.chunks; chunk += HcConfig::units) {
        if constexpr (Parts::kept) read_kept(cta.kept + hc_local(plan, chunk) * 12 * 128 + lane * 4, w);
        int next_unit = unit, next = chunk;
        chunks.next(next_unit, next);
        const auto load_next = [&](int j) { load_weights(fn + next * HcConfig::chunk, d, j, w[j]); };
        MHC_ENGRAM_UNROLL
        for (int group = 0; group < Parts::groups; ++group) {
          const HcTokens<Parts> tokens = of.group<Parts>(cta.p, group, d, lane);
          const float* mine = given + group * 16 * HcConfig::given;
          float* to = mix + group * 16 * width;
          HcChunk<Parts> now;
          ring.take(cta, chunks, group, now, slot, lane);
          if constexpr (Parts::groups == 3) run[group].take_squares(squares + group * 128);
          if (!Parts::kept && group == Parts::groups - 1)  // the next chunk's fn, while its streams are on their way
            work_on_chunk<Parts>(plan, tokens, d, chunk, now, w, mine, to, run[group], lane, load_next);
          else
            work_on_chunk<Parts>(plan, tokens, d, chunk, now, w, mine, to, run[group], lane);
          if constexpr (Parts::groups == 3) run[group].leave_squares(squares + group * 128);
        }
      }
      MHC_ENGRAM_UNROLL
      for (int group = 0; group < Parts::groups; ++group) {
        if constexpr (Parts::groups == 3) run[group].take_squares(squares + group * 128);
        run[group].template end<Parts>(sums + group * 16 * HcConfig::sums, lane);
      }
    }
    const int thread = cta_thread_again();
    share_sums(cta, thread, false);
    cluster_arrive_relaxed();
    __syncthreads();  // the helpers have left the factors
    write_tile<Parts>(cta.p, plan, cta.mix, cta.factor, cta.weights, cta.first(tile), cta.count(tile), cta.rank,
                      thread / 32, thread % 32);
    given = cta.given_of(given < cta.given_of(1)) + part * HcConfig::given;  // the other one
    cluster_wait();                                                          // no other CTA reads this one's sums
    __syncthreads();                                                         // the mix was written, its place is free
  }
}

// Slots k * cluster + rank of a tile are this CTA's, and of these k, k + 4, ... one warp's.
template <typename Parts>
__device__ __forceinline__ void hc_stay_helper(const HcStayCta<Parts>& cta, int thread, int warp, int lane) {
  const HcParams& p = cta.p;
  constexpr int threads = 32 * Parts::helpers;
  const int cluster = cta.cluster(), own = thread - 32 * Parts::workers, mine = warp - Parts::workers;
  read_given<Parts>(p, cta.first(cta.own), cta.count(cta.own), cta.given, own, threads);
  for (int i = own; p.norm_weight && i < static_cast<int>(cta.plan.width); i += threads) {
    const int64_t chunk = hc_chunk(cta.plan, static_cast<int>(cta.rank), i / HcConfig::chunk);
    if (chunk < cta.plan.chunks) cta.weights[i] = p.norm_weight[chunk * HcConfig::chunk + i % HcConfig::chunk];
  }
  __syncthreads();
  const auto write_coefficients_of = [&](int tile) {
    const HcLogit logit = load_logit(p, lane);
    const int count = cta.count(tile);
    for (int k = mine; k * cluster + static_cast<int>(cta.rank) < count; k += Parts::helpers) {
      const float total = lane <= HcConfig::coefficients ? cta.totals[k * HcConfig::sums + lane] : 0.0f;
      write_coefficients(p, logit, cta.first(tile) + k * cluster + static_cast<int>(cta.rank), total, lane);
    }
  };
  for (int tile = cta.own, turn = 0;; tile += cta.clusters, turn ^= 1) {
    const int next = tile + cta.clusters;
    if (next < cta.tiles) read_given<Parts>(p, cta.first(next), cta.count(next), cta.given_of(turn ^ 1), own, threads);
    if (tile != cta.own) write_coefficients_of(tile - cta.clusters);
    if (tile >= cta.tiles) break;
    share_sums(cta, thread, true);  // whose warps have few stores to wait for
    if (p.norm_weight && own < Parts::slots) {
      const float sum = add_ranks(cta.sums + own * HcConfig::sums + HcConfig::coefficients + 1, cluster);
      cta.factor[own] = inverse_rms(sum, static_cast<float>(cta.d), p.eps);
    }
    const int count = cta.count(tile);
    for (int k = mine; k * cluster + static_cast<int>(cta.rank) < count; k += Parts::helpers) {
      const int slot = k * cluster + static_cast<int>(cta.rank);
      if (lane <= HcConfig::coefficients)
        cta.totals[k * HcConfig::sums + lane] = add_ranks(cta.sums + slot * HcConfig::sums + lane, cluster);
    }
    cluster_arrive_relaxed();  // this CTA reads no other one's sums any more
    __syncthreads();
    cluster_wait();
    __syncthreads();
  }
}

// One CTA of `clusters` clusters; its cluster begins with tile `own`, which is there.
template <typename Parts>
__device__ __forceinline__ void hc_stay_block(const HcParams& p, const HcShape& shape, int own, int clusters,
                                              uint32_t rank, float* shared) {
  const int thread = cta_thread(), warp = thread / 32, lane = thread % 32;
  const HcStayCta<Parts> cta(p, shape, own, clusters, rank, shared);
  if (warp < Parts::workers) {
    ptx::registers_grow<Parts::most>();
    hc_stay_worker(cta, warp, lane);
  } else {
    ptx::registers_shrink<Parts::least>();
    hc_stay_helper(cta, thread, warp, lane);
  }
}

}  // namespace mhc_engram::cuda
