// The producer of the attention kernels: eight or sixteen warps that fetch raw rows, decode them and write bfloat16
// tiles.
//
// Each warp works alone on its keys of its tiles (attention_tiles.cuh, Walk), so nothing but warp barriers orders its
// copies: lane l copies pieces of key l mod 8 and decodes 32 columns of each quarter of it, l / 8 saying which. A pass
// moves from the staging area to registers, and while it is decoded the rows of the next are on their way. Which rows
// these are is found for four tiles at once, step by step while the four before are decoded: indices, blocks, rows.
#pragma once

#include "cuda/sm90/attention_tiles.cuh"
#include "kernel_core/cuda/ptx.cuh"

namespace mla_fp4::cuda {

namespace ptx = kernel_core::ptx;

// Shared addresses that producer and consumers meet at. Barriers are 8 bytes apart, tile t uses buffer t mod 2.
struct TileBuffers {
  uint32_t tiles;    // 2 tiles
  uint32_t staging;  // Producer::kStagingBytes
  uint32_t masks;    // 8 bytes a buffer: bit k set where key k exists; valid from `full` to `free`
  uint32_t full;     // [buffer], 8 arrivals: the tile is written
  uint32_t free;     // [buffer], 8 arrivals: the tile was read for the last time
};

template <int kGroups>
struct Producer {
  using Tiles = Walk<kGroups>;
  static constexpr uint32_t kStagingBytes = kGroups * 8 * kStageBytes;

  const AttentionParams& a;
  const TileBuffers& buffers;
  int group, warp, lane;    // `warp` of the eight of its group
  uint32_t area;            // of this warp's staging
  uint32_t own;             // of this lane's first piece in a tile
  uint32_t tiles_done = 0;  // of this group since the kernel's start

  // The batch to come: its row, below 0 after the last, and the row's request. Known of it so far: in lane l, of key
  // l mod 8 of its tile l / 8.
  int next_row, next_number;
  uint32_t next_request, found;
  uint32_t rows;           // the same of the batch that is decoded
  uint32_t exists;         // keys of the pass under way
  uint32_t rows_done = 0;  // rows of this CTA before that of the batch to come

  __device__ __forceinline__ Producer(const AttentionParams& params, const TileBuffers& shared, int thread)
      : a(params), buffers(shared), lane(thread % 32) {
    const int number = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
    warp = number % 8, group = number / 8;
    area = buffers.staging + number * kStageBytes;
    own = buffers.tiles + group * kTileBytes + tile_piece(warp * kProducerKeys + lane % 8, 0, lane / 8, 0);
  }

  // The request of a row. In a step of one row a request, and where there is one request, the first guess is right;
  // else it is the number of requests that end at or before the row.
  __device__ __forceinline__ uint32_t request_of(int row) const {
    const int64_t guess = row < a.batch ? row : a.batch - 1;
    const int begin = __ldg(a.cu_seqlens + guess), end = __ldg(a.cu_seqlens + guess + 1);
    if (begin <= row && row < end) return static_cast<uint32_t>(guess);
    uint32_t ended = 0;
#pragma unroll 1
    for (int64_t b = lane; b < a.batch; b += 32) ended += a.cu_seqlens[b + 1] <= row;
    return __reduce_add_sync(0xFFFFFFFF, ended);
  }

  __device__ __forceinline__ Tiles walk() const {  // of the row of the batch to come
    const int tiles = tile_count(a.selected);
    return Tiles::of(group, rows_done * static_cast<uint32_t>(tiles), tiles);
  }

  // --- three steps to the rows of the batch to come ---

