// A thread block scores a range of keys against the queries of a tile: some rows of one request.
//
// Four warps copy tiles of 128 keys, codes and scales, straight to the layouts that the tensor core wants; one thread
// copies scales to tensor memory and issues products; three warpgroups take the sums of a product each in turn: a
// thread has one key, so relu, weights and the sum over heads need no other thread.
#pragma once

#include "cuda/sm100/device_sm100.cuh"
#include "cuda/sm100/index_queries_sm100.cuh"
#include "cuda/sm90/unroll.cuh"

namespace mla_fp4::sm100 {

using kernel_core::cuda::bits_float;

// Some rows of one request and a range of entries (positions, or places in the row's candidate blocks).
struct IndexTile {
  int64_t request, first_row;
  int rows, begin, end, longest;
};

struct IndexLaunch {
  int64_t keys, chunks, tiles_of_request;
  int tile_rows, page_bytes, page_shift, candidate_shift;
};

template <int kHeads, bool kCandidates>
struct IndexKernel {
  using Plan = IndexPlan;
  static constexpr int kGroupRows = Plan::kColumns / kHeads;  // queries of a product

  const IndexScoreParams& p;
  const IndexLaunch& launch;
  const IndexTile& tile;
  uint32_t shared;

  __device__ __forceinline__ int tiles() const {
    return (tile.end - tile.begin + Plan::kTileKeys - 1) / Plan::kTileKeys;
  }
  __device__ __forceinline__ int groups() const { return (tile.rows + kGroupRows - 1) / kGroupRows; }

  // Position of an entry, or -1. With candidates a tile has one row.
  __device__ __forceinline__ int position_of(int entry) const {
    if (entry >= tile.end) return -1;
    if constexpr (!kCandidates) return entry;
    const int id = p.candidates[tile.first_row * p.candidates_width + (entry >> launch.candidate_shift)];
    return id < 0 ? -1 : (id << launch.candidate_shift) + (entry & ((1 << launch.candidate_shift) - 1));
  }

  // --- copies ---

  __device__ __forceinline__ void copy_queries(const ScaledQueries& q, int thread) const {
    const int columns = tile.rows * kHeads, padded = groups() * Plan::kColumns;
    const uint8_t* images = q.images + tile.first_row * kHeads * Plan::kCodeBytes;
    for (int i = thread; i < padded * (Plan::kCodeBytes / 16); i += 128) {
      const bool there = i / (Plan::kCodeBytes / 16) < columns;
      ptx::cp_async_16(shared + Plan::kQueryCodes + i * 16, there ? images + i * 16 : images, there);
    }
    const int64_t first = tile.first_row * kHeads;
    for (int i = thread; i < padded; i += 128) {
      const bool there = i < columns;
      const uint32_t group = i / Plan::kColumns * Plan::kScaleBytes;
      cp_async_4(shared + Plan::kQueryScales + group + tcgen05::scale_byte(i % Plan::kColumns),
                 q.scales + first + (there ? i : 0), there);
      cp_async_4(shared + Plan::kWeights + i * 4, q.weights + first + (there ? i : 0), there);
    }
    for (int i = thread; i < tile.rows; i += 128) {
      cp_async_4(shared + Plan::kVisible + i * 4, p.visible + tile.first_row + i, true);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + Plan::kQueriesFull);
  }

  struct Source {
    int page, offset;  // page -1: zeros
  };

  __device__ __forceinline__ Source source_of(int index, int thread) const {
    const int position = position_of(tile.begin + index * Plan::kTileKeys + thread);
    if (position < 0 || position >= tile.longest) return {-1, 0};
    const int slot = position >> launch.page_shift;
    if (slot >= p.table_width) return {-1, 0};
    const int page = p.block_table[tile.request * p.table_width + slot];
    return {page >= 0 && page < p.blocks ? page : -1, position & ((1 << launch.page_shift) - 1)};
  }

  // A thread finds one key and copies its scales; codes go by neighbouring lanes, four to a key.
  __device__ __forceinline__ void copy_tile(int stage, const Source& mine, int thread) const {
    const int lane = thread % 32, first = thread - lane;
    const uint32_t codes = shared + Plan::kKeyCodes + stage * Plan::kCodes;
    MLA_FP4_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = i * 8 + lane / 4;
      const int page = __shfl_sync(~0u, mine.page, key), offset = __shfl_sync(~0u, mine.offset, key);
      const uint8_t* from = p.pages;
      if (page >= 0) from += static_cast<int64_t>(page) * launch.page_bytes + offset * Plan::kCodeBytes + lane % 4 * 16;
      ptx::cp_async_16(codes + key_piece(first + key, lane % 4), from, page >= 0);
    }
    const uint8_t* from = p.pages;
    if (mine.page >= 0) {
      from += static_cast<int64_t>(mine.page) * launch.page_bytes + (Plan::kCodeBytes << launch.page_shift) +
              mine.offset * Plan::kScales;
    }
    cp_async_4(shared + Plan::kKeyScales + stage * Plan::kScaleBytes + tcgen05::scale_byte(thread), from,
               mine.page >= 0);
  }

