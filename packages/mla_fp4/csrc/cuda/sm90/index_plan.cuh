// The arithmetic of index scores on the E4M3 tensor unit, for device and host.
//
// Queries and keys are E2M1 codes under a power of two for each group of 32 channels. E4M3 holds an E2M1 value times
// 2^-8 to 2^6, so a group's scale is shifted into its codes, relative to the largest scale of its row: the largest
// group stands at 2^6, one 14 binades lower is still exact, lower ones round to steps of 2^-9, and from 19 on they
// vanish. All 128 channels then share one float32 accumulator, whatever their scales. The row's largest scale is a
// power of two and commutes with relu: a head's goes to its weight, a key's multiplies the sum over heads.
//
//   score = key_factor * sum over heads of weight * (dot + |dot|)        2 relu(dot) is exact; the 1/2 is in the weight
//
// The unit sums a step of 32 channels and the accumulator aligned to the largest of them, with about 14 bits below it.
// So a dot's error is below 2^-13 of its largest term or partial sum a step; where groups are within a few binades of
// each other all sums are exact. The order of channels is the same in every kernel, and so are a score's bits.
#pragma once

#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace mla_fp4::index_plan {

using kernel_core::cuda::bits_float;
using kernel_core::cuda::ue8m0_float;

inline constexpr int kDim = 128, kGroup = 32, kGroups = kDim / kGroup;
inline constexpr int kCodeBytes = kDim / 2;
inline constexpr int kSteps = kDim / 32;  // products over 32 channels

// Heads that a kernel is built for; the rest has zero codes and zero weights.
KC_HD constexpr int padded_heads(int heads) { return heads <= 8 ? 8 : heads <= 32 ? 32 : 64; }

// ---- codes under a shift -----------------------------------------------------------------------------------------

inline constexpr int kTopShift = 6;
inline constexpr int kDepths = 20;  // a group this many binades less one below the top, or lower, is zeros

// E4M3 of an E2M1 code in a group `depth` binades below the top: nearest, ties to even.
KC_HD uint32_t shifted_code(uint32_t code, int depth) {
  const uint32_t magnitude = code & 7, sign = (code & 8) << 4;
  const int shift = kTopShift - (depth < kDepths ? depth : kDepths - 1);
  const uint32_t halves = magnitude < 4 ? magnitude : (2 + (magnitude & 1)) << ((magnitude >> 1) - 1);  // of the value
  if (halves == 0) return sign;
  int exponent = -1;  // of the value
  while (halves >> (exponent + 2)) ++exponent;
  if (exponent + shift >= -6)
    return sign | static_cast<uint32_t>(exponent + shift + 7) << 3 | ((halves << 3 >> (exponent + 1)) & 7);
  const int down = -(shift + 8);  // to steps of 2^-9
  if (down <= 0) return sign | halves << -down;
  const uint32_t rest = halves & ((1u << down) - 1), half = 1u << (down - 1), steps = halves >> down;
  return sign | (steps + (rest > half || (rest == half && (steps & 1)) ? 1 : 0));
}

// The E4M3 magnitudes of the eight E2M1 magnitudes at a depth: what a byte selection looks codes up in.
KC_HD uint64_t magnitudes(int depth) {
  uint64_t table = 0;
  for (uint32_t m = 0; m < 8; ++m) table |= static_cast<uint64_t>(shifted_code(m, depth)) << (8 * m);
  return table;
}

// ---- keys --------------------------------------------------------------------------------------------------------

// Eight codes by a table: even elements in out[0], odd ones in out[1], so that signs need a shift and a mask alone.
KC_HD void key_words(uint32_t codes, uint32_t low, uint32_t high, uint32_t out[2]) {
  using kernel_core::cuda::prmt;
  const uint32_t at = codes & 0x77777777, signs = 0x80808080;
  const uint32_t first = prmt(low, high, at), second = prmt(low, high, at >> 16);
  out[0] = (codes << 4 & signs) | prmt(first, second, 0x6420);
  out[1] = (codes & signs) | prmt(first, second, 0x7531);
}

