// Scores of requests with one row: what score_keys computes, for half of the instructions a key spends besides its
// product, and with no copies or barriers of one warp in the way of the other three.
//
// A warp takes 32 neighbouring keys of a stage as two tiles of 16, so that scales, factors, sums of lanes and stores
// are worked out once a lane for both. With kOverlap the second tile's codes are turned into E4M3 while the tensor unit
// works on the first. With kProducer one more warp asks for the stages of all warpgroups, else a thread of each.
#pragma once

#include "index_score.cuh"

namespace mla_fp4::sm90 {

template <int kHeads_, int kStages_, int kWarpgroups_, int kBlocks_, bool kOverlap_, bool kProducer_>
struct DecodeConfig {
  static constexpr int kHeads = kHeads_, kStages = kStages_, kWarpgroups = kWarpgroups_, kBlocks = kBlocks_;
  static constexpr bool kOverlap = kOverlap_, kProducer = kProducer_;
  static constexpr KeySource kKeys = KeySource::bulk;
  static constexpr int kQueries = 1;
  static constexpr int kScoring = kWarpgroups * 128;  // threads that score
  static constexpr int kThreads = kScoring + (kProducer ? 32 : 0);
  static constexpr int kStep = kWarpgroups * kStageKeys;  // keys of a turn
  static constexpr int kImage = kHeads * index_plan::kDim;
};

template <typename C>
struct DecodeShared {
  alignas(1024) uint8_t image[C::kImage];                 // first: at kFirstShared
  alignas(256) uint64_t magnitudes[index_plan::kDepths];  // at a multiple of 256: see table_of
  alignas(128) uint8_t codes[C::kWarpgroups][C::kStages][kStageTiles * kTileCodes];
  alignas(128) uint8_t scales[C::kWarpgroups][C::kStages][kStageTiles * kTileScales];
  uint64_t full[C::kWarpgroups][C::kStages], empty[C::kWarpgroups][C::kStages];
  IndexTile tile;
  int pages[index_plan::kLargestChunk / kTile];
};

#if defined(__CUDACC__)
// Where dynamic shared memory begins in a kernel without any other: behind the 1 KiB that the system keeps. As a number
// it makes matrix descriptors constants; else each product moves eight registers to the uniform file.
inline constexpr uint32_t kFirstShared = 1024;

__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
#endif

template <typename C>
class IndexDecoder {
 public:
  __device__ IndexDecoder(const IndexScoreParams& p, const IndexLaunch& launch, DecodeShared<C>& shared)
      : p_(p),
        launch_(launch),
        s_(shared),
        tile_(shared.tile),
        end_(static_cast<int>(once(min(tile_.end, tile_.longest)))),
        warp_(static_cast<int>(once(threadIdx.x / 32))),
        lane_(static_cast<int>(once(threadIdx.x % 32))) {}

  __device__ void run(const PackedQueries& queries) {
    prepare();
    if (C::kProducer && warp_ >= C::kScoring / 32) {
      if (lane_ == 0) produce(0, C::kStages);
      __syncthreads();
      if (lane_ == 0) produce(C::kStages, INT32_MAX);
      return;
    }
    if (!C::kProducer && threadIdx.x % 128 == 0) {
      MLA_FP4_NO_UNROLL
      for (int turn = 0; turn < C::kStages - 1; ++turn) request(warp_ / 4, turn);
    }
    wait_for_previous();
    const uint8_t* const from = queries.images + tile_.first_row * C::kImage;
    MLA_FP4_NO_UNROLL
    for (int i = threadIdx.x * 16; i < C::kImage; i += C::kScoring * 16)
      kernel_core::ptx::cp_async_16(kernel_core::ptx::shared_address(s_.image + i), from + i);
    kernel_core::ptx::cp_async_commit();
    const float* const weights = queries.weights + tile_.first_row * C::kHeads + lane_ % 4 * kLaneHeads;
    MLA_FP4_UNROLL
    for (int i = 0; i < kLaneHeads; ++i) weights_[i] = weights[i];
    kernel_core::ptx::cp_async_wait<0>();
    kernel_core::ptx::fence_proxy_async();
    __syncthreads();
    score();
    if (p_.fill_hidden) fill();
  }

