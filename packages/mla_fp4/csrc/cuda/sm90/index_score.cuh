// A thread block scores a range of keys against the queries of a tile: some rows of one request.
//
// Two warpgroups take tiles of 64 keys in turn. A warp copies the 16 keys that are its rows of the product (68 bytes
// each) to its own part of shared memory, some tiles ahead, so that copies need no barrier between warps. It turns
// codes into E4M3 in registers, the A operand, once for all queries; a product's 32 columns are the heads of a query.
//
// Budget of a multiprocessor for a key at 32 heads, q queries in the tile, from the machine code (four instructions a
// cycle; a warp takes 16 keys with 200 + 178 q of them):
//   bytes          68 at 18.6 a cycle                                                              3.7 cycles
//   instructions   (12.5 + 11.1 q) / 4: 6 q for scales, relu and weights, 3.5 for E4M3     3.1 + 2.8 q
//   tensor unit    4 products of 64 x 32 x 32                                                            q
//   shared memory  codes twice, scales, the B operand                                            1.3 + 0.5 q
// So instructions bound it, at 5.9 cycles for one query (0.62 of the bytes' bound). A bfloat16 product over all
// channels would need 3.1 + 0.9 q instruction and 2 q tensor cycles, and would not be exact.
#pragma once

#include "index_queries.cuh"
#include "kernel_core/cuda/ptx.cuh"

namespace mla_fp4::sm90 {

template <int kHeads_, int kQueries_, int kStages_>
struct IndexConfig {
  static constexpr int kHeads = kHeads_;
  static constexpr int kQueries = kQueries_;  // of a tile
  static constexpr int kStages = kStages_;    // tiles of keys of a warp, on their way or in use
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = kWarpgroups * 128;
  static constexpr int kTile = 64;
  static constexpr int kTogether = kHeads == 8 ? 4 : 1;                          // queries of one product
  static constexpr int kParts = kHeads > index_plan::kColumns ? 2 : 1;           // products of one query
  static constexpr int kImage = kHeads * index_plan::kDim;                       // bytes of a query
  static constexpr int kProductBytes = index_plan::kColumns * index_plan::kDim;  // of the B operand
  static_assert(kQueries % kTogether == 0 && kHeads * kTogether == kParts * index_plan::kColumns);
};

struct alignas(64) KeyStage {
  uint4 codes[16 * index_plan::kGroups];  // pieces, in the order of key_piece
  uint32_t scales[16];
};

template <typename C>
struct IndexShared {
  uint8_t images[C::kQueries * C::kImage];  // first: atoms are 1024-byte aligned
  KeyStage keys[C::kThreads / 32][C::kStages];
  float weights[C::kQueries * C::kHeads];
  float factors[C::kQueries * C::kHeads][index_plan::kGroups];
  int visible[C::kQueries];
};

#if defined(__CUDACC__)  // a test runs the rest with threads of the host

// D = A B, 64 keys x 32 columns x 32 channels of E4M3; A in registers. Starts from zero.
__device__ __forceinline__ void multiply_step(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1;\n}\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),
        "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(valid ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

#endif  // __CUDACC__

// Which rows and keys a thread block has.
struct IndexTile {
  int64_t first_row;
  int rows;
  int64_t request;
  int begin, end;  // entries, that is keys, or keys of candidate blocks
  int longest;     // positions from here on are seen by no row of the tile
};

struct IndexLaunch {
  int64_t keys, chunks, tiles_of_request;
  int tile_rows;
  int page_bytes, page_shift, candidate_shift;
};

template <typename C, bool kCandidates>
class IndexScorer {
 public:
  __device__ IndexScorer(const IndexScoreParams& p, const IndexLaunch& launch, IndexShared<C>& shared, IndexTile tile)
      : p_(p),
        launch_(launch),
        s_(shared),
        tile_(tile),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        images_(kernel_core::ptx::shared_address(shared.images)) {}

