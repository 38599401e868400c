// The producer of the attention kernels: one warpgroup that gathers raw rows, decodes them and writes bfloat16 tiles.
//
// A tile is 64 keys x 512 columns as eight columns of swizzled atoms (wgmma.cuh), 8 KiB each. The four warps work
// alone: warp w stages and decodes keys 16 w to 16 w + 15, in its own part of the staging area, so nothing but warp
// barriers orders them. Lane l decodes key l mod 16, column half l / 16. While a pass is decoded out of registers, the
// rows of the next are on their way and the table entries of the one after that are being read.
#pragma once

#include "cuda/sm90/attention_decode.cuh"
#include "cuda/sm90/attention_plan.cuh"
#include "kernel_core/cuda/ptx.cuh"

namespace mla_fp4::cuda {

namespace ptx = kernel_core::ptx;

inline constexpr uint32_t kWarpStage = 16 * kMainUnits * 16;  // 4608 bytes: 16 keys of a main pass
inline constexpr uint32_t kStagingBytes = 4 * kWarpStage;

// Shared addresses that producer and consumers meet at.
struct TileBuffers {
  uint32_t tiles;    // kTiles tiles
  uint32_t staging;  // kStagingBytes
  uint32_t masks;    // 8 bytes a tile: bit k set where key k exists; valid between full and the chunk's last free
  uint32_t full;     // a barrier for each tile, 4 arrivals: it is written
  uint32_t free;     // a barrier for each slice, 8 arrivals: its columns in all tiles were read to the end
};

__device__ __forceinline__ Unit load_unit(uint32_t from) {
  const uint4 v = ptx::load_shared_16(from);
  return {v.x, v.y, v.z, v.w};
}

struct Gather {
  const AttentionParams& a;
  RowPlace place;
  const int32_t* indices;  // of this row
  const int32_t* table;    // of its request
  TileBuffers buffers;
  int first_chunk, passes, warp, lane;
  uint32_t own;

  // Finds the request of a row: the number of requests that end at or before it. Every warp counts for itself, its
  // loads all under way together.
  static __device__ __forceinline__ int64_t request_of(const AttentionParams& a, int64_t row, int lane) {
    uint32_t ended = 0;
    for (int64_t b = lane; b < a.batch; b += 32) ended += a.cu_seqlens[b + 1] <= row;
    return __reduce_add_sync(0xFFFFFFFF, ended);
  }

  __device__ __forceinline__ Gather(const AttentionParams& params, int64_t row, const TileBuffers& shared, int first,
                                    int chunks, int thread)
      : a(params),
        buffers(shared),
        first_chunk(first),
        passes(pass_count(first, chunks)),
        warp(thread / 32),
        lane(thread % 32) {
    const int64_t b = request_of(a, row, lane);
    place = row_place(row, a.cu_seqlens[b], a.start_pos[b], a.lower[b], a.ring_slot[b], a.window, a.ring_rows);
    indices = a.indices + row * a.selected;
    table = a.block_table + b * a.table_width;
    own = buffers.tiles + tile_own(warp * 16 + lane % 16, lane / 16);
  }

  __device__ __forceinline__ int key_of(const Pass& p) const { return p.tile * kTileKeys + warp * 16 + lane % 16; }

  // First step to a selected key: the index, -1 where there is none.
  __device__ __forceinline__ int32_t index_of(int pass) const {
    if (pass >= passes) return -1;
    const Pass p = pass_at(pass, first_chunk);
    const int64_t at = (p.chunk - 1) * kChunkKeys + key_of(p);
    if (p.chunk == 0 || at >= a.selected) return -1;
    const int32_t index = __ldg(indices + at);
    return index_in_reach(index, a.rows_per_block, a.table_width) ? index : -1;
  }

  // Second step: its row, or the window row, whose place needs no memory.
  __device__ __forceinline__ KeyRow row_of(int pass, int32_t index) const {
    if (pass >= passes) return kNoKey;
    const Pass p = pass_at(pass, first_chunk);
    if (p.chunk == 0) return window_key(place, key_of(p), a.window, a.ring_rows);
    if (index < 0) return kNoKey;
    const uint32_t per_block = a.rows_per_block;
    return selected_key(index, __ldg(table + static_cast<uint32_t>(index) / per_block), per_block, a.blocks);
  }