 private:
  static constexpr int kLaneHeads = C::kHeads / 4;
  static constexpr uint32_t kToEmpty = C::kWarpgroups * C::kStages * 8;  // from full[i][j] to empty[i][j]
  using Keys = uint32_t[index_plan::kSteps][4];
  using Sums = float[C::kHeads / 2];

  // ---- copies ------------------------------------------------------------------------------------------------------

  __device__ void prepare() {
    const int first = tile_.begin >> launch_.page_shift, last = (end_ - 1) >> launch_.page_shift;
    MLA_FP4_NO_UNROLL
    for (int i = threadIdx.x; i <= last - first; i += C::kThreads) {
      const int slot = first + i;
      const int page = slot < p_.table_width ? p_.block_table[tile_.request * p_.table_width + slot] : -1;
      s_.pages[i] = page < p_.blocks ? max(page, -1) : -1;
    }
    if (threadIdx.x < index_plan::kDepths) s_.magnitudes[threadIdx.x] = index_plan::magnitudes(threadIdx.x);
    if (threadIdx.x == C::kThreads - 32) {
      MLA_FP4_NO_UNROLL
      for (int i = 0; i < C::kWarpgroups * C::kStages; ++i) {
        kernel_core::ptx::mbarrier_init(kernel_core::ptx::shared_address(&s_.full[0][i]), 1);
        kernel_core::ptx::mbarrier_init(kernel_core::ptx::shared_address(&s_.empty[0][i]), 4);
      }
      kernel_core::ptx::fence_barrier_init();
    }
    __syncthreads();
  }

  // Asks for the stages of all warpgroups in the order in which they are needed. One thread.
  __device__ void produce(int turn, int turns) {
    MLA_FP4_NO_UNROLL
    for (; turn < turns && tile_.begin + turn * C::kStep < end_; ++turn) {
      MLA_FP4_NO_UNROLL
      for (int group = 0; group < C::kWarpgroups; ++group) request(group, turn);
    }
  }

  // Asks for a warpgroup's keys of a turn, once what stood there has been read. One thread.
  __device__ void request(int group, int turn) {
    const int stage = turn % C::kStages, fills = turn / C::kStages;
    const int first = tile_.begin + turn * C::kStep + group * kStageKeys;
    if (first >= end_) return;
    if (fills > 0)
      kernel_core::ptx::mbarrier_wait(kernel_core::ptx::shared_address(&s_.empty[group][stage]), (fills - 1) & 1);
    request_stage(group, stage, first);
  }

  // Tiles of 64 that begin before the end, each inside one page; two of a page by one pair of copies.
  __device__ void request_stage(int group, int stage, int first) {
    namespace ptx = kernel_core::ptx;
    const uint32_t full = ptx::shared_address(&s_.full[group][stage]);
    const int page_rows = 1 << launch_.page_shift;
    const int tiles = first + kTile < end_ ? kStageTiles : 1, piece = page_rows > kTile ? tiles : 1;
    ptx::mbarrier_arrive_expect_tx(full, tiles * (kTileCodes + kTileScales));
    MLA_FP4_NO_UNROLL
    for (int t = 0; t < tiles; t += piece) {
      const int at = first + t * kTile, offset = at & (page_rows - 1);
      const int page = s_.pages[(at >> launch_.page_shift) - (tile_.begin >> launch_.page_shift)];
      const uint8_t* const start = p_.pages + static_cast<int64_t>(page) * launch_.page_bytes;
      const uint8_t* codes = start + offset * index_plan::kCodeBytes;
      const uint8_t* scales = start + page_rows * index_plan::kCodeBytes + offset * index_plan::kGroups;
      const uint32_t to_codes = ptx::shared_address(s_.codes[group][stage]) + t * kTileCodes;
      const uint32_t to_scales = ptx::shared_address(s_.scales[group][stage]) + t * kTileScales;
      if (page < 0) {
        scales = codes = reinterpret_cast<const uint8_t*>(kZeroCodes);
        if (piece == 2) ptx::cp_async_bulk(to_codes + kTileCodes, codes, kTileCodes, full);
      }
      ptx::cp_async_bulk(to_codes, codes, page < 0 ? kTileCodes : piece * kTileCodes, full);
      ptx::cp_async_bulk(to_scales, scales, piece * kTileScales, full);
    }
  }