  __device__ __forceinline__ void run_copies(const ScaledQueries& q, int thread) const {
    constexpr int kAhead = Plan::kStages - 2;  // tiles on their way when one is announced
    copy_queries(q, thread);
    const int count = tiles();
    Source next = source_of(0, thread);
    MLA_FP4_NO_UNROLL
    for (int t = 0; t < count + kAhead; ++t) {
      if (t < count) {
        const Source now = next;
        if (t + 1 < count) next = source_of(t + 1, thread);
        ptx::mbarrier_wait(shared + Plan::kEmpty + t % Plan::kStages * 8, (t / Plan::kStages & 1) ^ 1);
        copy_tile(t % Plan::kStages, now, thread);
      }
      ptx::cp_async_commit();
      if (t < kAhead) continue;
      ptx::cp_async_wait<kAhead>();
      ptx::fence_proxy_async();
      __syncwarp();
      if (thread % 32 == 0) ptx::mbarrier_arrive(shared + Plan::kFull + (t - kAhead) % Plan::kStages * 8);
    }
  }

  // --- products ---

  __device__ __forceinline__ void run_products(uint32_t tmem) const {
    const int count = tiles(), parts = groups();
    ptx::mbarrier_wait(shared + Plan::kQueriesFull, 0);
    for (int g = 0; g < parts; ++g) {
      tcgen05::copy_scales(tmem + Plan::kQueryScaleColumns + g * 4,
                           tcgen05::scale_source(shared + Plan::kQueryScales + g * Plan::kScaleBytes));
    }
    uint32_t buffer = 0, parity = 1;
    MLA_FP4_NO_UNROLL
    for (int t = 0; t < count; ++t) {
      const uint32_t stage = t % Plan::kStages, key_scales = tmem + Plan::kKeyScaleColumns + stage * 4;
      const uint64_t a = tcgen05::k_major_64(shared + Plan::kKeyCodes + stage * Plan::kCodes);
      ptx::mbarrier_wait(shared + Plan::kFull + stage * 8, t / Plan::kStages & 1);
      tcgen05::fence_after();
      tcgen05::copy_scales(key_scales, tcgen05::scale_source(shared + Plan::kKeyScales + stage * Plan::kScaleBytes));
      MLA_FP4_NO_UNROLL
      for (int g = 0; g < parts; ++g) {
        const uint64_t b = tcgen05::k_major_64(shared + Plan::kQueryCodes + g * Plan::kCodes);
        const uint32_t n = product_columns(min(kGroupRows, tile.rows - g * kGroupRows), kHeads);
        ptx::mbarrier_wait(shared + Plan::kSumsFree + buffer * 8, parity);
        tcgen05::fence_after();
        MLA_FP4_UNROLL
        for (int half = 0; half < 2; ++half) {
          tcgen05::multiply_mxf4(tmem + Plan::kSums + buffer * Plan::kColumns, tcgen05::advance(a, half * 32),
                                 tcgen05::advance(b, half * 32), tcgen05::mxf4_product(Plan::kTileKeys, n, half),
                                 key_scales, tmem + Plan::kQueryScaleColumns + g * 4, half > 0);
        }
        tcgen05::commit<1>(shared + Plan::kSumsFull + buffer * 8);
        if (++buffer == Plan::kBuffers) buffer = 0, parity ^= 1;
      }
      tcgen05::commit<1>(shared + Plan::kEmpty + stage * 8);
    }
  }

  // --- scores ---

  __device__ __forceinline__ float score(uint32_t sums, int q) const {
    constexpr int kAtOnce = kHeads < 32 ? 8 : 32;
    float total[4] = {0, 0, 0, 0};
    MLA_FP4_UNROLL
    for (int first = 0; first < kHeads; first += kAtOnce) {
      float dots[kAtOnce], weights[kAtOnce];
      tcgen05::load(dots, sums + first);
      MLA_FP4_UNROLL
      for (int i = 0; i < kAtOnce; i += 4) {
        const uint4 w = ptx::load_shared_16(shared + Plan::kWeights + (q * kHeads + first + i) * 4);
        weights[i] = bits_float(w.x), weights[i + 1] = bits_float(w.y);
        weights[i + 2] = bits_float(w.z), weights[i + 3] = bits_float(w.w);
      }
      tcgen05::wait_load();
      tcgen05::pin(dots);
      add_heads(total, dots, weights);
    }
    return sum_heads(total);
  }