  __device__ __forceinline__ void find_index() {
    if (next_row < 0) return;
    if (next_number == kWindowBatch) {
      next_request = request_of(next_row);
      return;
    }
    const int entry = (walk().tile(next_number, lane / 8) - kWindowTiles) * kTileKeys + warp * kProducerKeys + lane % 8;
    found = entry < static_cast<int>(a.selected)
                ? static_cast<uint32_t>(__ldg(a.indices + static_cast<int64_t>(next_row) * a.selected + entry))
                : kNoKey;
  }
  __device__ __forceinline__ void find_block(uint32_t& block) {
    if (next_row < 0) return;
    const int64_t b = next_request;
    if (next_number == kWindowBatch) {  // what the row's place needs, in the first four lanes
      const int64_t start = lane == 0   ? a.cu_seqlens[b]
                            : lane == 1 ? a.ring_slot[b]
                            : lane == 2 ? a.start_pos[b]
                                        : a.lower[b];
      found = static_cast<uint32_t>(start), block = static_cast<uint32_t>(start >> 32);
      return;
    }
    const BlockOf in = block_of(static_cast<int32_t>(found), a);
    block = in.reached ? static_cast<uint32_t>(__ldg(a.block_table + b * a.table_width + in.slot)) : kNoKey;
  }
  __device__ __forceinline__ void find_row(uint32_t block) {
    if (next_row < 0) {
      found = kNoKey;
    } else if (next_number == kWindowBatch) {
      auto value = [&](int i) {
        return static_cast<int64_t>(static_cast<uint64_t>(__shfl_sync(~0u, block, i)) << 32 |
                                    __shfl_sync(~0u, found, i));
      };
      const RowPlace place =
          row_place(next_row, value(0), value(2), value(3), static_cast<int32_t>(value(1)), a.window, a.ring_rows);
      const int key = walk().tile(kWindowBatch, lane / 8) * kTileKeys + warp * kProducerKeys + lane % 8;
      found = window_key(place, key, static_cast<int>(a.window), static_cast<uint32_t>(a.ring_rows));
    } else {
      found = selected_key(static_cast<int32_t>(block), block_of(static_cast<int32_t>(found), a).offset, a);
    }
  }

  // --- a pass ---

  // Asks for eight rows: those that lanes 8 tile ... know in `from`. Missing ones become zeros.
  __device__ __forceinline__ void fetch(bool window, uint32_t from, int tile, int part) {
    const KeyRow key = __shfl_sync(0xFFFFFFFF, from, tile * 8 + lane % 8);
    const bool some = key != kNoKey;
    exists = __ballot_sync(0xFFFFFFFF, some) & 0xFF;
    if (window) {
      const uint8_t* row = (some && !(key & kNewRow) ? a.ring : a.new_rows) + (some ? window_offset(key) : 0);
      copy<kWindowUnits>(area + staged_window(lane % 8), row + part * 256, row + kDim, some);
    } else {
      const uint8_t* row = a.pages + (some ? main_offset(key) : 0);
      copy<kMainUnits>(area + staged_main(lane % 8), row, row + kDim / 2, some);
    }
    ptx::cp_async_commit();
  }
  template <int kUnits>
  __device__ __forceinline__ void copy(uint32_t to, const uint8_t* codes, const uint8_t* scales, bool some) const {
    const int u = lane / 8;  // units u, u + 4, ... of the codes: neighbours are with lanes side by side
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::cp_async_16(to + (u + 4 * i) * 16, codes + (u + 4 * i) * 16, some);
    if (u < kUnits - 16) ptx::cp_async_16(to + (16 + u) * 16, scales + u * 16, some);
  }

  __device__ __forceinline__ uint32_t buffer() const { return kGroups == 1 ? tiles_done & 1 : group; }
  __device__ __forceinline__ uint32_t turn() const { return (kGroups == 1 ? tiles_done >> 1 : tiles_done) & 1; }
  __device__ __forceinline__ void end(uint32_t keys) const {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::store_shared_u8(buffers.masks + buffer() * 8 + warp, keys);
      ptx::mbarrier_arrive(buffers.full + buffer() * 8);
    }
  }

