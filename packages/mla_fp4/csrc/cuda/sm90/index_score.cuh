// A thread block scores a range of keys against the queries of a tile: some rows of one request.
//
// Two warpgroups take stages of 128 keys in turn (index_keys.cuh), as two products of 64. A warp turns the codes of its
// 16 keys of a product into E4M3 in registers, the A operand, once for all queries. The columns of a product are the
// heads of one query, or of several: the B operand, which stays in shared memory.
//
// Budget of a multiprocessor for a key at 32 heads and q queries, from the machine code (four instructions a cycle, of
// them two of integers; a warp takes 16 keys with 103 instructions, and with 83 for one query, 61 for each of four
// together; copies, barriers and the loop are about 30 more):
//   bytes          68 at 18.6 a cycle                       3.7 cycles
//   instructions   of one query                             3.4
//                  of many                                  2.1 + 0.95 q
//   integers       codes to E4M3: 64 + 15 of them           2.5
//   tensor unit    64 x 32 x 128                            q
#pragma once

#include "index_keys.cuh"
#include "index_product.cuh"
#include "index_queries.cuh"

namespace mla_fp4::sm90 {

#if defined(__CUDACC__)
__device__ __forceinline__ uint32_t load_shared_1(uint32_t from) {
  uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(from) : "memory");
  return byte;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}
#endif

template <typename C>
class IndexScorer {
 public:
  __device__ IndexScorer(const IndexScoreParams& p, const IndexLaunch& launch, IndexShared<C>& shared)
      : p_(p),
        s_(shared),
        tile_(shared.tile),
        rows_(tile_.rows),
        keys_end_(C::kKeys == KeySource::candidates ? tile_.end : min(tile_.end, tile_.longest)),
        source_(p, launch, shared, keys_end_),
        plain_(once(p.scores && !p.fill_hidden && (C::kKeys == KeySource::candidates || !p.maxima))),
        lane_(static_cast<int>(once(threadIdx.x % 32))),
        codes_(once(kernel_core::ptx::shared_address(shared.codes[threadIdx.x / 128]) + threadIdx.x % 128 / 32 * 1024 +
                    threadIdx.x % 32 * 16)),
        scales_(once(kernel_core::ptx::shared_address(shared.scales[threadIdx.x / 128]) + threadIdx.x % 128 / 32 * 64 +
                     threadIdx.x % 32)),
        magnitudes_(once(kernel_core::ptx::shared_address(shared.magnitudes))),
        images_(kernel_core::ptx::shared_address(shared.images)) {}

  __device__ void run(const PackedQueries& queries) {
    source_.prepare();
    if (threadIdx.x < index_plan::kDepths) s_.magnitudes[threadIdx.x] = index_plan::magnitudes(threadIdx.x);
    wait_for_previous();
    copy_queries(queries);
    kernel_core::ptx::fence_proxy_async();
    __syncthreads();
    if (kSingle) {
      load_weights(0, weights_);
      limit_ = s_.limits[0];
    }
    int at = tile_.begin + threadIdx.x / 128 * kStageKeys;  // a warpgroup's, for its four warps together
    entry_ = at + threadIdx.x / 32 % 4 * 16 + lane_ / 4 + lane_ % 2 * 8;
    to_ = p_.scores + (tile_.first_row - p_.first_row + slot()) * p_.stride + entry_ - p_.first_position;
    MLA_FP4_NO_UNROLL
    for (; at < keys_end_; at += C::kStep) {
      source_.wait();
      source_.ahead(at);
      const int stage = source_.stage(), tiles = at + kTile < keys_end_ ? kStageTiles : 1;
      MLA_FP4_NO_UNROLL
      for (int t = 0; t < tiles; ++t) {
        take(codes_ + (stage * kStageTiles + t) * kTileCodes, scales_ + (stage * kStageTiles + t) * kTileScales);
        if (t + 1 == tiles) source_.taken();
        score();
        entry_ += kTile, to_ += kTile;
      }
      entry_ += C::kStep - kStageKeys, to_ += C::kStep - kStageKeys;
    }
    if (p_.fill_hidden) fill();
  }

 private:
  static constexpr bool kSingle = C::kQueries == 1;
  static constexpr int kPair = C::kTogether % 2 ? 1 : 2;  // queries whose sums a quad of lanes finishes together
  static constexpr int kLaneHeads = C::kHeads / 4;        // heads of a lane

