// Keys on their way to shared memory, some stages of 128 keys ahead of the warpgroup that scores them.
//
// Pages of at least 64 rows: one thread of a warpgroup asks for a stage by bulk copies, whole tiles: what nobody sees
// is scored and not written. Smaller pages and candidate blocks: each warp copies its own keys in small pieces.
#pragma once

#include "../index_score.hpp"
#include "index_plan.cuh"
#include "kernel_core/cuda/ptx.cuh"
#include "unroll.cuh"

namespace mla_fp4::sm90 {

using cuda::IndexScoreParams;

inline constexpr int kTile = 64;       // keys of a product
inline constexpr int kStageTiles = 2;  // what a barrier, a copy and a turn of the loop cost is shared by two
inline constexpr int kStageKeys = kStageTiles * kTile;
inline constexpr int kTileCodes = kTile * index_plan::kCodeBytes, kTileScales = kTile * index_plan::kGroups;  // bytes

enum class KeySource { bulk, copied, candidates };

// kQueries of a tile; kTogether of a product; kStages of a warpgroup, on their way or in use; kBlocks run at once on a
// multiprocessor.
template <int kHeads_, int kQueries_, int kTogether_, int kStages_, int kBlocks_, KeySource kKeys_>
struct IndexConfig {
  static constexpr int kHeads = kHeads_, kQueries = kQueries_, kTogether = kTogether_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr KeySource kKeys = kKeys_;
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = kWarpgroups * 128;
  static constexpr int kStep = kWarpgroups * kStageKeys;  // keys of a turn
  static constexpr int kColumns = kHeads * kTogether;
  static constexpr int kImage = kHeads * index_plan::kDim;  // bytes of a query
  static_assert(kQueries % kTogether == 0 && (kTogether == 1 || kTogether % 2 == 0));
};

// Which rows and keys a thread block has.
struct IndexTile {
  int64_t first_row;
  int rows;
  int64_t request;
  int begin, end;  // entries, that is keys, or keys of candidate blocks
  int longest;     // positions from here on are seen by no row of the tile
};

template <typename C>
struct IndexShared {
  alignas(128) uint8_t codes[C::kWarpgroups][C::kStages][kStageTiles * kTileCodes];
  alignas(128) uint8_t scales[C::kWarpgroups][C::kStages][kStageTiles * kTileScales];
  alignas(16) float weights[C::kQueries * C::kHeads];
  uint64_t full[C::kWarpgroups][C::kStages], empty[C::kWarpgroups][C::kStages];
  uint64_t magnitudes[index_plan::kDepths];
  IndexTile tile;
  int limits[C::kQueries];                                // a query sees the entries of the tile below it
  int pages[index_plan::kLargestChunk / kTile];           // of the chunk, -1 for none
  alignas(1024) uint8_t images[C::kQueries * C::kImage];  // last: only those of the launch's rows are there

  static constexpr int64_t bytes(int64_t rows) {
    const int64_t whole = (rows + C::kTogether - 1) / C::kTogether * C::kTogether;
    return static_cast<int64_t>(sizeof(IndexShared)) -
           (C::kQueries - (whole < C::kQueries ? whole : C::kQueries)) * C::kImage;
  }
};

struct IndexLaunch {
  int64_t keys, chunks, tiles_of_request;
  int tile_rows;
  int page_bytes, page_shift, candidate_shift;
};

#if defined(__CUDACC__)
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(valid ? 4 : 0)
               : "memory");
}

