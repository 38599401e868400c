// The arithmetic of index scores on the E4M3 tensor unit, for device and host.
//
// One product step covers one scale group of 32 channels. A query's and a key's codes are E2M1, whose products are
// multiples of 1/4 up to 36: sums of 32 need 13 bits, which the tensor unit's sum keeps (14). So a step's sum is exact
// when the step starts from zero, and
//
//   dot = fma(s3, p3, fma(s2, p2, fma(s1, p1, s0 p0)))        p: exact sums, s: powers of two
//
// rounds in float32 only, in this order, whatever unit computed p. The scale of a query's group is shifted into its
// E4M3 codes, relative to the largest of its head, whose power of two goes to the weight; both are exact too. What is
// left for each
// product is the key's scale: one multiplication or fma a step.
#pragma once

#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace mla_fp4::index_plan {

using kernel_core::cuda::bits_float;
using kernel_core::cuda::ue8m0_float;

inline constexpr int kDim = 128, kGroup = 32, kGroups = kDim / kGroup;
inline constexpr int kCodeBytes = kDim / 2;
inline constexpr int kColumns = 32;  // (query, head) pairs of one product

// Heads that a kernel is built for; the rest has zero codes and zero weights.
KC_HD constexpr int padded_heads(int heads) { return heads <= 8 ? 8 : heads <= 32 ? 32 : 64; }

// ---- keys --------------------------------------------------------------------------------------------------------

// Eight codes to E4M3 bytes that are 2^-6 of their values: the bits s e e m of E2M1 are s 0 0 e e m 0 0, subnormals
// included. Even elements in out[0], odd ones in out[1].
inline constexpr int kKeyShift = 6;
KC_HD void key_words(uint32_t codes, uint32_t out[2]) {
  const uint32_t sign = 0x80808080, magnitude = 0x1C1C1C1C;
  out[0] = (codes << 4 & sign) | (codes << 2 & magnitude);
  out[1] = (codes & sign) | (codes >> 2 & magnitude);
}

// The four scales of a key. One NaN makes all of its scores NaN, so the first carries it.
KC_HD void key_scales(uint32_t bytes, float out[kGroups]) {
  using kernel_core::cuda::prmt;
  const uint32_t selectors[kGroups] = {0x0444, 0x1444, 0x2444, 0x3444};
  const uint32_t smallest = 0x00400000;  // 2^-127, of byte 0
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t bits = prmt(bytes, 0, selectors[g]) >> 1;
    out[g] = bits_float(bits < smallest ? smallest : bits);
  }
  if (((~bytes - 0x01010101u) & bytes & 0x80808080u) != 0) out[0] = bits_float(0x7FC00000);  // a byte of 255
}

// Where a thread of the warpgroup finds the codes of its part of a row: the A operand gives lane c of four the bytes
// 4c ... 4c+3 of each half of a step, and key_words splits eight neighbours that way. So it reads byte 4c of the group.
KC_HD constexpr int step_byte(int element) { return element % 2 * 16 + element / 2; }

// 16-byte pieces of a key's codes in shared memory, so that 32 lanes which read 4 bytes each of the same group of 8
// rows meet 32 banks.
KC_HD constexpr int key_piece(int row, int group) { return row * 4 + (group ^ (row >> 1 & 3)); }

// ---- queries -----------------------------------------------------------------------------------------------------

// E4M3 holds an E2M1 value times 2^-8 to 2^6. A group further below its head's largest keeps a factor of its own.
inline constexpr int kFoldTop = 6, kFoldLow = -8;

struct Fold {
  int shift;     // of the codes, as a power of two
  float factor;  // what is missing: 1, or a smaller power of two
};

KC_HD Fold fold(uint32_t scale, uint32_t top, bool zeros) {
  const int shift = static_cast<int>(scale) - static_cast<int>(top) + kFoldTop;
  if (zeros || shift >= kFoldLow) return {zeros ? 0 : shift, 1.0f};
  return {kFoldLow, ue8m0_float(static_cast<uint32_t>(127 + shift - kFoldLow > 0 ? 127 + shift - kFoldLow : 0))};
}

// E4M3 of an E2M1 code times 2^shift. Exact for kFoldLow <= shift <= kFoldTop.
KC_HD uint32_t folded_code(uint32_t code, int shift) {
  const uint32_t magnitude = code & 7, sign = (code & 8) << 4;
  if (magnitude == 0) return sign;
  const int exponent =
      magnitude < 2 ? -1 : static_cast<int>(magnitude >> 1) - 1;  // the value is 2^exponent (1 + half / 2)
  const uint32_t half = magnitude < 2 ? 0 : magnitude & 1;
  const int e = exponent + shift;
  if (e >= -6) return sign | static_cast<uint32_t>(e + 7) << 3 | half << 2;
  return sign | (2 + half) << (e + 9) >> 1;  // in steps of 2^-9
}

// The weight of a head whose largest scale byte is `top`: undoes the shifts of queries (kFoldTop) and keys.
static_assert(kFoldTop == kKeyShift, "the two cancel");
KC_HD float head_weight(float weight, uint32_t top) { return kernel_core::cuda::mul_rn(weight, ue8m0_float(top)); }

// Byte of a channel in a query's image, [heads, 128] E4M3 in swizzled atoms: the B operand as it is in shared memory.
KC_HD constexpr uint32_t image_byte(int head, int channel) {
  return kernel_core::wgmma::swizzle128(static_cast<uint32_t>(head),
                                        static_cast<uint32_t>(channel / kGroup * kGroup + step_byte(channel % kGroup)));
}

// ---- scores ------------------------------------------------------------------------------------------------------

KC_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

KC_HD float relu(float x) {  // NaN passes
#if defined(__CUDA_ARCH__)
  float out;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(out) : "f"(x));
  return out;
#else
  return x < 0 ? 0 : x;
#endif
}

KC_HD float dot(const float sums[kGroups], const float scales[kGroups]) {
  float d = kernel_core::cuda::mul_rn(sums[0], scales[0]);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int g = 1; g < kGroups; ++g) d = fused(sums[g], scales[g], d);
  return d;
}

// Lane c of four sums heads 8j + 2c and 8j + 2c + 1 for j = 0, 1, ...; then the lanes' sums are added in pairs.
KC_HD constexpr int head_of(int lane, int i) { return i / 2 * 8 + lane * 2 + i % 2; }
KC_HD float quad_sum(const float s[4]) {
  using kernel_core::cuda::add_rn;
  return add_rn(add_rn(s[0], s[1]), add_rn(s[2], s[3]));
}

// ---- the launch --------------------------------------------------------------------------------------------------

// Keys of a thread block, a power of two: enough blocks for the device, not so few keys that reading the queries shows.
KC_HD int64_t keys_of_block(int64_t tiles, int64_t width, int64_t multiprocessors) {
  int64_t keys = 4096;
  while (keys > 512 && tiles * ((width + keys - 1) / keys) < 4 * multiprocessors) keys /= 2;
  return keys;
}

}  // namespace mla_fp4::index_plan
