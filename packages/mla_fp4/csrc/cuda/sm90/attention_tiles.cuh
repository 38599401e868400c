// Sparse attention, the parts that are plain arithmetic and are tested on the host: which keys make a tile, where a key
// lies, how the producer walks, where decoded bytes go, and the running softmax.
//
// A row's keys come in tiles of 64. Tiles 0 and 1 are the window: place i is position p - window + 1 + i. Tile t > 1
// holds places 64 (t - 2) ... of the index list. A place without a key is a row of zeros with score -inf. Nothing here
// depends on other rows, on the launch or on how many heads a CTA takes, so a row's bits do not either.
#pragma once

#include "cuda/attention_params.hpp"
#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/hd.cuh"
#include "kernel_core/cuda/ragged.cuh"

#if !defined(__CUDACC__)
#include <cmath>
#endif

namespace mla_fp4::cuda {

inline constexpr int kDim = 512, kRopeDim = 64, kTileKeys = 64, kWindowTiles = 2;
inline constexpr int kWindowRowBytes = 528, kMainRowBytes = 288;

KC_HD int tile_count(int64_t selected) { return kWindowTiles + static_cast<int>((selected + 63) / kTileKeys); }

// --- where a key lies -----------------------------------------------------------------------------------------------

// A row of the pool, of the rings counted through all slots, or (top bit) of this step's rows.
using KeyRow = uint32_t;
inline constexpr KeyRow kNoKey = 0xFFFFFFFF, kNewRow = 0x80000000;

// What the window of a row at position p needs, as places: place i stands for position p - window + 1 + i.
struct RowPlace {
  int32_t lowest;       // the first place that is seen: not before position 0 or the request's lower bound
  int32_t first_new;    // places from here on are rows of this step; below 0 if the request began before the window
  uint32_t new_row;     // this step's row of place 0, modulo 2^32
  uint32_t slot_row;    // first row of the request's ring among all rings
  uint32_t first_turn;  // the ring row of place 0
};

KC_HD RowPlace row_place(int64_t row, int64_t first_row, int64_t start, int64_t lower, int32_t slot, int64_t window,
                         int64_t ring_rows) {
  const int64_t first = start + row - first_row - window + 1, lowest = (lower > 0 ? lower : 0) - first;
  RowPlace p;
  p.lowest = static_cast<int32_t>(lowest < 0 ? 0 : lowest < window ? lowest : window);
  p.first_new = static_cast<int32_t>(start - first);
  p.new_row = static_cast<uint32_t>(first_row - p.first_new);
  p.slot_row = static_cast<uint32_t>(slot) * static_cast<uint32_t>(ring_rows);
  p.first_turn = kernel_core::cuda::ring_offset(first < 0 ? first + ring_rows : first, ring_rows);
  return p;
}

KC_HD KeyRow window_key(const RowPlace& p, int32_t place, int32_t window, uint32_t ring_rows) {
  if (place < p.lowest || place >= window) return kNoKey;
  if (place >= p.first_new) return kNewRow | (p.new_row + static_cast<uint32_t>(place));
  const uint32_t turn = p.first_turn + static_cast<uint32_t>(place);  // window <= ring_rows, so it wraps once at most
  return p.slot_row + (turn >= ring_rows ? turn - ring_rows : turn);
}

// An index that no table entry or block answers selects nothing: the CPU op refuses such input, a device cannot.
struct BlockOf {
  bool reached;
  uint32_t slot, offset;  // of the table, in the block
};
KC_HD BlockOf block_of(int32_t index, const AttentionParams& a) {
  const uint32_t i = static_cast<uint32_t>(index), size = static_cast<uint32_t>(a.rows_per_block);
  const bool power = (size & (size - 1)) == 0;  // a division is many instructions
  const int shift = kernel_core::cuda::floor_log2(size);
  const uint32_t slot = power ? i >> shift : i / size;
  return {index >= 0 && slot < static_cast<uint32_t>(a.table_width), slot, power ? i & (size - 1) : i - slot * size};
}

KC_HD KeyRow selected_key(int32_t block, uint32_t offset, const AttentionParams& a) {
  if (block < 0 || static_cast<uint32_t>(block) >= static_cast<uint32_t>(a.blocks)) return kNoKey;
  return static_cast<uint32_t>(block) * static_cast<uint32_t>(a.rows_per_block) + offset;
}

KC_HD int64_t window_offset(KeyRow row) { return static_cast<int64_t>(row & ~kNewRow) * kWindowRowBytes; }
KC_HD int64_t main_offset(KeyRow row) { return static_cast<int64_t>(row) * kMainRowBytes; }

// --- how the producer walks -----------------------------------------------------------------------------------------

// A tile is 64 keys x four quarters of 128 columns. Eight warps make a tile: a warp has eight keys, and in each quarter
// a lane has one key and 32 columns. Sixteen warps are two groups that make every second tile. A window tile takes two
// passes of two quarters each, so that its raw rows fit where those of a main tile do.
inline constexpr int kQuarters = 4, kProducerKeys = 8;

// A group's tiles of a row are found in batches of four, eight lanes a tile: first the window's, then the others.
inline constexpr int kBatchTiles = 4, kWindowBatch = -1;

template <int kGroups>
struct Walk {
  int first, tiles;  // the group's first tile of the row's, 0 or 1