  __device__ void run(const PackedQueries& queries) {
    copy_queries(queries);
    constexpr int step = C::kWarpgroups * C::kTile;
    // The tiles of a warpgroup begin and end for its four warps together.
    int tile = tile_.begin + warp_ / 4 * C::kTile;
    MLA_FP4_NO_UNROLL
    for (int s = 0; s < C::kStages - 1; ++s) request(s, tile + s * step + warp_ % 4 * 16);
    kernel_core::ptx::cp_async_wait<C::kStages - 1>();
    kernel_core::ptx::fence_proxy_async();
    wide_ = __syncthreads_or(wide_);
    int stage = 0;
    for (; tile < tile_.end; tile += step) {
      kernel_core::ptx::cp_async_wait<C::kStages - 2>();
      __syncwarp();
      const int at = tile + warp_ % 4 * 16;
      request(stage == 0 ? C::kStages - 1 : stage - 1, at + (C::kStages - 1) * step);
      take(s_.keys[warp_][stage]);
      score(at);
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
    }
  }

 private:
  __device__ void copy_queries(const PackedQueries& queries) {
    const uint8_t* const from = queries.images + tile_.first_row * C::kImage;
    for (int i = threadIdx.x * 16; i < tile_.rows * C::kImage; i += C::kThreads * 16)
      kernel_core::ptx::cp_async_16(kernel_core::ptx::shared_address(s_.images + i), from + i);
    kernel_core::ptx::cp_async_commit();
    for (int i = tile_.rows * C::kImage + threadIdx.x * 16; i < C::kQueries * C::kImage; i += C::kThreads * 16)
      *reinterpret_cast<uint4*>(s_.images + i) = make_uint4(0, 0, 0, 0);
    const int columns = tile_.rows * C::kHeads;
    for (int i = threadIdx.x; i < C::kQueries * C::kHeads; i += C::kThreads) {
      const int64_t at = tile_.first_row * C::kHeads + i;
      s_.weights[i] = i < columns ? queries.weights[at] : 0.0f;
      *reinterpret_cast<float4*>(s_.factors[i]) =
          i < columns ? reinterpret_cast<const float4*>(queries.factors)[at] : make_float4(1, 1, 1, 1);
    }
    for (int i = threadIdx.x; i < tile_.rows; i += C::kThreads) {
      s_.visible[i] = p_.visible[tile_.first_row + i];
      wide_ |= queries.wide[tile_.first_row + i];
    }
  }

  // Position of an entry below tile_.end, or -1. With candidates a tile has one row.
  __device__ int position_of(int entry) const {
    if constexpr (!kCandidates) return entry;
    const int id = p_.candidates[tile_.first_row * p_.candidates_width + (entry >> launch_.candidate_shift)];
    return id < 0 ? -1 : (id << launch_.candidate_shift) + (entry & ((1 << launch_.candidate_shift) - 1));
  }

  // The page of a position; -1 where the table has none.
  __device__ int page_of(int position) const {
    const int slot = position >> launch_.page_shift;
    if (slot >= p_.table_width) return -1;
    const int page = p_.block_table[tile_.request * p_.table_width + slot];
    return page < p_.blocks ? max(page, -1) : -1;
  }

  __device__ const uint8_t* page_address(int page) const {
    return p_.pages + static_cast<int64_t>(page) * launch_.page_bytes;
  }

