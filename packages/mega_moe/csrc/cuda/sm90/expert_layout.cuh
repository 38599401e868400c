// How expert weights, activations and hidden rows lie in memory for the SM90 expert kernels, and how stored weights
// become bfloat16. Everything here runs on the host too.
//
// A tile is 64 rows of a weight, the M side of one warpgroup's product; a block is two tiles. A step is a block's next
// 128 columns of MXFP4 or 64 of FP8.
//
//   step    codes of tile 0 | codes of tile 1 | scales of tile 0 | scales of tile 1
//   codes   2 pieces of 2048 bytes: thread t of the warpgroup owns bytes 16 t to 16 t + 15 of each
//   scales  MXFP4: lanes of a quad share 8 bytes, [piece][row, row + 8][group]; FP8: a warp has [row, row + 8][piece]
//   weight  [expert][block][step]
//
// A thread's 16 bytes are its operand registers of one piece: 4 products of 16 columns in MXFP4, 2 in FP8. The first
// weight of an expert has gate rows and up rows interleaved by 8, so that a thread's two rows are those of one channel.
//
// Activations are images: for the rows of an expert's token tile, [columns / 64][rows][128 bytes], 128-byte swizzled,
// so that the part that goes with a step is contiguous and is copied as it is.
#pragma once

#include <cstdint>

#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace mega_moe::sm90 {

namespace cuda = kernel_core::cuda;

inline constexpr int kTileRows = 64, kTiles = 2, kBlockRows = kTiles * kTileRows;
inline constexpr int kPieces = 2, kPieceBytes = 2048, kTileCodes = kPieces * kPieceBytes;

enum class Format : int { mxfp4 = 0, fp8 = 1 };

// What differs between the two formats of weights.
template <Format F>
struct Step;
template <>
struct Step<Format::mxfp4> {
  static constexpr int kColumns = 128, kProducts = 4, kScaleBytes = 256;  // products of 16 columns a piece
};
template <>
struct Step<Format::fp8> {
  static constexpr int kColumns = 64, kProducts = 2, kScaleBytes = 16;
};

KC_HD constexpr int step_columns(Format f) {
  return f == Format::mxfp4 ? Step<Format::mxfp4>::kColumns : Step<Format::fp8>::kColumns;
}
KC_HD constexpr int step_bytes(Format f) {
  return kTiles *
         (kTileCodes + (f == Format::mxfp4 ? Step<Format::mxfp4>::kScaleBytes : Step<Format::fp8>::kScaleBytes));
}
inline constexpr int kLargestStep = step_bytes(Format::mxfp4);

// Bytes of a packed weight of `rows` x `columns`.
KC_HD constexpr int64_t weight_bytes(Format f, int64_t rows, int64_t columns) {
  return rows / kBlockRows * (columns / step_columns(f)) * step_bytes(f);
}

// ---- activations -------------------------------------------------------------------------------------------------

// Token tiles have at most `columns` rows (8, 16, 32, 64 or 128). Images and products of a tile have 8 or the next of
// these; where tiles have 128 rows, 64 or 128, since kernels with more kinds of products than two find no registers.
inline constexpr int kMostColumns = 128;
KC_HD constexpr int least_columns(int columns) { return columns == kMostColumns ? 64 : 8; }
KC_HD constexpr int product_rows(int rows, int columns) {
  const int least = least_columns(columns);
  return rows <= least ? least : rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : kMostColumns;
}

// Byte of (row, byte of the row) in an image of `rows` rows.
KC_HD constexpr int64_t image_offset(int rows, int row, int64_t byte) {
  return byte / 128 * rows * 128 + kernel_core::wgmma::swizzle128(row, static_cast<uint32_t>(byte % 128));
}

// ---- weights to operand registers --------------------------------------------------------------------------------

// A word of MXFP4 codes is one product's share of a thread: registers 0 to 3 (row, row + 8, row at column + 8, row + 8
// at column + 8), each a pair of columns. Bits are placed so that a register is one shift and one mask; a register has
// sign, exponent and mantissa of its codes at bits 15, 8-7 and 6 of the halves, which is 2^-126 of their values.
inline constexpr uint32_t kCodeMask = 0x81C081C0;

