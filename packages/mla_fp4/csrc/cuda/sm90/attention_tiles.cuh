// Sparse attention, the parts that are plain arithmetic and are tested on the host: which keys make a tile, how
// the producer walks, where decoded bytes go, and the running softmax.
//
// A row's keys come in tiles of 64. Tiles 0 and 1 are the window: place i is position p - window + 1 + i. Tile t > 1
// holds places 64 (t - 2) ... of the index list. A place without a key is a row of zeros with score -inf. Nothing here
// depends on other rows, on the launch or on how many heads a CTA takes, so a row's bits do not either.
#pragma once

#include "cuda/attention_keys.cuh"
#include "kernel_core/cuda/formats.cuh"

namespace mla_fp4::cuda {

inline constexpr int kTileKeys = 64, kWindowTiles = kLargestWindow / kTileKeys;

KC_HD int tile_count(int64_t selected) { return kWindowTiles + static_cast<int>((selected + 63) / kTileKeys); }

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
// is -inf and weights are 0. The instruction behind exp2f without its care for subnormal results: those become 0.
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

}  // namespace mla_fp4::cuda