// The compiler would compute addresses anew for each use, from special registers.
__device__ __forceinline__ uint32_t once(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
#endif

// What a page that is not there holds.
static __device__ const uint4 kZeroCodes[kTileCodes / 16] = {};

template <typename C>
class IndexKeys {
 public:
  __device__ IndexKeys(const IndexScoreParams& p, const IndexLaunch& launch, IndexShared<C>& shared, int end)
      : p_(p),
        launch_(launch),
        s_(shared),
        tile_(shared.tile),
        end_(end),
        group_(static_cast<int>(once(threadIdx.x / 128))),
        lane_(static_cast<int>(once(threadIdx.x % 32))),
        warp_(static_cast<int>(once(threadIdx.x / 32 % 4))),
        full_(once(kernel_core::ptx::shared_address(shared.full[group_]))) {}

  // Asks for the first stages. All threads.
  __device__ void prepare() {
    if constexpr (kBulk) {
      const int first = tile_.begin >> launch_.page_shift, last = (end_ - 1) >> launch_.page_shift;
      for (int i = threadIdx.x; i <= last - first; i += C::kThreads) s_.pages[i] = page_in_slot(first + i);
      if (threadIdx.x == 0) {
        MLA_FP4_NO_UNROLL
        for (int i = 0; i < C::kWarpgroups * C::kStages; ++i) {
          kernel_core::ptx::mbarrier_init(kernel_core::ptx::shared_address(&s_.full[0][i]), 1);
          kernel_core::ptx::mbarrier_init(kernel_core::ptx::shared_address(&s_.empty[0][i]), 4);
        }
        kernel_core::ptx::fence_barrier_init();
      }
      __syncthreads();
    }
    MLA_FP4_NO_UNROLL
    for (int i = 0; i < C::kStages - 1; ++i) request(i, tile_.begin + group_ * kStageKeys + i * C::kStep);
  }

  __device__ int stage() const { return stage_; }

  // The present stage has arrived.
  __device__ void wait() {
    if constexpr (kBulk) {
      kernel_core::ptx::mbarrier_wait(full_ + stage_ * 8, round_ & 1);
    } else {
      kernel_core::ptx::cp_async_wait<C::kStages - 2>();
      __syncwarp();
    }
  }

  // Asks for keys further on than the present ones at `at`, where the stage before stood.
  __device__ void ahead(int at) {
    const int before = stage_ == 0 ? C::kStages - 1 : stage_ - 1;
    const int next = at + (C::kStages - 1) * C::kStep;
    if constexpr (kBulk) {
      if (threadIdx.x % 128 == 0 && next < end_) {
        // Filled so often before: round_ times, the stages behind this one once more; read as often. The first passes.
        const int fills = stage_ == 0 ? round_ : round_ + 1;
        kernel_core::ptx::mbarrier_wait(full_ + kToEmpty + before * 8, (fills + 1) & 1);
        request(before, next);
      }
      __syncwarp();
    } else {
      __syncwarp();
      request(before, next);
    }
  }

  // The warp has read the present stage; the next becomes present.
  __device__ void taken() {
    if constexpr (kBulk) {
      __syncwarp();
      if (lane_ == 0) kernel_core::ptx::mbarrier_arrive(full_ + kToEmpty + stage_ * 8);
    }
    if (++stage_ == C::kStages) stage_ = 0, ++round_;
  }

  // Position of an entry below the tile's end, or -1. With candidates a tile has one row.
  __device__ int position_of(int entry) const {
    if constexpr (C::kKeys != KeySource::candidates) return entry;
    const int id = p_.candidates[tile_.first_row * p_.candidates_width + (entry >> launch_.candidate_shift)];
    return id < 0 ? -1 : (id << launch_.candidate_shift) + (entry & ((1 << launch_.candidate_shift) - 1));
  }

 private:
  static constexpr bool kBulk = C::kKeys == KeySource::bulk;
  static constexpr uint32_t kToEmpty = C::kWarpgroups * C::kStages * 8;  // from full[i][j] to empty[i][j]

  // -1 where the table has none.
  __device__ int page_in_slot(int slot) const {
    if (slot >= p_.table_width) return -1;
    const int page = p_.block_table[tile_.request * p_.table_width + slot];
    return page < p_.blocks ? max(page, -1) : -1;
  }

  __device__ const uint8_t* page_address(int page) const {
    return p_.pages + static_cast<int64_t>(page) * launch_.page_bytes;
  }

  // Asks for the warpgroup's keys from `first` on.
  __device__ void request(int stage, int first) {
    if constexpr (kBulk) {
      request_tiles(stage, first);
    } else {
      MLA_FP4_NO_UNROLL
      for (int t = 0; t < kStageTiles; ++t) {
        const int at = first + t * kTile + warp_ * 16, part = t * kTile + warp_ * 16;
        const uint32_t codes =
            kernel_core::ptx::shared_address(s_.codes[group_][stage]) + part * index_plan::kCodeBytes + lane_ * 16;
        const uint32_t scales =
            kernel_core::ptx::shared_address(s_.scales[group_][stage]) + (part + lane_) * index_plan::kGroups;
        if constexpr (C::kKeys == KeySource::candidates)
          request_candidates(codes, scales, at);
        else
          request_rows(codes, scales, at);
      }
      kernel_core::ptx::cp_async_commit();
    }
  }

  // Tiles that begin before the end, each inside one page; two of a page by one pair of copies.
  __device__ void request_tiles(int stage, int first) {
    namespace ptx = kernel_core::ptx;
    if (threadIdx.x % 128 != 0 || first >= end_) return;
    const uint32_t full = full_ + stage * 8;
    const int page_rows = 1 << launch_.page_shift;
    const int tiles = first + kTile < end_ ? kStageTiles : 1, piece = page_rows > kTile ? tiles : 1;
    ptx::mbarrier_arrive_expect_tx(full, tiles * (kTileCodes + kTileScales));
    MLA_FP4_NO_UNROLL
    for (int t = 0; t < tiles; t += piece) {
      const int at = first + t * kTile, offset = at & (page_rows - 1);
      const int page = s_.pages[(at >> launch_.page_shift) - (tile_.begin >> launch_.page_shift)];
      const uint8_t* codes = page_address(page) + offset * index_plan::kCodeBytes;
      const uint8_t* scales = page_address(page) + page_rows * index_plan::kCodeBytes + offset * index_plan::kGroups;
      const uint32_t to_codes = ptx::shared_address(s_.codes[group_][stage]) + t * kTileCodes;
      const uint32_t to_scales = ptx::shared_address(s_.scales[group_][stage]) + t * kTileScales;
      if (page < 0) {
        scales = codes = reinterpret_cast<const uint8_t*>(kZeroCodes);
        if (piece == 2) ptx::cp_async_bulk(to_codes + kTileCodes, codes, kTileCodes, full);
      }
      ptx::cp_async_bulk(to_codes, codes, page < 0 ? kTileCodes : piece * kTileCodes, full);
      ptx::cp_async_bulk(to_scales, scales, piece * kTileScales, full);
    }
  }

  // A lane finds one key; four lanes copy its codes, it copies the scales itself. Keys that no row sees become zeros.
  __device__ void request_candidates(uint32_t codes, uint32_t scales, int first) {
    const int page_rows = 1 << launch_.page_shift;
    int page = -1, offset = 0;
    if (const int entry = first + lane_ % 16; entry < tile_.end) {
      const int position = position_of(entry);
      if (position >= 0 && position < tile_.longest)
        page = page_in_slot(position >> launch_.page_shift), offset = position & (page_rows - 1);
    }
    MLA_FP4_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = i * 8 + lane_ / 4;
      const int its_page = __shfl_sync(~0u, page, row);
      const int at = __shfl_sync(~0u, offset, row) * index_plan::kCodeBytes + lane_ % 4 * 16;
      kernel_core::ptx::cp_async_16(codes + i * 512, its_page < 0 ? p_.pages : page_address(its_page) + at,
                                    its_page >= 0);
    }
    const int at = page_rows * index_plan::kCodeBytes + offset * index_plan::kGroups;
    if (lane_ < 16) cp_async_4(scales, page < 0 ? p_.pages : page_address(page) + at, page >= 0);
  }

  // 16 keys that are neighbours in one page. Keys from the end on become zeros.
  __device__ void request_rows(uint32_t codes, uint32_t scales, int first) {
    const int page_rows = 1 << launch_.page_shift;
    const int page = first < end_ ? page_in_slot(first >> launch_.page_shift) : -1;
    const int there = page < 0 ? 0 : end_ - first, offset = first & (page_rows - 1);
    const uint8_t* const from = page_address(page) + offset * index_plan::kCodeBytes + lane_ * 16;
    const uint8_t* const bytes =
        page_address(page) + page_rows * index_plan::kCodeBytes + (offset + lane_) * index_plan::kGroups;
    MLA_FP4_UNROLL
    for (int i = 0; i < 2; ++i) {
      const bool valid = lane_ / 4 + i * 8 < there;
      kernel_core::ptx::cp_async_16(codes + i * 512, valid ? from + i * 512 : p_.pages, valid);
    }
    if (lane_ < 16) cp_async_4(scales, lane_ < there ? bytes : p_.pages, lane_ < there);
  }

  const IndexScoreParams& p_;
  const IndexLaunch& launch_;
  IndexShared<C>& s_;
  const IndexTile& tile_;          // in shared memory: registers are few
  const int end_;                  // of the entries that are scored
  const int group_, lane_, warp_;  // warpgroup of the block, lane of the warp, warp of the warpgroup
  const uint32_t full_;            // the warpgroup's first barrier
  int stage_ = 0, round_ = 0;
};

}  // namespace mla_fp4::sm90