// Two 16-bit numbers at a time: scale bytes of rows r and r + 8.
KC_HD uint32_t max_pairs(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  const uint32_t low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
  return low | ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16;
#endif
}
KC_HD uint32_t min_pairs(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vminu2(a, b);
#else
  const uint32_t low = (a & 0xFFFF) < (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
  return low | ((a >> 16) < (b >> 16) ? a >> 16 : b >> 16) << 16;
#endif
}

// Depths of two groups below the largest scales of their rows, as far as they make a difference. No half borrows.
KC_HD uint32_t depth_pairs(uint32_t tops, uint32_t own) { return min_pairs(tops - own, (kDepths - 1) * 0x10001u); }

// One key's four scale bytes: the offset of each group's entry of eight bytes in the table of magnitudes, a byte each,
// and the largest scale.
struct KeyScales {
  uint32_t offsets, top;
};

KC_HD KeyScales key_scales(uint32_t scales) {
  const uint32_t even = scales & 0x00FF00FF, odd = scales >> 8 & 0x00FF00FF;
  const uint32_t pair = max_pairs(even, odd);
  const uint32_t tops = max_pairs(pair, kernel_core::cuda::prmt(pair, pair, 0x1032));
  return {depth_pairs(tops, even) * 8 + depth_pairs(tops, odd) * (8 * 256), tops & 0xFFFF};
}

// What the sum over heads is multiplied by: 2^(top - 127) in three or four instructions; the smallest is subnormal. One
// NaN scale makes the largest NaN, and with it the key's scores.
KC_HD float key_factor(uint32_t top) {
  const uint32_t bits = top << 23, smallest = 0x00400000;
  return bits_float((bits < smallest ? smallest : bits) | ((top * 0x4000 + 0x4000) & 0x00400000));
}

// ---- queries -----------------------------------------------------------------------------------------------------

// Byte in which channel `channel` stands among the 128 of a product. Lane c of four owns group c of a key's codes and
// takes eight of them a step: the A operand gives it the bytes 4c ... 4c+3 of each half of the 32, key_words splits
// even and odd.
KC_HD constexpr int channel_byte(int channel) {
  const int lane = channel / kGroup, step = channel % kGroup / 8, half = channel % 2, pair = channel % 8 / 2;
  return step * 32 + half * 16 + lane * 4 + pair;
}

// Byte of a channel in a query's image, [heads, 128] E4M3 in swizzled atoms: the B operand as it is in shared memory.
KC_HD constexpr uint32_t image_byte(int head, int channel) {
  return kernel_core::wgmma::swizzle128(static_cast<uint32_t>(head), static_cast<uint32_t>(channel_byte(channel)));
}

// The weight of a head whose largest scale byte is `top`: undoes the shifts of the query's and the key's codes, and
// halves.
KC_HD float head_weight(float weight, uint32_t top) {
  using kernel_core::cuda::mul_rn;
  return mul_rn(mul_rn(weight, bits_float((127u - 2 * kTopShift - 1) << 23)), ue8m0_float(top));
}

// ---- scores ------------------------------------------------------------------------------------------------------

KC_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// 2 relu(x), NaN as NaN. An addition: the integer pipe, which maxima take, is busy with codes.
KC_HD float twice_relu(float x) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(x, fabsf(x));
#else
  return x + std::fabs(x);
#endif
}

// Lane c of four sums heads 8j + 2c and 8j + 2c + 1 for j = 0, 1, ...; then the lanes' sums are added in pairs. Weights
// are stored in that order, the lanes' one after the other.
KC_HD constexpr int head_of(int lane, int i) { return i / 2 * 8 + lane * 2 + i % 2; }
KC_HD constexpr int weight_place(int head, int heads) { return head % 8 / 2 * (heads / 4) + head / 8 * 2 + head % 2; }
KC_HD float quad_sum(const float s[4]) {
  using kernel_core::cuda::add_rn;
  return add_rn(add_rn(s[0], s[1]), add_rn(s[2], s[3]));
}

// ---- the launch --------------------------------------------------------------------------------------------------

inline constexpr int kSmallestChunk = 256, kLargestChunk = 8192;  // keys of a thread block

// Keys of a thread block, a multiple of `unit`: `places` blocks run at once, so the number of blocks should fill whole
// rounds of them. A block costs some keys more than it scores, for its queries and its first bytes.
KC_HD int64_t keys_of_block(int64_t tiles, int64_t width, int64_t places, int64_t unit) {
  constexpr int64_t start = 384;
  const auto rounded = [&](int64_t chunks) { return (width + chunks * unit - 1) / (chunks * unit) * unit; };
  const int64_t least = (width + kLargestChunk - 1) / kLargestChunk;
  const int64_t most = (width + kSmallestChunk - 1) / kSmallestChunk;
  int64_t best = 0, best_cost = 0;
  const int64_t first_round = (tiles * least + places - 1) / places;
  for (int64_t round = first_round; round < first_round + 6; ++round) {
    int64_t chunks = round * places / tiles;
    chunks = chunks < least ? least : chunks > most ? most : chunks;
    const int64_t keys = rounded(chunks), blocks = tiles * ((width + keys - 1) / keys);
    const int64_t cost = (blocks + places - 1) / places * (keys + start);
    if (best == 0 || cost < best_cost) best = keys, best_cost = cost;
  }
  return best;
}

}  // namespace mla_fp4::index_plan