  // ---- scores ------------------------------------------------------------------------------------------------------

  __device__ void score() {
    namespace ptx = kernel_core::ptx;
    namespace wgmma = kernel_core::wgmma;
    const int group = warp_ / 4, own = warp_ % 4 * 32;                // the warp's first key of a stage
    const int kept = lane_ % 4 / 2 * 16 + lane_ % 2 * 8 + lane_ / 4;  // which of the 32 scores this lane keeps
    const uint32_t full = once(ptx::shared_address(s_.full[group]));
    const uint32_t codes = once(ptx::shared_address(s_.codes[group]) + own * index_plan::kCodeBytes + lane_ * 16);
    const uint32_t scales = once(ptx::shared_address(s_.scales[group]) + (own + lane_) * index_plan::kGroups);
    const uint32_t tables = once(ptx::shared_address(s_.magnitudes));
    const uint32_t which = once(0x7650 | lane_ % 4);
    const uint64_t columns = wgmma::k_major(kFirstShared);
    const uint32_t plain = once(p_.scores && !p_.fill_hidden && !p_.maxima);
    int entry = tile_.begin + group * kStageKeys + own + kept;
    float* to = p_.scores + (tile_.first_row - p_.first_row) * p_.stride + entry - p_.first_position;
    int stage = 0, parity = 0, turn = C::kStages - 1;
    MLA_FP4_NO_UNROLL
    for (int at = tile_.begin + group * kStageKeys; at < end_; at += C::kStep) {
      ptx::mbarrier_wait(full + stage * 8, parity);
      if constexpr (!C::kProducer) {
        if (threadIdx.x % 128 == 0) request(group, turn);
        ++turn;
        __syncwarp();
      }
      const auto scale = index_plan::key_scales(load_shared_4(scales + stage * (kStageKeys * index_plan::kGroups)));
      const uint32_t from = codes + stage * (kStageKeys * index_plan::kCodeBytes);
      float sums[2][2] = {};
      if constexpr (C::kOverlap) {
        Keys first, second;
        Sums d, e;
        take(from, tables, which, scale.offsets, 0, first);
        start(d, first, columns);
        take(from, tables, which, scale.offsets, 1, second);
        taken(full + kToEmpty + stage * 8);
        wgmma::wait<0>();  // the first product has ended before; its operand's registers are wanted
        wgmma::pin(d);
        start(e, second, columns);
        sum_heads(d, sums[0]);
        wgmma::wait<0>();
        wgmma::pin(e);
        sum_heads(e, sums[1]);
      } else {
        MLA_FP4_NO_UNROLL
        for (int t = 0; t < 2; ++t) {
          Keys keys;
          Sums d;
          take(from, tables, which, scale.offsets, t, keys);
          if (t == 1) taken(full + kToEmpty + stage * 8);
          start(d, keys, columns);
          wgmma::wait<0>();
          wgmma::pin(d);
          sums[0][0] = sums[1][0], sums[0][1] = sums[1][1];
          sum_heads(d, sums[1]);
        }
      }
      const float factor = __shfl_sync(~0u, index_plan::key_factor(scale.top), kept);
      const float score = kernel_core::cuda::mul_rn(sum_lanes(sums), factor);
      if (!plain)
        store(score, entry, to);
      else if (entry < end_)
        *to = score;
      entry += C::kStep, to += C::kStep;
      if (++stage == C::kStages) stage = 0, parity ^= 1;
    }
  }

  // Tile t of the warp's keys to E4M3. Lane 4r + c holds group c of keys r and r + 8; lane i knows the scales of key i.
  __device__ void take(uint32_t from, uint32_t tables, uint32_t which, uint32_t offsets, int t, Keys& keys) const {
    MLA_FP4_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint4 row = kernel_core::ptx::load_shared_16(from + t * 1024 + half * 512);
      const uint32_t its = __shfl_sync(~0u, offsets, t * 16 + half * 8 + lane_ / 4);
      const uint2 table = load_shared_8(kernel_core::cuda::prmt(its, tables, which));  // the lowest byte replaced
      const uint32_t words[index_plan::kSteps] = {row.x, row.y, row.z, row.w};
      MLA_FP4_UNROLL
      for (int step = 0; step < index_plan::kSteps; ++step) {
        uint32_t out[2];
        index_plan::key_words(words[step], table.x, table.y, out);
        keys[step][half] = out[0];
        keys[step][half + 2] = out[1];
      }
    }
  }

