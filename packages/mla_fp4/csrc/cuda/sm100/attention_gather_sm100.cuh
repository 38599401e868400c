// Rows to tiles: one warp that has raw rows copied to shared memory, one warpgroup that decodes them to bfloat16.
//
// Pool rows come by tensor-map copies of four rows, wherever they are; their 288 bytes are no power of two, so without
// swizzle. Window rows come from two places and a group of four may mix them: one plain bulk copy each. A missing key
// copies row 0 of the pool or nothing, and the decoder replaces what it reads by zeros: a bit mask says which keys are.
#pragma once

#include "cuda/sm100/attention_decode_sm100.cuh"
#include "cuda/sm100/attention_plan_sm100.cuh"
#include "cuda/sm100/device_sm100.cuh"
#include "cuda/sm90/unroll.cuh"

namespace mla_fp4::sm100 {

struct Walk {
  int64_t row;
  int first_chunk, count;  // chunks
};

// The number of requests that end at or before a row: its request.
__device__ __forceinline__ int64_t request_of(const AttentionParams& a, int64_t row, int lane) {
  uint32_t ended = 0;
  for (int64_t b = lane; b < a.batch; b += 32) ended += a.cu_seqlens[b + 1] <= row;
  return __reduce_add_sync(0xFFFFFFFF, ended);
}

// Warp. Lane l has keys l and l + 32 of a tile.
template <typename C>
struct RowCopies {
  const AttentionParams& a;
  const CUtensorMap& pool;
  const Walk& walk;
  uint32_t shared;
  int rank, lane;
  RowPlace place;
  const int32_t *indices, *table;

  __device__ __forceinline__ RowCopies(const AttentionParams& params, const CUtensorMap& map, const Walk& w,
                                       uint32_t base, int cta, int l)
      : a(params), pool(map), walk(w), shared(base), rank(cta), lane(l) {
    const int64_t b = request_of(a, walk.row, lane);
    place = row_place(walk.row, a.cu_seqlens[b], a.start_pos[b], a.lower[b], a.ring_slot[b], a.window, a.ring_rows);
    indices = a.indices + walk.row * a.selected;
    table = a.block_table + b * a.table_width;
  }

  __device__ __forceinline__ int passes() const { return walk.count * C::kOwnTiles; }
  __device__ __forceinline__ int key_of(int pass, int i) const {
    return pass_tile<C>(pass, rank) * kTileKeys + i * 32 + lane;
  }

  // The index of a selected key, -1 where there is none.
  __device__ __forceinline__ int32_t index_of(int pass, int i) const {
    const int chunk = pass_chunk<C>(pass, walk.first_chunk);
    const int64_t at = (chunk - 1) * kChunkKeys + key_of(pass, i);
    if (pass >= passes() || chunk == 0 || at >= a.selected) return -1;
    const int32_t index = __ldg(indices + at);
    return block_of(index, a).reached ? index : -1;
  }

  __device__ __forceinline__ KeyRow row_of(int pass, int i, int32_t index) const {
    if (pass >= passes()) return kNoKey;
    if (pass_chunk<C>(pass, walk.first_chunk) == 0) {
      return window_key(place, key_of(pass, i), a.window, a.ring_rows);
    }
    if (index < 0) return kNoKey;
    const BlockOf in = block_of(index, a);
    return selected_key(__ldg(table + in.slot), in.offset, a);
  }