  // Asks for 16 keys. Keys that no row sees become zeros, whatever their bytes.
  __device__ void request(int stage, int first) {
    const uint32_t codes = kernel_core::ptx::shared_address(s_.keys[warp_][stage].codes);
    const uint32_t scales = kernel_core::ptx::shared_address(s_.keys[warp_][stage].scales) + lane_ * 4;
    const int page_rows = 1 << launch_.page_shift;
    if constexpr (kCandidates) {  // a lane finds one key; four lanes copy its codes, it copies the scales itself
      int page = -1, offset = 0;
      if (const int entry = first + lane_ % 16; entry < tile_.end) {
        const int position = position_of(entry);
        if (position >= 0 && position < tile_.longest) page = page_of(position), offset = position & (page_rows - 1);
      }
      MLA_FP4_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = i * 8 + lane_ / 4;
        const int its_page = __shfl_sync(~0u, page, row);
        const int at = __shfl_sync(~0u, offset, row) * index_plan::kCodeBytes + lane_ % 4 * 16;
        kernel_core::ptx::cp_async_16(codes + index_plan::key_piece(row, lane_ % 4) * 16,
                                      its_page < 0 ? p_.pages : page_address(its_page) + at, its_page >= 0);
      }
      const int at = page_rows * index_plan::kCodeBytes + offset * index_plan::kGroups;
      if (lane_ < 16) cp_async_4(scales, page < 0 ? p_.pages : page_address(page) + at, page >= 0);
    } else {  // the 16 keys are neighbours in one page
      const int keys = min(tile_.end, tile_.longest) - first;
      if (keys > 0 && first >> launch_.page_shift != slot_) slot_ = first >> launch_.page_shift, page_ = page_of(first);
      const int there = page_ < 0 ? 0 : keys, offset = first & (page_rows - 1);
      const uint8_t* const base = page_address(page_);
      const uint8_t* const from = base + offset * index_plan::kCodeBytes + lane_ * 16;
      const uint8_t* const bytes = base + page_rows * index_plan::kCodeBytes + (offset + lane_) * index_plan::kGroups;
      const uint32_t to = codes + index_plan::key_piece(lane_ / 4, lane_ % 4) * 16;
      if (there >= 16) {
        kernel_core::ptx::cp_async_16(to, from);
        kernel_core::ptx::cp_async_16(to + 512, from + 512);
        if (lane_ < 16) cp_async_4(scales, bytes, true);
      } else {
        kernel_core::ptx::cp_async_16(to, lane_ / 4 < there ? from : p_.pages, lane_ / 4 < there);
        kernel_core::ptx::cp_async_16(to + 512, lane_ / 4 + 8 < there ? from + 512 : p_.pages, lane_ / 4 + 8 < there);
        if (lane_ < 16) cp_async_4(scales, lane_ < there ? bytes : p_.pages, lane_ < there);
      }
    }
    kernel_core::ptx::cp_async_commit();
  }

  // Codes to the A operand and scales to floats: of rows lane / 4 and 8 more, which share the order of their pieces.
  __device__ void take(const KeyStage& from) {
    const uint32_t codes =
        kernel_core::ptx::shared_address(from.codes) + index_plan::key_piece(lane_ / 4, 0) * 16 + lane_ % 4 * 4;
    MLA_FP4_UNROLL
    for (int half = 0; half < 2; ++half) {
      MLA_FP4_UNROLL
      for (int g = 0; g < index_plan::kGroups; ++g) {
        uint32_t words[2];
        index_plan::key_words(load_shared_4((codes ^ g * 16) + half * 512), words);
        keys_[g][half] = words[0];
        keys_[g][half + 2] = words[1];
      }
      index_plan::key_scales(from.scales[half * 8 + lane_ / 4], scales_[half]);
    }
  }

  __device__ void score(int at) {
    for (int q = 0; q < tile_.rows; q += C::kTogether) {
      float sums[C::kTogether][2] = {};
      MLA_FP4_NO_UNROLL  // two products at once would not fit the registers
          for (int part = 0; part < C::kParts; ++part) multiply(q / C::kTogether * C::kParts + part, sums);
      MLA_FP4_UNROLL
      for (int i = 0; i < C::kTogether; ++i) {
        MLA_FP4_UNROLL
        for (int half = 0; half < 2; ++half) {  // quad_sum: the lanes' sums in pairs
          sums[i][half] += __shfl_xor_sync(~0u, sums[i][half], 1);
          sums[i][half] += __shfl_xor_sync(~0u, sums[i][half], 2);
        }
        if (q + i < tile_.rows) store(at, q + i, lane_ % 2 ? sums[i][1] : sums[i][0]);
      }
    }
  }

  // The product of the tile with 32 columns, relu, weights, and the sum over this lane's heads.
  __device__ void multiply(int product, float (&sums)[C::kTogether][2]) {
    namespace wgmma = kernel_core::wgmma;
    const uint64_t b = wgmma::k_major(kernel_core::ptx::shared_address(s_.images) + product * C::kProductBytes);
    float d[index_plan::kGroups][16];
    wgmma::fence();
    MLA_FP4_UNROLL
    for (int g = 0; g < index_plan::kGroups; ++g) multiply_step(d[g], keys_[g], wgmma::advance(b, g * 32));
    wgmma::commit();
    wgmma::wait<0>();
    MLA_FP4_UNROLL
    for (int g = 0; g < index_plan::kGroups; ++g) wgmma::pin(d[g]);

    const int column = product * index_plan::kColumns + lane_ % 4 * 2;
    if (wide_) {
      MLA_FP4_UNROLL
      for (int g = 0; g < index_plan::kGroups; ++g) MLA_FP4_UNROLL
      for (int i = 0; i < 16; ++i)
        d[g][i] = kernel_core::cuda::mul_rn(d[g][i], s_.factors[column + i / 4 * 8 + i % 2][g]);
    }
    MLA_FP4_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float2 weights = *reinterpret_cast<const float2*>(&s_.weights[column + j * 8]);
      float (&sum)[2] = sums[C::kTogether > 1 ? j : 0];
      MLA_FP4_UNROLL
      for (int half = 0; half < 2; ++half) {
        MLA_FP4_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int at = 4 * j + 2 * half + i;
          const float steps[index_plan::kGroups] = {d[0][at], d[1][at], d[2][at], d[3][at]};
          const float dot = index_plan::relu(index_plan::dot(steps, scales_[half]));
          sum[half] = index_plan::fused(i ? weights.y : weights.x, dot, sum[half]);
        }
      }
    }
  }

  // Even lanes have row lane / 4 of the warp's keys, odd ones the row 8 further on; two of a quad write.
  __device__ void store(int at, int q, float score) {
    const int entry = at + lane_ / 4 + lane_ % 2 * 8, visible = s_.visible[q];
    bool seen = entry < min(tile_.end, visible);
    if constexpr (kCandidates) {
      const int position = entry < tile_.end ? position_of(entry) : -1;
      seen = position >= 0 && position < visible;
    }
    const float never = index_plan::bits_float(0xFF800000u);
    const int64_t row = tile_.first_row + q;
    if (!seen) score = never;
    if (p_.scores && lane_ % 4 < 2 && (seen || (p_.fill_hidden && entry < tile_.end)))
      p_.scores[row * p_.stride + entry] = score;
    if (kCandidates || !p_.maxima) return;
    float top = score == score ? score : never;
    MLA_FP4_UNROLL
    for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const int first = at + lane_ * 8;
    if (lane_ < 2 && first < (p_.fill_hidden ? tile_.end : min(tile_.end, visible)))
      p_.maxima[row * p_.maxima_stride + first / 8] = top;
  }

  const IndexScoreParams& p_;
  const IndexLaunch& launch_;
  IndexShared<C>& s_;
  const IndexTile tile_;
  const int warp_, lane_;
  const uint32_t images_;
  int slot_ = -1;  // of the table: where the last keys were, and
  int page_ = -1;  // its page
  int wide_ = 0;   // whether any query of the tile needs its factors; for the others they are 1 and change nothing
  uint32_t keys_[index_plan::kGroups][4];
  float scales_[2][index_plan::kGroups];
};