  __device__ void taken(uint32_t empty) const {
    __syncwarp();
    if (lane_ == 0) kernel_core::ptx::mbarrier_arrive(empty);
  }

  __device__ static void start(Sums& d, const Keys& keys, uint64_t columns) {
    kernel_core::wgmma::fence();
    IndexProduct<C::kHeads>::run(d, keys, columns);
    kernel_core::wgmma::commit();
  }

  // Relu, weights and this lane's heads, for both of its keys.
  __device__ void sum_heads(const Sums& d, float (&sums)[2]) const {
    sums[0] = sums[1] = 0;
    MLA_FP4_UNROLL
    for (int i = 0; i < kLaneHeads; ++i) {
      MLA_FP4_UNROLL
      for (int half = 0; half < 2; ++half)
        sums[half] =
            index_plan::fused(weights_[i], index_plan::twice_relu(d[i / 2 * 4 + 2 * half + i % 2]), sums[half]);
    }
  }

  // The four lanes of a quad: each ends with one of its four keys. Two lanes' sums first, as everywhere.
  __device__ float sum_lanes(const float (&sums)[2][2]) const {
    float pair[2];
    MLA_FP4_UNROLL
    for (int t = 0; t < 2; ++t)
      pair[t] = (lane_ % 2 ? sums[t][1] : sums[t][0]) + __shfl_xor_sync(~0u, lane_ % 2 ? sums[t][0] : sums[t][1], 1);
    return (lane_ & 2 ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, lane_ & 2 ? pair[0] : pair[1], 2);
  }

  __device__ void store(float score, int entry, float* to) const {
    const float never = index_plan::bits_float(0xFF800000u);
    const bool seen = entry < end_;
    if (p_.scores && (seen || (p_.fill_hidden && entry < tile_.end))) *to = seen ? score : never;
    if (!p_.maxima) return;
    float top = seen && score == score ? score : never;
    MLA_FP4_UNROLL
    for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (lane_ < 4 && entry < (p_.fill_hidden ? tile_.end : end_))  // the first of its eight
      p_.maxima[(tile_.first_row - p_.first_row) * p_.maxima_stride + (entry - p_.first_position) / 8] = top;
  }

  // What lies behind the last tile with a visible key.
  __device__ void fill() const {
    const float never = index_plan::bits_float(0xFF800000u);
    const int64_t row = tile_.first_row - p_.first_row;
    MLA_FP4_NO_UNROLL
    for (int i = max(tile_.begin, (end_ + kTile - 1) / kTile * kTile) + threadIdx.x; i < tile_.end; i += C::kScoring) {
      const int64_t at = i - p_.first_position;
      if (p_.scores) p_.scores[row * p_.stride + at] = never;
      if (p_.maxima && at % 8 == 0) p_.maxima[row * p_.maxima_stride + at / 8] = never;
    }
  }

  const IndexScoreParams& p_;
  const IndexLaunch& launch_;
  DecodeShared<C>& s_;
  const IndexTile& tile_;  // in shared memory: registers are few
  const int end_;          // of what the row sees
  const int warp_, lane_;
  float weights_[kLaneHeads];
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    score_decode(const __grid_constant__ IndexScoreParams p, const __grid_constant__ IndexLaunch launch,
                 const __grid_constant__ PackedQueries queries) {
  extern __shared__ __align__(1024) uint8_t memory[];
  if (kernel_core::ptx::shared_address(memory) % (1 << 18) != kFirstShared) __trap();
  IndexTile tile;
  if (!find_tile<C>(p, launch, tile)) return;
  auto& shared = *reinterpret_cast<DecodeShared<C>*>(memory);
  if (threadIdx.x == 0) shared.tile = tile;
  __syncthreads();
  IndexDecoder<C>(p, launch, shared).run(queries);
}

}  // namespace mla_fp4::sm90
