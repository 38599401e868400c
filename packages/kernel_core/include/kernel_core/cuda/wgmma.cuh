// Warpgroup matrix products of SM90: shared-memory descriptors, the fences around them, and m64nN products with float32
// sums of bfloat16 (K = 16) and E4M3 (K = 32).
//
// All tiles use the 128-byte swizzle. A tile is a column of atoms of 8 rows x 128 bytes, 1024-byte aligned; the 16-byte
// piece c of row r stands at piece c xor (r mod 8). Addresses count from the atom's start, so the pattern of a tile
// follows from the address bits alone and a descriptor may start inside an atom's first row.
#pragma once

#include <cstdint>

#include "kernel_core/cuda/hd.cuh"

namespace kernel_core {
namespace wgmma {

inline constexpr uint32_t kAtomBytes = 1024;  // 8 rows of 128 bytes

// Byte offset of byte `byte` (0 to 127) of row `row` in a column of atoms.
KC_HD constexpr uint32_t swizzle128(uint32_t row, uint32_t byte) {
  return row * 128 + ((byte / 16 ^ row % 8) * 16) + byte % 16;
}

// The same as a function of an offset as it were without swizzle: bits 4-6 are xored with bits 7-9.
KC_HD constexpr uint32_t swizzle128_offset(uint32_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

// Bits 0-13 address, 16-29 leading offset, 32-45 stride offset, all in units of 16 bytes; bits 62-63 = 1 for 128 bytes.
KC_HD constexpr uint64_t descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  return static_cast<uint64_t>(address >> 4 & 0x3FFF) | static_cast<uint64_t>(leading_bytes >> 4 & 0x3FFF) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4 & 0x3FFF) << 32 | uint64_t{1} << 62;
}

// The product's K runs along the 128 bytes of a row: 8-row groups follow each other, the leading offset is not used.
// The next K step (32 bytes) is `advance(d, 32)`.
KC_HD constexpr uint64_t k_major(uint32_t address) { return descriptor(address, 16, kAtomBytes); }

// M or N runs along the 128 bytes (64 16-bit values) and K down the rows. `next_columns` is the distance to the next 64
// values of M or N. The next K step of 16 rows is `advance(d, 2 * kAtomBytes)`. 16-bit types only.
KC_HD constexpr uint64_t mn_major(uint32_t address, uint32_t next_columns) {
  return descriptor(address, next_columns, kAtomBytes);
}

// Only the address moves; tiles lie below 2^18, so the field does not overflow.
KC_HD constexpr uint64_t advance(uint64_t d, uint32_t bytes) { return d + (bytes >> 4); }

// Where thread t of the warpgroup holds the accumulators: d[4 j + i] is row + 8 (i / 2), column 8 j + column + i % 2.
KC_HD constexpr int accumulator_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
KC_HD constexpr int accumulator_column(int thread) { return thread % 4 * 2; }

enum class Major { k = 0, mn = 1 };

#if defined(__CUDACC__)

// Before the first product that reads registers (accumulators included) which other instructions wrote.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Ties registers to this place, so that the compiler moves no use of an accumulator across a wait.
template <int Count>
__device__ __forceinline__ void pin(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Product<N>: d += A B (d = A B where `accumulate` is 0). N / 2 accumulators a thread.
//   ss<b, a>(d, a, b, accumulate)     bfloat16, both by descriptor, each K-major or MN-major (A: K-major if not said)
//   rs<b>(d, a[4], b, accumulate)     bfloat16, A in registers
//   ss_e4m3(d, a, b, accumulate)      E4M3, both K-major; K = 32
template <int N>
struct Product;

#define KC_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define KC_REGS_4 "%0,%1,%2,%3"
#define KC_REGS_8 KC_REGS_4 ",%4,%5,%6,%7"
#define KC_REGS_16 KC_TEN() ",%10,%11,%12,%13,%14,%15"
#define KC_REGS_32 KC_TEN() "," KC_TEN(1) "," KC_TEN(2) ",%30,%31"
#define KC_REGS_60 KC_TEN() "," KC_TEN(1) "," KC_TEN(2) "," KC_TEN(3) "," KC_TEN(4) "," KC_TEN(5)
#define KC_REGS_64 KC_REGS_60 ",%60,%61,%62,%63"
#define KC_REGS_128                                                                             \
  KC_REGS_60 "," KC_TEN(6) "," KC_TEN(7) "," KC_TEN(8) "," KC_TEN(9) "," KC_TEN(10) "," KC_TEN( \
      11) ",%120,%121,%122,%123,%124,%125,%126,%127"

#define KC_OUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KC_OUT_8(i) KC_OUT_4(i), KC_OUT_4(i + 4)
#define KC_OUT_16(i) KC_OUT_8(i), KC_OUT_8(i + 8)
#define KC_OUT_32(i) KC_OUT_16(i), KC_OUT_16(i + 16)
#define KC_OUT_64(i) KC_OUT_32(i), KC_OUT_32(i + 32)
#define KC_OUT_128(i) KC_OUT_64(i), KC_OUT_64(i + 64)

// n: columns; r: registers = n / 2; o0..o5: r, r + 1, ... as written in the string
#define KC_PRODUCT(n, r, o0, o1, o2, o3, o4, o5)                                                                      \
  template <>                                                                                                         \
  struct Product<n> {                                                                                                 \
    static constexpr int kRegisters = r;                                                                              \
    template <Major b, Major a = Major::k>                                                                            \
    static __device__ __forceinline__ void ss(float (&d)[r], uint64_t a_tile, uint64_t b_tile, int accumulate) {      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2                                                           \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" KC_REGS_##r                           \
                   "}, %" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 ";\n}\n"                                         \
                   : KC_OUT_##r(0)                                                                                    \
                   : "l"(a_tile), "l"(b_tile), "r"(accumulate), "n"(static_cast<int>(a)), "n"(static_cast<int>(b)));  \
    }                                                                                                                 \
    template <Major b>                                                                                                \
    static __device__ __forceinline__ void rs(float (&d)[r], const uint32_t (&a)[4], uint64_t b_tile,                 \
                                              int accumulate) {                                                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5                                                           \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" KC_REGS_##r                           \
                   "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %" KC_LAST_##r ";\n}\n"           \
                   : KC_OUT_##r(0)                                                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "r"(accumulate),                        \
                     "n"(static_cast<int>(b)));                                                                       \
    }                                                                                                                 \
    static __device__ __forceinline__ void ss_e4m3(float (&d)[r], uint64_t a_tile, uint64_t b_tile, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2                                                           \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" KC_REGS_##r "}, %" #o0 ", %" #o1      \
                                                                                            ", p, 1, 1;\n}\n"         \
                   : KC_OUT_##r(0)                                                                                    \
                   : "l"(a_tile), "l"(b_tile), "r"(accumulate));                                                      \
    }                                                                                                                 \
  };