  __device__ __forceinline__ void store(float score, int entry, int position, int q, int lane) const {
    const int visible = static_cast<int>(load_shared_4(shared + Plan::kVisible + q * 4));
    const bool seen = position >= 0 && position < visible;
    const float never = bits_float(0xFF800000u);
    const int64_t row = tile.first_row - p.first_row + q, column = entry - p.first_position;
    if (!seen) score = never;
    if (p.scores && (seen || (p.fill_hidden && entry < tile.end))) p.scores[row * p.stride + column] = score;
    if (kCandidates || !p.maxima) return;
    float top = score == score ? score : never;
    MLA_FP4_UNROLL
    for (int step = 1; step < cuda::kIndexMaximaBlock; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (lane % cuda::kIndexMaximaBlock == 0 && entry < (p.fill_hidden ? tile.end : min(tile.end, visible))) {
      p.maxima[row * p.maxima_stride + column / cuda::kIndexMaximaBlock] = top;
    }
  }

  __device__ __forceinline__ void run_scores(uint32_t tmem, int buffer, int thread) const {
    const int parts = groups(), total = tiles() * parts, warp = thread / 32, lane = thread % 32;
    const uint32_t sums = tcgen05::tmem(tmem, warp * 32, Plan::kSums + buffer * Plan::kColumns);
    ptx::mbarrier_wait(shared + Plan::kQueriesFull, 0);  // weights and what is visible
    uint32_t parity = 0;
    MLA_FP4_NO_UNROLL
    for (int n = buffer; n < total; n += Plan::kBuffers, parity ^= 1) {
      const int t = n / parts, first = (n - t * parts) * kGroupRows;
      const int entry = tile.begin + t * Plan::kTileKeys + thread, position = position_of(entry);
      ptx::mbarrier_wait(shared + Plan::kSumsFull + buffer * 8, parity);
      tcgen05::fence_after();
      const int rows = min(kGroupRows, tile.rows - first);
      MLA_FP4_NO_UNROLL
      for (int r = 0; r < rows; ++r) {
        const float s = score(sums + r * kHeads, first + r);
        if (r + 1 == rows) {  // the last sums are in registers
          tcgen05::fence_before();
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(shared + Plan::kSumsFree + buffer * 8);
        }
        store(s, entry, position, first + r, lane);
      }
    }
  }
};

template <int kHeads, bool kCandidates>
__global__ void __launch_bounds__(IndexPlan::kThreads, 1)
    score_keys_sm100(const __grid_constant__ IndexScoreParams p, const __grid_constant__ IndexLaunch launch,
                     const __grid_constant__ ScaledQueries queries) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || !defined(__CUDACC__)
  using Plan = IndexPlan;
  const uint32_t shared = shared_base();
  const int64_t chunk = blockIdx.x % launch.chunks, tile_index = blockIdx.x / launch.chunks;
  IndexTile tile;
  tile.request = tile_index / launch.tiles_of_request;
  tile.first_row =
      max(int64_t{p.cu_seqlens[tile.request]}, p.first_row) + tile_index % launch.tiles_of_request * launch.tile_rows;
  const int64_t left = min(int64_t{p.cu_seqlens[tile.request + 1]}, p.end_row) - tile.first_row;
  if (left <= 0) return;
  tile.rows = static_cast<int>(left < launch.tile_rows ? left : launch.tile_rows);
  tile.longest = 0;
  for (int i = 0; i < tile.rows; ++i) tile.longest = max(tile.longest, p.visible[tile.first_row + i]);
  tile.begin = static_cast<int>(p.first_position + chunk * launch.keys);
  tile.end = static_cast<int>(min(p.first_position + (chunk + 1) * launch.keys, p.width));
  if (!p.fill_hidden) {
    if (!kCandidates) {
      tile.end = min(tile.end, tile.longest);
    } else if (p.candidates[tile.first_row * p.candidates_width + (tile.begin >> launch.candidate_shift)] < 0) {
      return;
    }
  }
  if (tile.begin >= tile.end) return;

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  if (thread == 0) {
    if (shared % 1024 != 0) ptx::fail();
    for (int i = 0; i < Plan::kStages; ++i) {
      ptx::mbarrier_init(shared + Plan::kFull + i * 8, 4);
      ptx::mbarrier_init(shared + Plan::kEmpty + i * 8, 1);
    }
    for (int i = 0; i < Plan::kBuffers; ++i) {
      ptx::mbarrier_init(shared + Plan::kSumsFull + i * 8, 1);
      ptx::mbarrier_init(shared + Plan::kSumsFree + i * 8, 4);
    }
    ptx::mbarrier_init(shared + Plan::kQueriesFull, 4);
    ptx::fence_barrier_init();
  }
  if (warp == Plan::kProductWarp) tcgen05::allocate<1>(shared + Plan::kTmem, Plan::kTmemColumns);
  tcgen05::fence_before();
  __syncthreads();
  tcgen05::fence_after();
  const uint32_t tmem = load_shared_4(shared + Plan::kTmem);

  const IndexKernel<kHeads, kCandidates> kernel = {p, launch, tile, shared};
  if (warp < Plan::kLoadWarp) {
    kernel.run_scores(tmem, warp / 4, thread % 128);
  } else if (warp < Plan::kProductWarp) {
    kernel.run_copies(queries, thread % 128);
  } else if (thread % 32 == 0) {
    kernel.run_products(tmem);
  }
  __syncwarp();
  tcgen05::fence_before();
  __syncthreads();
  tcgen05::fence_after();
  if (warp == Plan::kProductWarp) tcgen05::deallocate<1>(tmem, Plan::kTmemColumns);
#endif
}

}  // namespace mla_fp4::sm100