  static KC_HD Walk of(int group, uint32_t tiles_before, int tiles) {
    return {kGroups == 1 ? 0 : static_cast<int>((group - tiles_before) & 1), tiles};
  }
  // Main tiles of the group, and the n-th of them.
  KC_HD int main_tiles() const { return kGroups == 1 ? tiles - kWindowTiles : (tiles - kWindowTiles + 1 - first) / 2; }
  KC_HD int main_tile(int n) const { return kWindowTiles + (kGroups == 1 ? n : 2 * n + first); }
  KC_HD int batches() const { return (main_tiles() + kBatchTiles - 1) / kBatchTiles; }  // after the window's
  KC_HD int tiles_of(int batch) const {
    if (batch == kWindowBatch) return kWindowTiles / kGroups;
    const int left = main_tiles() - batch * kBatchTiles;
    return left < kBatchTiles ? left : kBatchTiles;
  }
  // The tile that lanes 8 i to 8 i + 7 find; for a window batch only the first tiles_of are any.
  KC_HD int tile(int batch, int i) const {
    return batch == kWindowBatch ? (kGroups == 1 ? i : first) : main_tile(batch * kBatchTiles + i);
  }
};

// Raw rows stand one behind the other. Eight keys at the same 16-byte unit must meet eight different columns of the
// banks: odd distances do so, 18 units need the second four keys one unit further on.
inline constexpr uint32_t kWindowPitch = 256 + 16;
inline constexpr uint32_t kStageBytes = kProducerKeys * kMainRowBytes + 16;
KC_HD uint32_t staged_window(int key) { return key * kWindowPitch; }
KC_HD uint32_t staged_main(int key) { return key * kMainRowBytes + key / 4 * 16; }

// 16-byte units of a row that a pass copies: unit i of the stage is this unit of the stored row.
inline constexpr int kWindowUnits = 17, kMainUnits = 18;
KC_HD int window_unit(int i, int part) { return i < 16 ? part * 16 + i : 32; }

// Where a lane's part of quarter i of a pass stands in a staged row; u = 0..3.
KC_HD uint32_t window_codes(int i, int u) { return i * 128 + u * 32; }                        // 32 bytes
KC_HD uint32_t window_scale(int part, int i, int u) { return 256 + (part * 2 + i) * 4 + u; }  // 1 byte
KC_HD uint32_t main_codes(int i, int u) { return (4 * i + u) * 16; }                          // 16 bytes
KC_HD uint32_t main_scales(int i, int u) { return kDim / 2 + (4 * i + u) * 2; }               // 2 bytes

// --- the tile that raw rows become ----------------------------------------------------------------------------------

// A tile in shared memory is eight columns of swizzled atoms, 64 bfloat16 wide (kernel_core/cuda/wgmma.cuh). A lane
// writes 16-byte pieces w = 0..3 of quarter q of its key.
inline constexpr uint32_t kColumnBytes = kTileKeys * 128, kTileBytes = kDim / 64 * kColumnBytes;
KC_HD uint32_t tile_piece(int key, int q, int u, int w) {
  const int block = 2 * q + u / 2, piece = u % 2 * 4 + w;
  return block * kColumnBytes + key * 128 + ((piece ^ (key & 7)) << 4);
}

// --- decoding 32 columns of a key -----------------------------------------------------------------------------------

// Tiles hold 2^-8 of the keys: then one multiplication decodes a pair (formats.cuh). Exact, both here and where scores
// and results are multiplied by 2^8 again; window values below 2^-118 alone lose bits.
inline constexpr float kKeyFactor = 256.0f;

struct Unit {
  uint32_t x, y, z, w;
};

// `store(w, four packed pairs)` takes columns 8 w to 8 w + 7 of the 32.
template <typename Store>
KC_HD void decode_main(const Unit& codes, uint32_t scales, const Store& store) {
  namespace format = kernel_core::cuda;
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const uint32_t both = format::e4m3x2_large(scales);
  const uint32_t factors[2] = {format::low_twice(both), format::high_twice(both)};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int w = 0; w < 4; ++w) {
    uint32_t out[4];
    format::e2m1x8_small(words[w], out);
    for (uint32_t& pair : out) pair = format::mul_bf16x2(pair, factors[w / 2]);
    store(w, out);
  }
}

