// Stored number formats on the device: to packed bfloat16 or E4M3, and from float32. The rules are those of
// docs/model.md, Cache rows; kernel_core/decode.hpp and encode.hpp hold the CPU's.
//
// Decoders are integer instructions (PRMT, shifts, logic) and one or two packed multiplications; nothing goes through
// a chain of conversions. All values are exact in bfloat16, a packed pair has its even element in the low half.
#pragma once

#include "kernel_core/cuda/hd.cuh"

namespace kernel_core::cuda {

// ---- bfloat16 ----------------------------------------------------------------------------------------------------

KC_HD float bf16_float(uint32_t half) { return bits_float(half << 16); }

// Nearest, ties to even; NaN stays NaN.
KC_HD uint32_t float_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return bits >> 16 | 0x40;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

KC_HD float round_bf16(float x) { return bf16_float(float_bf16(x)); }

// The device has an instruction for the pair; it differs from float_bf16 in the payload of a NaN alone.
KC_HD uint32_t pack_bf16(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#else
  return float_bf16(low) | float_bf16(high) << 16;
#endif
}

KC_HD uint32_t both(uint32_t half) { return half * 0x10001u; }  // one bfloat16 in both halves

// Two products, each rounded once; subnormals count. One HMUL2.BF16.
KC_HD uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
#else
  return pack_bf16(bf16_float(a & 0xFFFF) * bf16_float(b & 0xFFFF), bf16_float(a >> 16) * bf16_float(b >> 16));
#endif
}

// ---- scales ------------------------------------------------------------------------------------------------------

inline constexpr uint32_t kTwo120 = 0x7B807B80;  // 2^120 twice

// 2^(b - 127); 0 is the subnormal 2^-127, 255 is NaN.
KC_HD float ue8m0_float(uint32_t b) { return bits_float(b == 0 ? 0x00400000 : b == 255 ? 0x7FC00000 : b << 23); }

KC_HD uint32_t ue8m0_bf16x2(uint32_t b) { return both(b == 0 ? 0x0040 : b == 255 ? 0x7FC0 : b << 7); }

// An E4M3 scale in both halves. Its bits, shifted, are a bfloat16 that is 2^120 too small, subnormals included.
KC_HD uint32_t e4m3_bf16x2(uint32_t b) {
  const uint32_t magnitude = b & 0x7F;
  if (magnitude == 0x7F) return 0x7FC07FC0;
  return mul_bf16x2(both(magnitude << 4 | (b & 0x80) << 8), kTwo120);
}

KC_HD float e4m3_float(uint32_t b) { return bf16_float(e4m3_bf16x2(b) & 0xFFFF); }

// ---- E2M1 --------------------------------------------------------------------------------------------------------

// Bit 7 of byte i is the sign of code i, of the four codes in the low 16 bits. A selector nibble below 8 picks 0x80,
// one from 8 on picks 0xFF: they differ in bit 6.
KC_HD uint32_t e2m1_signs(uint32_t codes) { return prmt(0x80808080, 0x80808080, codes) << 1 & 0x80808080; }

// Eight codes, element 0 in the lowest nibble, to four packed pairs: pair j holds elements 2j and 2j + 1.
KC_HD void e2m1x8_bf16(uint32_t codes, uint32_t out[4]) {
  const uint32_t magnitudes = codes & 0x77777777;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int h = 0; h < 2; ++h) {
    const uint32_t at = magnitudes >> (16 * h);
    const uint32_t high = prmt(0x3F3F3F00, 0x40404040, at) | e2m1_signs(codes >> (16 * h));
    const uint32_t low = prmt(0xC0800000, 0xC0804000, at);
    out[2 * h] = prmt(low, high, 0x5140);
    out[2 * h + 1] = prmt(low, high, 0x7362);
  }
}

// The same times a scale in both halves (e4m3_bf16x2 for main rows, ue8m0_bf16x2 for MXFP4). Exact: two bits of
// mantissa times four.
KC_HD void e2m1x8_scaled(uint32_t codes, uint32_t scale, uint32_t out[4]) {
  e2m1x8_bf16(codes, out);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int j = 0; j < 4; ++j) out[j] = mul_bf16x2(out[j], scale);
}

// Eight codes to packed pairs that are 2^-126 of their values, with no constants but immediates: a code s e e m becomes
// the bfloat16 s 000000ee m000000, whose exponent field is too small by 126 and whose 0.5 is a subnormal.
KC_HD void e2m1x8_small(uint32_t codes, uint32_t out[4]) {
  const uint32_t even = codes & 0x0F0F0F0F, odd = codes >> 4 & 0x0F0F0F0F;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int j = 0; j < 4; ++j) {
    // Byte j of each to a half; a selector from 8 on repeats a byte's highest bit, which is 0 here.
    const uint32_t pair = prmt(even, odd, j | (8 + j) << 4 | (4 + j) << 8 | (12 + j) << 12);
    out[j] = pair * 0x1040 & 0x81C081C0;  // once 12 bits up for the sign, once 6 for the rest
  }
}