  __device__ __forceinline__ void copy(int pass, const KeyRow (&mine)[2]) const {
    const bool window = pass_chunk<C>(pass, walk.first_chunk) == 0;
    const uint32_t full = shared + C::kRawFull, low = __ballot_sync(0xFFFFFFFF, mine[0] != kNoKey),
                   high = __ballot_sync(0xFFFFFFFF, mine[1] != kNoKey);
    ptx::mbarrier_wait(shared + C::kRawFree, (pass & 1) ^ 1);
    __syncwarp();  // a pass without rows is over at once: nobody may still be waiting for the one before
    if (lane == 0) {
      const uint32_t mask = shared + C::mask(pass / C::kOwnTiles, pass_tile<C>(pass, rank));
      store_shared_4(mask, low);
      store_shared_4(mask + 4, high);
      ptx::mbarrier_arrive_expect_tx(
          full, window ? (__popc(low) + __popc(high)) * kWindowRowBytes : kTileKeys * kMainRowBytes);
    }
    __syncwarp();
    if (window) {
      MLA_FP4_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (mine[i] == kNoKey) continue;
        const uint8_t* from = (mine[i] & kNewRow ? a.new_rows : a.ring) + window_offset(mine[i]);
        ptx::cp_async_bulk(shared + C::kWindowStaging + (i * 32 + lane) * kWindowRowBytes, from, kWindowRowBytes, full);
      }
    } else {
      int four[4];
      MLA_FP4_UNROLL
      for (int j = 0; j < 4; ++j) {
        const KeyRow first = __shfl_sync(0xFFFFFFFF, mine[0], (lane * 4 + j) % 32);
        const KeyRow second = __shfl_sync(0xFFFFFFFF, mine[1], (lane * 4 + j) % 32);
        const KeyRow row = lane < 8 ? first : second;
        four[j] = row == kNoKey ? 0 : static_cast<int>(row);
      }
      if (lane < kTileKeys / 4) {
        gather_rows(shared + C::kStaging + lane * 4 * kMainRowBytes, pool, four[0], four[1], four[2], four[3], full);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    KeyRow row[2], next_row[2];
    int32_t next_index[2];
    MLA_FP4_UNROLL
    for (int i = 0; i < 2; ++i) {
      row[i] = row_of(0, i, index_of(0, i));
      next_row[i] = row_of(1, i, index_of(1, i));
      next_index[i] = index_of(2, i);
    }
    MLA_FP4_NO_UNROLL
    for (int pass = 0; pass < passes(); ++pass) {
      copy(pass, row);
      MLA_FP4_UNROLL
      for (int i = 0; i < 2; ++i) {
        row[i] = next_row[i];
        next_row[i] = row_of(pass + 2, i, next_index[i]);
        next_index[i] = index_of(pass + 3, i);
      }
    }
  }
};

// What the decoders write through: a piece to the tile of keys and, in a pair, to the values of the CTA that has its
// columns.
template <typename C>
struct PieceStore {
  uint32_t shared, own, values;
  int tile, turn;
  __device__ __forceinline__ void begin(int slice) const {
    wait<C::kCtas>(shared + C::kFree + slice * 8, (turn & 1) ^ 1);
  }
  __device__ __forceinline__ void store(int s, int c, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) const {
    ptx::store_shared_16(tile_piece(own, tile, s, c), v0, v1, v2, v3);
    if constexpr (C::kPair) {
      store_cluster_16((values ^ static_cast<uint32_t>(c << 4)) + s * kColumnBytes, v0, v1, v2, v3);
    }
  }
};

// Warpgroup. Warp w decodes keys 16 w to 16 w + 15 of a tile; lane l has key l mod 16, half l / 16 of its columns.
template <typename C>
struct Decoder {
  const Walk& walk;
  uint32_t shared;
  int rank, thread;

  __device__ __forceinline__ Unit unit(uint32_t at, bool exists) const {
    const uint4 v = ptx::load_shared_16(shared + at);
    return exists ? Unit{v.x, v.y, v.z, v.w} : Unit{0, 0, 0, 0};
  }

  __device__ __forceinline__ void taken() const {
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + C::kRawFree);
  }

  __device__ __forceinline__ void run() const {
    const int warp = thread / 32, lane = thread % 32, key = warp * 16 + lane % 16, half = lane / 16;
    const uint32_t own = shared + C::kK + tile_own(key, half);
    uint32_t values = 0;
    if constexpr (C::kPair) values = address_in(half, shared + value_own<C>(key, rank));
    MLA_FP4_NO_UNROLL
    for (int pass = 0; pass < walk.count * C::kOwnTiles; ++pass) {
      const int turn = pass / C::kOwnTiles, tile = pass_tile<C>(pass, rank);
      const uint32_t mask_at = C::mask(turn, tile) + warp * 2;
      ptx::mbarrier_wait(shared + C::kRawFull, pass & 1);
      const uint16_t mask = load_shared_2(shared + mask_at);
      const bool exists = mask >> (key % 16) & 1;
      const PieceStore<C> pieces = {shared, own, values, C::kPair ? 0 : tile, turn};
      Unit raw[8];
      if (pass_chunk<C>(pass, walk.first_chunk) == 0) {
        const uint32_t from = C::kWindowStaging + key * kWindowRowBytes;
        const Unit scales = unit(from + 32 * 16, exists);
        MLA_FP4_NO_UNROLL
        for (int part = 0; part < 2; ++part) {
          MLA_FP4_UNROLL
          for (int u = 0; u < 8; ++u) raw[u] = unit(from + (half * 16 + part * 8 + u) * 16, exists);
          if (part == 1) taken();
          decode_window(raw, window_scales(scales, half, part), part, pieces);
        }
      } else {
        const uint32_t from = C::kStaging + key * kMainRowBytes;
        MLA_FP4_UNROLL
        for (int u = 0; u < 8; ++u) raw[u] = unit(from + (half * 8 + u) * 16, exists);
        const Unit scales = unit(from + (16 + half) * 16, exists);
        taken();
        decode_main(raw, scales, pieces);
      }
      if constexpr (C::kPair) {  // the partner's softmax needs to know as well
        if (lane == 0) store_cluster_2(address_in(rank ^ 1, shared + mask_at), mask);
      }
      fence_operands<C::kCtas>();
      __syncwarp();
      if (lane == 0) arrive<C::kCtas>(shared + C::kFull + tile * 8);
    }
  }
};

}  // namespace mla_fp4::sm100
