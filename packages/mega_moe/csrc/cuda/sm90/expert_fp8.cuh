// W4A8: MXFP4 weights as E4M3 codes with their scales in the exponent, activations E4M3 with one float32 scale for 128
// channels of a row. Host and device.
//
// A row's scales may span 11 powers of two: a stored byte is 8 times the exponent above the row's smallest, so a table
// of the eight magnitudes times that power is one multiplication and addition on packed bytes, exact from 2^-6 (0.5) to
// 384. The row's smallest scale is a float32 factor of the sums.
//
// A word of codes is one product's share of a thread for one row: four columns and the four that lie 16 further on. The
// low three bits of nibble j select a magnitude; nibbles 0 to 3 are the first four columns. The fourth bit of nibble
// 2 j + 1 is the sign of column j, that of nibble 2 j the sign of column 16 + j.
#pragma once

#include "expert_layout.cuh"

namespace mega_moe::sm90 {

inline constexpr int kFp8Group = 128;  // channels with one scale: an item's, and a stage's

// A chunk of an image: [rows][128 bytes], swizzled, then [rows] float32 scales.
KC_HD constexpr int64_t fp8_chunk_bytes(int rows) { return int64_t{rows} * (kFp8Group + 4); }

struct Magnitudes {
  uint32_t low, high;  // of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6
};

// Of byte `index` of a word of scales.
KC_HD Magnitudes magnitudes(uint32_t word, int index) {
  const uint32_t up = cuda::prmt(word, 0, index | 0x4440);
  return {up * 0x01010100u + 0x14100800u, up * 0x01010101u + 0x24201C18u};
}

KC_HD void expand_e4m3(uint32_t word, const Magnitudes& m, uint32_t& out, uint32_t& out16) {
  const uint32_t select = word & 0x77777777;
  out = cuda::prmt(m.low, m.high, select) | (word & 0x80808080);
  out16 = cuda::prmt(m.low, m.high, select >> 16) | (word << 4 & 0x80808080);
}

// A piece of 16 bytes, 64 columns, to the operands of two products.
KC_HD void expand_piece_fp8(const uint32_t (&codes)[4], uint32_t scales, uint32_t (&out)[4], uint32_t (&out32)[4]) {
  expand_e4m3(codes[0], magnitudes(scales, 0), out[0], out[2]);
  expand_e4m3(codes[1], magnitudes(scales, 2), out[1], out[3]);
  expand_e4m3(codes[2], magnitudes(scales, 1), out32[0], out32[2]);
  expand_e4m3(codes[3], magnitudes(scales, 3), out32[1], out32[3]);
}

// Two values to E4M3, nearest, ties to even, saturating.
KC_HD uint32_t pack_e4m3(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
#else
  return cuda::encode_e4m3(low) | cuda::encode_e4m3(high) << 8;
#endif
}

KC_HD float fused(float a, float b, float c) {  // a b + c, rounded once
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// A group's scale and what its values are multiplied by, from the largest magnitude's bits. No power of two: a value
// that crosses one would halve every other's precision. Zeros have the scale 0.
struct Fp8Scale {
  float scale, inverse;
};
KC_HD Fp8Scale fp8_scale(uint32_t amax_bits) {
  const float amax = cuda::bits_float(amax_bits);
  if (amax_bits < 0x00800000u) return {0.0f, 0.0f};  // with subnormals, whose inverse overflows
  return {cuda::mul_rn(amax, 1.0f / 448), cuda::div_rn(448.0f, amax)};
}

#if defined(__CUDACC__)

// d = A B, or d += A B: 64 x 64 x 32 in E4M3, A in registers.
__device__ __forceinline__ void product_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

#endif

}  // namespace mega_moe::sm90