  __device__ void copy_queries(const PackedQueries& queries) {
    const int rows = (tile_.rows + C::kTogether - 1) / C::kTogether * C::kTogether;
    const uint8_t* const from = queries.images + tile_.first_row * C::kImage;
    MLA_FP4_NO_UNROLL
    for (int i = threadIdx.x * 16; i < tile_.rows * C::kImage; i += C::kThreads * 16)
      kernel_core::ptx::cp_async_16(kernel_core::ptx::shared_address(s_.images + i), from + i);
    kernel_core::ptx::cp_async_commit();
    MLA_FP4_NO_UNROLL
    for (int i = tile_.rows * C::kImage + threadIdx.x * 16; i < rows * C::kImage; i += C::kThreads * 16)
      *reinterpret_cast<uint4*>(s_.images + i) = make_uint4(0, 0, 0, 0);
    MLA_FP4_NO_UNROLL
    for (int i = threadIdx.x; i < rows * C::kHeads; i += C::kThreads)
      s_.weights[i] = i < tile_.rows * C::kHeads ? queries.weights[tile_.first_row * C::kHeads + i] : 0.0f;
    MLA_FP4_NO_UNROLL
    for (int i = threadIdx.x; i < rows; i += C::kThreads)
      s_.limits[i] = i < tile_.rows ? min(tile_.end, p_.visible[tile_.first_row + i]) : -1;
    kernel_core::ptx::cp_async_wait<0>();  // also the keys of copied stages; they are late anyway
  }

  // This lane's of a query.
  __device__ void load_weights(int query, float (&weights)[kLaneHeads]) const {
    const float* const from = s_.weights + query * C::kHeads + lane_ % 4 * kLaneHeads;
    if constexpr (kLaneHeads % 4 != 0) {
      const float2 pair = *reinterpret_cast<const float2*>(from);
      weights[0] = pair.x, weights[1] = pair.y;
    } else {
      MLA_FP4_UNROLL
      for (int i = 0; i < kLaneHeads; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        weights[i] = four.x, weights[i + 1] = four.y, weights[i + 2] = four.z, weights[i + 3] = four.w;
      }
    }
  }

  // The warp's keys to E4M3. Lane 4r + c holds group c of keys r and r + 8.
  __device__ void take(uint32_t codes, uint32_t scales) {
    const uint32_t own = load_shared_1(scales) + load_shared_1(scales + 32) * 0x10000;
    uint32_t tops = index_plan::max_pairs(own, __shfl_xor_sync(~0u, own, 1));
    tops = index_plan::max_pairs(tops, __shfl_xor_sync(~0u, tops, 2));
    const uint32_t depths = index_plan::depth_pairs(tops, own);
    MLA_FP4_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint4 row = kernel_core::ptx::load_shared_16(codes + half * 512);
      const uint2 table = load_shared_8(magnitudes_ + (half ? depths >> 16 : depths & 0xFFFF) * 8);
      const uint32_t words[index_plan::kSteps] = {row.x, row.y, row.z, row.w};
      MLA_FP4_UNROLL
      for (int step = 0; step < index_plan::kSteps; ++step) {
        uint32_t out[2];
        index_plan::key_words(words[step], table.x, table.y, out);
        keys_[step][half] = out[0];
        keys_[step][half + 2] = out[1];
      }
    }
    factor_ = index_plan::key_factor(lane_ % 2 ? tops >> 16 : tops & 0xFFFF);
  }

  __device__ void score() {
    namespace wgmma = kernel_core::wgmma;
    float* to = to_;
    MLA_FP4_NO_UNROLL
    for (int q = 0; kSingle ? q == 0 : q < rows_; q += C::kTogether) {
      float d[C::kColumns / 2];
      wgmma::fence();
      IndexProduct<C::kColumns>::run(d, keys_, wgmma::k_major(images_ + q * C::kImage));
      wgmma::commit();
      wgmma::wait<0>();
      wgmma::pin(d);
      MLA_FP4_UNROLL
      for (int i = 0; i < C::kTogether; i += kPair) {
        float sums[kPair];
        MLA_FP4_UNROLL
        for (int u = 0; u < kPair; ++u) sums[u] = sum_heads(d, i + u, q + i + u);
        if (kPair == 2) {  // lanes 0 and 1 of four keep the first query, 2 and 3 the second
          const float other = lane_ % 4 < 2 ? sums[kPair - 1] : sums[0];
          if (lane_ % 4 >= 2) sums[0] = sums[kPair - 1];
          sums[0] += __shfl_xor_sync(~0u, other, 2);
        } else {
          sums[0] += __shfl_xor_sync(~0u, sums[0], 2);
        }
        store(q + i + slot(), kernel_core::cuda::mul_rn(sums[0], factor_), to);
        if (!kSingle) to += kPair * p_.stride;
      }
    }
  }

  // Relu, weights, and the sum over heads of a query: first this lane's, of both of its keys, then of two lanes. Even
  // lanes keep row lane / 4 of the warp's keys, odd ones the row 8 further on.
  __device__ float sum_heads(const float (&d)[C::kColumns / 2], int of_product, int query) {
    if (!kSingle) load_weights(query, weights_);
    float sums[2] = {0, 0};
    MLA_FP4_UNROLL
    for (int i = 0; i < kLaneHeads; ++i) {
      MLA_FP4_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float dot = d[(of_product * (C::kHeads / 8) + i / 2) * 4 + 2 * half + i % 2];
        sums[half] = index_plan::fused(weights_[i], index_plan::twice_relu(dot), sums[half]);
      }
    }
    const float other = lane_ % 2 ? sums[0] : sums[1];
    return (lane_ % 2 ? sums[1] : sums[0]) + __shfl_xor_sync(~0u, other, 1);
  }

  // The query of the pair that this lane finishes.
  __device__ int slot() const { return kPair == 2 ? lane_ / 2 % 2 : 0; }

  __device__ void store(int query, float score, float* to) const {
    const int limit = kSingle ? limit_ : s_.limits[query];
    bool seen = entry_ < limit;
    if constexpr (C::kKeys == KeySource::candidates) {
      const int position = entry_ < tile_.end ? source_.position_of(entry_) : -1;
      seen = position >= 0 && position < tile_.longest;
    }
    const bool writes = kPair == 2 || lane_ % 4 < 2;
    if (plain_) {
      if (writes && seen) *to = score;
      return;
    }
    const float never = index_plan::bits_float(0xFF800000u);
    const bool present = query < tile_.rows;
    if (p_.scores && writes && (seen || (p_.fill_hidden && present && entry_ < tile_.end))) *to = seen ? score : never;
    if (C::kKeys == KeySource::candidates || !p_.maxima) return;
    float top = seen && score == score ? score : never;
    MLA_FP4_UNROLL
    for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    // Lane 0 to 3: entry_ is the first of its eight.
    if (lane_ < 4 && writes && present && entry_ < (p_.fill_hidden ? tile_.end : limit))
      p_.maxima[(tile_.first_row - p_.first_row + query) * p_.maxima_stride + (entry_ - p_.first_position) / 8] = top;
  }

  // What lies behind the last tile with a visible key.
  __device__ void fill() const {
    if (C::kKeys == KeySource::candidates) return;
    const int from = max(tile_.begin, (keys_end_ + kTile - 1) / kTile * kTile);
    const float never = index_plan::bits_float(0xFF800000u);
    for (int q = 0; q < tile_.rows; ++q) {
      const int64_t row = tile_.first_row - p_.first_row + q;
      MLA_FP4_NO_UNROLL
      for (int i = from + threadIdx.x; i < tile_.end; i += C::kThreads) {
        const int64_t at = i - p_.first_position;
        if (p_.scores) p_.scores[row * p_.stride + at] = never;
        if (p_.maxima && at % 8 == 0) p_.maxima[row * p_.maxima_stride + at / 8] = never;
      }
    }
  }

  const IndexScoreParams& p_;
  IndexShared<C>& s_;
  const IndexTile& tile_;  // in shared memory: registers are few
  const int rows_, keys_end_;
  IndexKeys<C> source_;
  const uint32_t plain_;  // only scores of visible entries are written
  const int lane_;
  const uint32_t codes_, scales_, magnitudes_;  // in shared memory: this lane's of the first stage; the table
  const uint32_t images_;
  int entry_;  // whose score this lane keeps
  float* to_;  // and where it goes, for its first query
  uint32_t keys_[index_plan::kSteps][4];
  float factor_;
  float weights_[kLaneHeads];
  int limit_;
};