// A UE8M0 scale times 2^112: what e4m3x4_small has too little, and kKeyFactor. From byte 143 on the rest is a second
// factor.
inline constexpr uint32_t kLargestWindowScale = 142;
KC_HD bool window_scale_is_large(uint32_t byte) { return byte > kLargestWindowScale && byte != 255; }
KC_HD uint32_t window_factor(uint32_t byte) {
  const uint32_t b = byte < kLargestWindowScale ? byte : kLargestWindowScale;
  return kernel_core::cuda::both(byte == 255 ? 0x7FC0 : (b + 112) << 7);
}
KC_HD uint32_t window_rest(uint32_t byte) { return kernel_core::cuda::both((byte - kLargestWindowScale + 127) << 7); }

// `large`: whether any scale that the caller has is; false where none is.
template <typename Store>
KC_HD void decode_window(const Unit (&codes)[2], uint32_t scale, bool large, const Store& store) {
  namespace format = kernel_core::cuda;
  const uint32_t factor = window_factor(scale);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int w = 0; w < 4; ++w) {
    const Unit& from = codes[w / 2];
    uint32_t out[4];
    format::e4m3x4_small(w % 2 ? from.z : from.x, out);
    format::e4m3x4_small(w % 2 ? from.w : from.y, out + 2);
    for (uint32_t& pair : out) pair = format::mul_bf16x2(pair, factor);
    if (large && window_scale_is_large(scale)) {
      for (uint32_t& pair : out) pair = format::mul_bf16x2(pair, window_rest(scale));
    }
    store(w, out);
  }
}

// --- softmax --------------------------------------------------------------------------------------------------------

inline constexpr float kLog2E = 1.4426950408889634f;

KC_HD float minus_infinity() { return kernel_core::cuda::bits_float(0xFF800000); }

KC_HD float exp_2(float x) {
#if defined(__CUDACC__)
  return exp2f(x);
#else
  return std::exp2(x);
#endif
}
KC_HD float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__CUDACC__)
  return fmaf(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// Scores and references are times log2 e; `scale` brings products of queries and tiles there and is positive. Weights
// are relative to a reference that follows the maximum only when it has fallen behind by more than this: weights then
// reach 2^8, which costs bfloat16 nothing, and sums are rescaled rarely. The rule looks at the row's own scores in
// their order, so it is the same wherever the row stands.
inline constexpr float kSlack = 8.0f;

KC_HD float next_reference(float reference, float tile_top) {
  return tile_top > reference + kSlack ? tile_top : reference;
}

// What sums so far are multiplied by.
KC_HD float rescale(float reference, float next) { return reference == next ? 1.0f : exp_2(reference - next); }

// The weight of a product of query and key whose score is `product` times `scale`. Without any key so far the reference
// is -inf and weights are 0. The instruction behind exp2f
// without its care for subnormal results: those become 0.
KC_HD float weight(float product, float scale, float reference) {
  const float x = fma_rn(product, scale, reference == minus_infinity() ? 0.0f : -reference);
#if defined(__CUDA_ARCH__)
  float w;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(x));
  return w;
#else
  return exp_2(x);
#endif
}

// What the sums are multiplied by in the end: 1 / (denominator + e^sink), all relative to the reference. `sink` times
// log2 e. No keys and an infinite sink give 0.
KC_HD float finish_factor(float reference, float denominator, float sink) {
  if (reference == minus_infinity() || sink == -minus_infinity()) return 0.0f;
  const float both = sink > reference ? sink : reference;
  const float own = exp_2(reference - both);
  return kernel_core::cuda::div_rn(own, fma_rn(denominator, own, exp_2(sink - both)));
}

// --- checks ---------------------------------------------------------------------------------------------------------

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

inline bool attention_fits(const AttentionParams& a) {
  constexpr int64_t kMany = int64_t{1} << 31;
  const bool sizes = a.rows >= 0 && a.rows < kMany && a.heads > 0 && a.batch >= (a.rows > 0) && a.window > 0 &&
                     a.window <= kWindowTiles * kTileKeys && a.ring_rows >= a.window && a.slots > 0 &&
                     a.slots < kMany / a.ring_rows && a.selected >= 0 && a.selected < 1 << 20 && a.rows_per_block > 0 &&
                     a.rows_per_block < kMany && a.blocks >= 0 && a.blocks < 2 * kMany / a.rows_per_block &&
                     a.table_width >= 0 && a.table_width < kMany && a.rows * a.heads < kMany / 2 && a.scale > 0;
  const bool places = aligned16(a.q) && aligned16(a.out) && aligned16(a.new_rows) && aligned16(a.ring) &&
                      aligned16(a.pages) && aligned16(a.rope);
  const bool there =
      a.rows == 0 || (a.q && a.out && a.cu_seqlens && a.start_pos && a.new_rows && a.ring && a.ring_slot && a.lower &&
                      a.sink && a.rope && (a.selected == 0 || (a.indices && a.block_table)));
  return sizes && places && there;
}

}  // namespace mla_fp4::cuda