// An E4M3 scale pair, in the low and the high byte of 16 bits, to packed 2^118 times their values: with
// e2m1x8_small's codes this gives 2^-8 of the values, exact in bfloat16 for every scale.
KC_HD uint32_t e4m3x2_large(uint32_t bytes) {
  const uint32_t spread = prmt(bytes, 0, 0x1404) & 0xFF00FF00;  // in the high bytes of the halves
  const uint32_t small = (spread & 0x80008000) | (spread >> 4 & 0x07F007F0);
  const uint32_t out = mul_bf16x2(mul_bf16x2(small, kTwo120), 0x7A807A80);  // 2^118 twice
  // 0x7F is NaN, without a branch: 0x8000 in the halves that have it becomes 0x7FC0.
  const uint32_t nan = prmt((bytes & 0x7F7F) + 0x0101, 0, 0x1404) & 0x80008000;
  return out | (nan - (nan >> 9));
}

KC_HD uint32_t low_twice(uint32_t pair) { return prmt(pair, 0, 0x1010); }
KC_HD uint32_t high_twice(uint32_t pair) { return prmt(pair, 0, 0x3232); }

// Two codes in one byte, even element in the low nibble.
KC_HD uint32_t e2m1x2_bf16(uint32_t byte) {
  const uint32_t at = byte & 0x77;
  const uint32_t high = prmt(0x3F3F3F00, 0x40404040, at) | e2m1_signs(byte);
  return prmt(prmt(0xC0800000, 0xC0804000, at), high, 0x5140);
}

KC_HD uint32_t e2m1x2_scaled(uint32_t byte, uint32_t scale) { return mul_bf16x2(e2m1x2_bf16(byte), scale); }

// Four codes in the low 16 bits to four E4M3 bytes, element i in byte i; every E2M1 value is one of E4M3.
KC_HD uint32_t e2m1x4_e4m3(uint32_t codes) { return prmt(0x3C383000, 0x4C484440, codes & 0x7777) | e2m1_signs(codes); }

KC_HD void e2m1x8_e4m3(uint32_t codes, uint32_t out[2]) {
  out[0] = e2m1x4_e4m3(codes);
  out[1] = e2m1x4_e4m3(codes >> 16);
}

// ---- E4M3 --------------------------------------------------------------------------------------------------------

// Four E4M3 bytes to two packed pairs, 2^120 too small. NaN codes become 480 * 2^-120: an encoder writes them only
// under a NaN scale, which keeps the NaN.
KC_HD void e4m3x4_small(uint32_t codes, uint32_t out[2]) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int j = 0; j < 2; ++j) {
    const uint32_t spread = prmt(codes, 0, j ? 0x3424 : 0x1404);  // elements in the high bytes of the halves
    out[j] = (spread & 0x80008000) | (spread >> 4 & 0x07F007F0);
  }
}

// Two factors that undo the 2^-120 and apply the UE8M0 scale b. Up to b = 134, and at the NaN 255, the second is 1:
// a row whose scales are all of that kind needs one multiplication a pair, mxfp8_factor alone.
struct Mxfp8Scale {
  uint32_t first, second;
};

KC_HD bool mxfp8_folds(uint32_t b) { return b <= 134 || b == 255; }

KC_HD uint32_t mxfp8_factor(uint32_t b) { return both(b == 255 ? 0x7FC0 : (b + 120) << 7); }  // where mxfp8_folds

KC_HD Mxfp8Scale mxfp8_scale(uint32_t b) {
  if (mxfp8_folds(b)) return {mxfp8_factor(b), 0x3F803F80};
  return {kTwo120, ue8m0_bf16x2(b)};
}

// Four E4M3 bytes to two packed pairs, scaled. Exact for every scale that an encoder writes; where bytes 0 to 2
// leave bits below bfloat16's last subnormal, rounded once; above its range infinite, as in float32.
KC_HD void e4m3x4_scaled(uint32_t codes, Mxfp8Scale scale, uint32_t out[2]) {
  e4m3x4_small(codes, out);
  out[0] = mul_bf16x2(mul_bf16x2(out[0], scale.first), scale.second);
  out[1] = mul_bf16x2(mul_bf16x2(out[1], scale.first), scale.second);
}

KC_HD void e4m3x4_folded(uint32_t codes, uint32_t factor, uint32_t out[2]) {
  e4m3x4_small(codes, out);
  out[0] = mul_bf16x2(out[0], factor);
  out[1] = mul_bf16x2(out[1], factor);
}