KC_HD uint32_t rotate_right(uint32_t x, int by) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(x, x, by);
#else
  return x >> by | x << (32 - by);
#endif
}

KC_HD void expand_mxfp4(uint32_t word, uint32_t factor, uint32_t factor8, uint32_t (&out)[4]) {
  out[0] = cuda::mul_bf16x2(word & kCodeMask, factor);
  out[1] = cuda::mul_bf16x2(rotate_right(word, 6) & kCodeMask, factor8);
  out[2] = cuda::mul_bf16x2(word * 64 & kCodeMask, factor);
  out[3] = cuda::mul_bf16x2((word * 16 & 0x81808180) | (word >> 4 & 0x00400040), factor8);
}

// The bit of a word where bit `bit` of the code of register `reg`, column `half` of the pair, is kept.
KC_HD constexpr int code_bit(int reg, int half, int bit) {
  const int at = (bit == 3 ? 15 : 6 + bit) + 16 * half;  // in the register
  const int from = reg == 0 ? at : reg == 1 ? at + 6 : reg == 2 ? at - 6 : (bit == 0 ? at + 4 : at - 4);
  return (from + 32) % 32;
}

// A stored scale byte is UE8M0 + 126: the exponent of the factor that also undoes the 2^-126. UE8M0 is at most 128.
inline constexpr int kScaleBias = 126, kLargestScale = 128;

// One half of a word in both. The device's multiplication takes it so, without an instruction.
template <int half>
KC_HD uint32_t half_twice(uint32_t word) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  if constexpr (half == 0)
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(out) : "r"(word));
  else
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(out) : "r"(word));
  return out;
#else
  return cuda::both(half == 0 ? word & 0xFFFF : word >> 16);
#endif
}

// A word of FP8 codes is a pair of columns and the pair 8 columns on, of one row: registers r and r + 2.
// The factor is formats.cuh's mxfp8_factor; scales of at most 134.
KC_HD void expand_fp8(uint32_t word, uint32_t factor, uint32_t& out, uint32_t& out8) {
  uint32_t pair[2];
  cuda::e4m3x4_folded(word, factor, pair);
  out = pair[0], out8 = pair[1];
}

// A piece of 16 bytes of a thread to its operand registers. `scales`: MXFP4: the piece's word, rows r and r + 8 with
// two groups each; FP8: this piece's factors in both halves, row r and row r + 8.
KC_HD void expand_piece(const uint32_t (&codes)[4], const uint32_t (&scales)[2], uint32_t (&out)[4][4],
                        Step<Format::mxfp4>) {
  const uint32_t firsts = (scales[0] & 0x00FF00FF) << 7, seconds = scales[0] >> 1 & 0x7F807F80;
  const uint32_t first = half_twice<0>(firsts), first8 = half_twice<1>(firsts);
  const uint32_t second = half_twice<0>(seconds), second8 = half_twice<1>(seconds);
  expand_mxfp4(codes[0], first, first8, out[0]);
  expand_mxfp4(codes[1], first, first8, out[1]);
  expand_mxfp4(codes[2], second, second8, out[2]);
  expand_mxfp4(codes[3], second, second8, out[3]);
}

KC_HD void expand_piece(const uint32_t (&codes)[4], const uint32_t (&scales)[2], uint32_t (&out)[2][4],
                        Step<Format::fp8>) {
  expand_fp8(codes[0], scales[0], out[0][0], out[0][2]);
  expand_fp8(codes[1], scales[1], out[0][1], out[0][3]);
  expand_fp8(codes[2], scales[0], out[1][0], out[1][2]);
  expand_fp8(codes[3], scales[1], out[1][1], out[1][3]);
}

// ---- SwiGLU ------------------------------------------------------------------------------------------------------

// silu(min(gate, limit)) clamp(up, -limit, limit) weight in float32; NaN stays.
KC_HD float gated(float gate, float up, float limit, float weight) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
#if defined(__CUDA_ARCH__)
  const float e = expf(-g);
#else
  const float e = std::exp(-g);
#endif
  const float silu = cuda::div_rn(g, cuda::add_rn(1.0f, e));
  return cuda::mul_rn(cuda::mul_rn(silu, u), weight);
}

}  // namespace mega_moe::sm90