// The thread block's rows and keys; false where it has none.
template <typename C>
__device__ __forceinline__ bool find_tile(const IndexScoreParams& p, const IndexLaunch& launch, IndexTile& tile) {
  const int64_t chunk = blockIdx.x % launch.chunks, tile_index = blockIdx.x / launch.chunks;
  tile.request = tile_index / launch.tiles_of_request;
  tile.first_row =
      max(int64_t{p.cu_seqlens[tile.request]}, p.first_row) + tile_index % launch.tiles_of_request * launch.tile_rows;
  const int64_t left = min(int64_t{p.cu_seqlens[tile.request + 1]}, p.end_row) - tile.first_row;
  if (left <= 0) return false;
  tile.rows = static_cast<int>(left < launch.tile_rows ? left : launch.tile_rows);
  tile.longest = 0;
  MLA_FP4_NO_UNROLL
  for (int i = 0; i < tile.rows; ++i) tile.longest = max(tile.longest, p.visible[tile.first_row + i]);
  tile.begin = static_cast<int>(p.first_position + chunk * launch.keys);
  tile.end = static_cast<int>(min(tile.begin + launch.keys, p.width));
  if (!p.fill_hidden) {
    if (C::kKeys != KeySource::candidates)
      tile.end = min(tile.end, tile.longest);
    else if (p.candidates[tile.first_row * p.candidates_width + (tile.begin >> launch.candidate_shift)] < 0)
      return false;
  }
  return tile.begin < tile.end;
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    score_keys(const __grid_constant__ IndexScoreParams p, const __grid_constant__ IndexLaunch launch,
               const __grid_constant__ PackedQueries queries) {
  extern __shared__ __align__(1024) uint8_t memory[];
  if (kernel_core::ptx::shared_address(memory) % 1024) __trap();  // swizzled atoms begin at multiples of it
  auto& shared = *reinterpret_cast<IndexShared<C>*>(memory);
  IndexTile tile;
  if (!find_tile<C>(p, launch, tile)) return;
  if (threadIdx.x == 0) shared.tile = tile;
  __syncthreads();
  IndexScorer<C>(p, launch, shared).run(queries);
}

}  // namespace mla_fp4::sm90
