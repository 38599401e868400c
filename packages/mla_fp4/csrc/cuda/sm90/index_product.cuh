// 64 keys times N columns over all 128 channels: four steps of the E4M3 tensor unit into one set of accumulators, which
// start from zero. The keys are in registers, the columns in shared memory (index_plan::image_byte).
#pragma once

#include "kernel_core/cuda/wgmma.cuh"

namespace mla_fp4::sm90 {

template <int N>
struct IndexProduct;

#if defined(__CUDACC__)

#define MLA_FP4_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define MLA_FP4_REGS_4 "%0,%1,%2,%3"
#define MLA_FP4_REGS_16 MLA_FP4_TEN() ",%10,%11,%12,%13,%14,%15"
#define MLA_FP4_REGS_32 MLA_FP4_TEN() "," MLA_FP4_TEN(1) "," MLA_FP4_TEN(2) ",%30,%31"
#define MLA_FP4_REGS_64 \
  MLA_FP4_TEN()         \
  "," MLA_FP4_TEN(1) "," MLA_FP4_TEN(2) "," MLA_FP4_TEN(3) "," MLA_FP4_TEN(4) "," MLA_FP4_TEN(5) ",%60,%61,%62,%63"

#define MLA_FP4_OUT_4(i) "=&f"(d[i]), "=&f"(d[i + 1]), "=&f"(d[i + 2]), "=&f"(d[i + 3])
#define MLA_FP4_OUT_16(i) MLA_FP4_OUT_4(i), MLA_FP4_OUT_4(i + 4), MLA_FP4_OUT_4(i + 8), MLA_FP4_OUT_4(i + 12)
#define MLA_FP4_OUT_32(i) MLA_FP4_OUT_16(i), MLA_FP4_OUT_16(i + 16)
#define MLA_FP4_OUT_64(i) MLA_FP4_OUT_32(i), MLA_FP4_OUT_32(i + 32)

#define MLA_FP4_STEP(n, r, a0, a1, a2, a3, b, p)                                                                       \
  "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" MLA_FP4_REGS_##r "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 \
                                                                                "}, " #b ", " #p ", 1, 1;\n"
#define MLA_FP4_KEYS(t) "r"(keys[t][0]), "r"(keys[t][1]), "r"(keys[t][2]), "r"(keys[t][3])

// r: accumulators = n / 2; then the operands' numbers: r, r + 1, ... r + 17. Of a descriptor only the low half changes.
#define MLA_FP4_PRODUCT(n, r, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab, ac, ad, ae, af, lo, hi)                \
  template <>                                                                                                        \
  struct IndexProduct<n> {                                                                                           \
    static __device__ __forceinline__ void run(float (&d)[r], const uint32_t (&keys)[4][4], uint64_t columns) {      \
      asm volatile(                                                                                                  \
          "{\n.reg .pred first, more;\n.reg .b32 l1, l2, l3;\n.reg .b64 b0, b1, b2, b3;\n"                           \
          "setp.ne.b32 first, 0, 0;\nsetp.eq.b32 more, 0, 0;\n"                                                      \
          "add.u32 l1, %" #lo ", 2;\nadd.u32 l2, %" #lo ", 4;\nadd.u32 l3, %" #lo                                    \
          ", 6;\n"                                                                                                   \
          "mov.b64 b0, {%" #lo ", %" #hi "};\nmov.b64 b1, {l1, %" #hi                                                \
          "};\n"                                                                                                     \
          "mov.b64 b2, {l2, %" #hi "};\nmov.b64 b3, {l3, %" #hi "};\n" MLA_FP4_STEP(n, r, a0, a1, a2, a3, b0, first) \
              MLA_FP4_STEP(n, r, a4, a5, a6, a7, b1, more) MLA_FP4_STEP(n, r, a8, a9, aa, ab, b2, more)              \
                  MLA_FP4_STEP(n, r, ac, ad, ae, af, b3, more) "}\n"                                                 \
          : MLA_FP4_OUT_##r(0)                                                                                       \
          : MLA_FP4_KEYS(0), MLA_FP4_KEYS(1), MLA_FP4_KEYS(2), MLA_FP4_KEYS(3), "r"(static_cast<uint32_t>(columns)), \
            "r"(static_cast<uint32_t>(columns >> 32)));                                                              \
    }                                                                                                                \
  };

MLA_FP4_PRODUCT(8, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21)
MLA_FP4_PRODUCT(32, 16, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33)
MLA_FP4_PRODUCT(64, 32, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49)
MLA_FP4_PRODUCT(128, 64, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81)

#undef MLA_FP4_PRODUCT
#undef MLA_FP4_KEYS
#undef MLA_FP4_STEP
#undef MLA_FP4_OUT_4
#undef MLA_FP4_OUT_16
#undef MLA_FP4_OUT_32
#undef MLA_FP4_OUT_64
#undef MLA_FP4_REGS_4
#undef MLA_FP4_REGS_16
#undef MLA_FP4_REGS_32
#undef MLA_FP4_REGS_64
#undef MLA_FP4_TEN

#endif  // __CUDACC__

}  // namespace mla_fp4::sm90