// ---- encoders ----------------------------------------------------------------------------------------------------

// How a small float sits in a float32: mantissa bits to drop, the difference of the exponent fields in code units,
// and, below the first normal value, a number whose sum with the magnitude rounds to the format's fixed step.
struct E2M1 {
  static constexpr int shift = 22, sign = 3;
  static constexpr uint32_t bias = 126u << 1;
  static constexpr float max = 6.0f, min_normal = 1.0f, magic = 4194304.0f;  // 2^22: step 2^-1
};
struct E4M3 {
  static constexpr int shift = 20, sign = 7;
  static constexpr uint32_t bias = 120u << 3;
  static constexpr float max = 448.0f, min_normal = 0.015625f, magic = 16384.0f;  // 2^14: step 2^-9
};

// Nearest, ties to the even code, saturating, sign kept. Not for NaN.
template <typename Format>
KC_HD uint32_t encode_finite(float x) {
  const uint32_t bits = float_bits(x), sign = bits >> 31 << Format::sign;
  const float magnitude = bits_float(bits & 0x7FFFFFFF);
  const float a = magnitude < Format::max ? magnitude : Format::max;
  const uint32_t m = float_bits(a);
  const uint32_t normal = (m + ((1u << (Format::shift - 1)) - 1) + (m >> Format::shift & 1)) >> Format::shift;
  const uint32_t small = float_bits(add_rn(a, Format::magic)) & 0xF;
  return sign | (a < Format::min_normal ? small : normal - Format::bias);
}

KC_HD uint32_t encode_e2m1(float x) { return x != x ? 0 : encode_finite<E2M1>(x); }
KC_HD uint32_t encode_e4m3(float x) { return x != x ? 0x7F : encode_finite<E4M3>(x); }

// Exponent + 127 of the smallest power of two not below |x|; 255 for infinities and NaN.
KC_HD uint32_t encode_ue8m0(float x) {
  const uint32_t bits = float_bits(x) & 0x7FFFFFFF;
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
  return exponent > 255 ? 255 : exponent;
}

// A group's magnitudes as float bits order like the values and put NaN on top: amax is a maximum of integers.
KC_HD uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7FFFFFFF; }

// A group's scale byte, and what its values are multiplied by before encode_finite: fl(1 / scale). `nan`: the scale
// is its format's NaN and every code of the group is the row's nan_code.
struct GroupScale {
  uint32_t byte;
  float inverse;
  bool nan;
};

// The three row formats.
struct MainRow {
  static constexpr int group = 16, code_bits = 4;
  static constexpr uint32_t nan_code = 0;
  static constexpr float floor = 6 * 0.001953125f;  // a group of zeros: the smallest E4M3 scale
};
struct WindowRow {
  static constexpr int group = 32, code_bits = 8;
  static constexpr uint32_t nan_code = 0x7F;
  static constexpr float floor = 1e-4f;  // scale byte 105
};
struct IndexRow {
  static constexpr int group = 32, code_bits = 4;
  static constexpr uint32_t nan_code = 0;
  static constexpr float floor = 6 * 1.17549435082228751e-38f;  // scale byte 1
};

KC_HD float at_least(uint32_t amax_bits, float floor) {  // NaN stays
  const float amax = bits_float(amax_bits);
  return amax < floor ? floor : amax;
}

KC_HD GroupScale group_scale(MainRow, uint32_t amax_bits) {
  const uint32_t byte = encode_e4m3(div_rn(at_least(amax_bits, MainRow::floor), 6.0f));
  return {byte, div_rn(1.0f, e4m3_float(byte)), byte == 0x7F};
}

KC_HD GroupScale group_scale(WindowRow, uint32_t amax_bits) {
  const uint32_t byte = encode_ue8m0(div_rn(at_least(amax_bits, WindowRow::floor), 448.0f));
  return {byte, div_rn(1.0f, ue8m0_float(byte)), byte == 255};
}

KC_HD GroupScale group_scale(IndexRow, uint32_t amax_bits) {
  const uint32_t byte = encode_ue8m0(div_rn(at_least(amax_bits, IndexRow::floor), 6.0f));
  return {byte, div_rn(1.0f, ue8m0_float(byte)), byte == 255};
}

// One code of a row under its group's scale.
template <typename Row>
KC_HD uint32_t encode_scaled(float x, const GroupScale& scale) {
  if (scale.nan) return Row::nan_code;
  const float scaled = mul_rn(x, scale.inverse);
  return Row::code_bits == 4 ? encode_finite<E2M1>(scaled) : encode_finite<E4M3>(scaled);
}

}  // namespace kernel_core::cuda