template <typename C, bool kCandidates>
__global__ void __launch_bounds__(C::kThreads, 2)
    score_keys(const __grid_constant__ IndexScoreParams p, const __grid_constant__ IndexLaunch launch,
               const __grid_constant__ PackedQueries queries) {
  extern __shared__ __align__(1024) uint8_t memory[];
  if (kernel_core::ptx::shared_address(memory) % 1024) __trap();  // swizzled atoms begin at multiples of it
  auto& shared = *reinterpret_cast<IndexShared<C>*>(memory);
  const int64_t chunk = blockIdx.x % launch.chunks, tile_index = blockIdx.x / launch.chunks;
  IndexTile tile;
  tile.request = tile_index / launch.tiles_of_request;
  tile.first_row = p.cu_seqlens[tile.request] + tile_index % launch.tiles_of_request * launch.tile_rows;
  const int64_t left = p.cu_seqlens[tile.request + 1] - tile.first_row;
  if (left <= 0) return;
  tile.rows = static_cast<int>(left < launch.tile_rows ? left : launch.tile_rows);
  tile.longest = 0;
  for (int i = 0; i < tile.rows; ++i) tile.longest = max(tile.longest, p.visible[tile.first_row + i]);
  tile.begin = static_cast<int>(chunk * launch.keys);
  tile.end = static_cast<int>(min((chunk + 1) * launch.keys, p.width));
  if (!p.fill_hidden) {
    if (!kCandidates)
      tile.end = min(tile.end, tile.longest);
    else if (p.candidates[tile.first_row * p.candidates_width + (tile.begin >> launch.candidate_shift)] < 0)
      return;
  }
  if (tile.begin >= tile.end) return;
  IndexScorer<C, kCandidates>(p, launch, shared, tile).run(queries);
}

}  // namespace mla_fp4::sm90