  // Third step: 16 keys of this warp to its staging area, missing ones as zeros. Lanes side by side copy units side by
  // side; a key's row is with lane `key`.
  __device__ __forceinline__ void stage(int pass, KeyRow mine) const {
    if (pass < passes) {
      const Pass p = pass_at(pass, first_chunk);
      if (p.chunk > 0) {
        copy<true>(mine, p.part);
      } else {
        copy<false>(mine, p.part);
      }
    }
    ptx::cp_async_commit();
  }

  template <bool kMain>
  __device__ __forceinline__ void copy(KeyRow mine, int part) const {
    constexpr int kUnits = kMain ? kMainUnits : kWindowUnits;
    const uint32_t area = buffers.staging + warp * kWarpStage;
#pragma unroll 3  // more addresses at once would not fit beside the raw rows in registers
    for (int i = 0; i < (16 * kUnits + 31) / 32; ++i) {
      const int n = i * 32 + lane, key = n / kUnits, u = n % kUnits;
      const KeyRow row = __shfl_sync(0xFFFFFFFF, mine, key & 15);
      if (key > 15) continue;
      const bool some = row != kNoKey;
      const uint8_t* base = kMain ? a.pages : some && !(row & kNewRow) ? a.ring : a.new_rows;
      const int64_t offset = kMain ? main_offset(row) + u * 16 : window_offset(row) + window_unit(u, part) * 16;
      ptx::cp_async_16(area + (key * kUnits + (kMain ? staged_main_unit(key, u) : u)) * 16, base + (some ? offset : 0),
                       some);
    }
  }

  // What the decoders write through.
  struct Tile {
    const TileBuffers& buffers;
    uint32_t own;
    int tile, turn;
    __device__ __forceinline__ void begin(int slice) const {
      ptx::mbarrier_wait(buffers.free + slice * 8, (turn & 1) ^ 1);
    }
    __device__ __forceinline__ void store(int s, int c, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) const {
      ptx::store_shared_16(tile_piece(own, tile, s, c), v0, v1, v2, v3);
    }
  };

  // A missing key's staged bytes are zeros: code 0 under scale byte 0 is +0 in both formats.
  __device__ __forceinline__ void run() {
    const int key = lane % 16, half = lane / 16;
    KeyRow row = row_of(0, index_of(0)), next_row = row_of(1, index_of(1));
    int32_t next_index = index_of(2);
    stage(0, row);
    for (int pass = 0; pass < passes; ++pass) {
      const Pass p = pass_at(pass, first_chunk);
      const int turn = p.chunk - first_chunk;
      asm volatile("" : "+r"(own));  // else every target becomes a register of its own for the whole loop
      const uint32_t exists = __ballot_sync(0xFFFFFFFF, row != kNoKey) & 0xFFFF;
      ptx::cp_async_wait<0>();
      __syncwarp();
      Unit raw[8], scales;
      if (p.chunk > 0) {
        const uint32_t area = buffers.staging + warp * kWarpStage + key * kMainUnits * 16;
#pragma unroll
        for (int u = 0; u < 8; ++u) raw[u] = load_unit(area + staged_main_unit(key, half * 8 + u) * 16);
        scales = load_unit(area + staged_main_unit(key, 16 + half) * 16);
      } else {
        const uint32_t area = buffers.staging + warp * kWarpStage + key * kWindowUnits * 16;
#pragma unroll
        for (int u = 0; u < 8; ++u) raw[u] = load_unit(area + (half * 8 + u) * 16);
        scales = load_unit(area + 16 * 16);
      }
      __syncwarp();  // all of the warp have read before the next rows land
      row = next_row;
      stage(pass + 1, row);
      next_row = row_of(pass + 2, next_index);
      next_index = index_of(pass + 3);
      const Tile tile = {buffers, own, p.tile, turn};
      if (p.chunk > 0) {
        decode_main(raw, scales, tile);
      } else {
        decode_window(raw, window_scales(scales, half, p.part), p.part, tile);
      }
      if (pass_ends_tile(p)) {
        if (lane == 0) {
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(buffers.masks + p.tile * 8 + warp * 2),
                       "h"(static_cast<uint16_t>(exists))
                       : "memory");
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(buffers.full + p.tile * 8);
      }
    }
    ptx::cp_async_wait<0>();
  }
};

}  // namespace mla_fp4::cuda