  // Out of the staging area, `refill` it, decode.
  template <bool kWindow, typename Refill>
  __device__ __forceinline__ void take(int part, Refill refill) {
    constexpr int kCount = kWindow ? 2 : kQuarters;
    const int u = lane / 8;
    const uint32_t from = area + (kWindow ? staged_window(lane % 8) : staged_main(lane % 8));
    asm volatile("" : "+r"(own), "+r"(area), "+r"(lane), "+r"(warp));  // what follows from them needs no registers
    const bool room = part == 0 && ptx::mbarrier_test(buffers.free + buffer() * 8, turn() ^ 1);  // known when needed
    ptx::cp_async_wait<0>();
    __syncwarp();
    Unit raw[4];
    uint32_t scales[2];  // 16 bits a quarter
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 v = ptx::load_shared_16(from + (kWindow ? window_codes(i / 2, u) + i % 2 * 16 : main_codes(i, u)));
      raw[i] = {v.x, v.y, v.z, v.w};
    }
    if constexpr (kWindow) {
      const uint32_t at = from + window_scale(part, 0, u);
      scales[0] = ptx::load_shared_u8(at) | ptx::load_shared_u8(at + 4) << 16;
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t at = from + main_scales(2 * i, u);
        scales[i] = ptx::load_shared_u16(at) | ptx::load_shared_u16(at + 8) << 16;
      }
    }
    const uint32_t keys = exists;
    __syncwarp();  // all lanes have read before the next rows land
    refill();
    if (part == 0 && !room) ptx::mbarrier_wait(buffers.free + buffer() * 8, turn() ^ 1);
    const uint32_t tile = own + (kGroups == 1 ? buffer() * kTileBytes : 0) + part * (4 * kColumnBytes);
    auto decode = [&](bool large) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        auto store = [&](int w, const uint32_t (&v)[4]) {
          ptx::store_shared_16((tile ^ w << 4) + i * (2 * kColumnBytes), v[0], v[1], v[2], v[3]);
        };
        if constexpr (kWindow) {
          const Unit codes[2] = {raw[2 * i], raw[2 * i + 1]};
          decode_window(codes, scales[0] >> (16 * i) & 0xFF, large, store);
        } else {
          decode_main(raw[i], scales[i / 2] >> (16 * (i % 2)), store);
        }
      }
    };
    if constexpr (kWindow) {  // scales of 2^16 and more need a second factor; without any, no branch stands in the way
      const bool large = window_scale_is_large(scales[0] & 0xFF) || window_scale_is_large(scales[0] >> 16);
      if (__any_sync(0xFFFFFFFF, large)) {
        decode(true);
      } else {
        decode(false);
      }
    } else {
      decode(false);
    }
    if (!kWindow || part == 1) end(keys);
  }

  // `row_at(n)`: the row of this CTA's n-th item, below 0 after the last. The passes of a batch are those during which
  // the next batch is found: one step before each pass but the first, what is left of them before the last.
  template <typename RowAt>
  __device__ __forceinline__ void run(RowAt row_at) {
    next_row = row_at(0), next_number = kWindowBatch;
    bool nothing = true, window = false;  // a batch of one pass that decodes nothing comes first
    uint32_t block = kNoKey;
#pragma unroll 1
    for (int pass = 0, passes = 1, steps = 0;;) {
      const bool last = pass + 1 == passes;
#pragma unroll 1
      for (const int until = last || pass > 3 ? 3 : pass; steps < until; ++steps) {
        if (steps == 0) {
          find_index();
        } else if (steps == 1) {
          find_block(block);
        } else {
          find_row(block);
        }
      }
      const auto refill = [&] {
        const bool is_window = last ? next_number == kWindowBatch : window;
        const int tile = last ? 0 : window ? (pass + 1) / 2 : pass + 1, part = !last && window ? (pass + 1) % 2 : 0;
        if (!last || next_row >= 0) fetch(is_window, last ? found : rows, tile, part);
      };
      if (nothing) {
        refill();
      } else if (window) {
        take<true>(pass % 2, refill);
      } else {
        take<false>(0, refill);
      }
      tiles_done += !nothing && (!window || pass % 2 == 1);
      if (!last) {
        ++pass;
        continue;
      }
      if (next_row < 0) break;
      nothing = false, window = next_number == kWindowBatch;
      passes = walk().tiles_of(next_number) * (window ? 2 : 1), pass = steps = 0;
      rows = found;
      if (next_number + 1 < walk().batches()) {
        ++next_number;
      } else {
        next_row = row_at(++rows_done), next_number = kWindowBatch;
      }
    }
    ptx::cp_async_wait<0>();
  }
};

}  // namespace mla_fp4::cuda