#define KC_LAST_4 "10"
#define KC_LAST_8 "14"
#define KC_LAST_16 "22"
#define KC_LAST_32 "38"
#define KC_LAST_64 "70"
#define KC_LAST_128 "134"

KC_PRODUCT(8, 4, 4, 5, 6, 7, 8, 9)
KC_PRODUCT(16, 8, 8, 9, 10, 11, 12, 13)
KC_PRODUCT(32, 16, 16, 17, 18, 19, 20, 21)
KC_PRODUCT(64, 32, 32, 33, 34, 35, 36, 37)
KC_PRODUCT(128, 64, 64, 65, 66, 67, 68, 69)
KC_PRODUCT(256, 128, 128, 129, 130, 131, 132, 133)

#undef KC_PRODUCT
#undef KC_TEN
#undef KC_REGS_4
#undef KC_REGS_8
#undef KC_REGS_16
#undef KC_REGS_32
#undef KC_REGS_60
#undef KC_REGS_64
#undef KC_REGS_128
#undef KC_OUT_4
#undef KC_OUT_8
#undef KC_OUT_16
#undef KC_OUT_32
#undef KC_OUT_64
#undef KC_OUT_128
#undef KC_LAST_4
#undef KC_LAST_8
#undef KC_LAST_16
#undef KC_LAST_32
#undef KC_LAST_64
#undef KC_LAST_128

#endif  // __CUDACC__

}  // namespace wgmma
}  // namespace kernel_core
