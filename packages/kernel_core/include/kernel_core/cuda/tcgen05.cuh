// Tensor core of SM100: tensor memory, descriptors of operands in shared memory, products and what orders them.
//
// Tensor memory (TMEM) is 128 lanes x 512 columns of 32 bits; an address has the lane in its upper half. Warp w of a
// warpgroup reaches lanes 32 (w mod 4) to + 31. Where row m and column n of an accumulator stand:
//
//   product            lane                                  column      half
//   one CTA, M = 128   m                                     n           -
//   one CTA, M = 64    32 (m / 16) + m mod 16 + 16 half      n           chosen by the lane of the address: 0 or 16
//   two CTAs, M = 128  m mod 64 + 64 half, in CTA m / 64     n mod N/2   n / (N / 2)
//
// Tiles of shared memory are those of wgmma.cuh (128-byte swizzle), or with rows of 64 bytes in atoms of eight.
#pragma once

#include <cstdint>

#include "kernel_core/cuda/hd.cuh"

namespace kernel_core {
namespace tcgen05 {

inline constexpr uint32_t kLanes = 128, kColumns = 512;

KC_HD constexpr uint32_t tmem(uint32_t base, uint32_t lane, uint32_t column) { return base + (lane << 16) + column; }

// --- shared-memory descriptors --------------------------------------------------------------------------------------
// Bits 0-13 address, 16-29 leading offset, 32-45 stride offset, in units of 16 bytes; 46-48 = 1; 61-63 the swizzle.

enum class Swizzle : uint32_t { none = 0, bytes128 = 2, bytes64 = 4, bytes32 = 6 };

KC_HD constexpr uint64_t descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes, Swizzle swizzle) {
  return static_cast<uint64_t>(address >> 4 & 0x3FFF) | static_cast<uint64_t>(leading_bytes >> 4 & 0x3FFF) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4 & 0x3FFF) << 32 | uint64_t{1} << 46 |
         static_cast<uint64_t>(swizzle) << 61;
}

// K along the 128 bytes of a row, atoms of eight rows one after the other. The next 32 bytes of K: advance(d, 32).
KC_HD constexpr uint64_t k_major(uint32_t address) { return descriptor(address, 16, 1024, Swizzle::bytes128); }

// M or N along the 128 bytes (64 16-bit values), K down the rows; `next` is the distance to the next 64 of M or N. The
// next 16 rows of K: advance(d, 2048).
KC_HD constexpr uint64_t mn_major(uint32_t address, uint32_t next) {
  return descriptor(address, next, 1024, Swizzle::bytes128);
}

// K along rows of 64 bytes (128 4-bit values), atoms of eight rows = 512 bytes. The next 64 values of K: advance(d,
// 32).
KC_HD constexpr uint64_t k_major_64(uint32_t address) { return descriptor(address, 16, 512, Swizzle::bytes64); }

// Byte of such a tile: 16-byte piece c of row r stands at piece c xor (r / 2 mod 4).
KC_HD constexpr uint32_t swizzle64(uint32_t row, uint32_t byte) {
  return row * 64 + ((byte / 16 ^ (row >> 1 & 3)) * 16) + byte % 16;
}

// Scale factors on their way to TMEM: 32 rows of 16 bytes without swizzle.
KC_HD constexpr uint64_t scale_source(uint32_t address) { return descriptor(address, 0, 128, Swizzle::none); }

KC_HD constexpr uint64_t advance(uint64_t d, uint32_t bytes) { return d + (bytes >> 4); }

// --- instruction descriptors ----------------------------------------------------------------------------------------

enum class Major : uint32_t { k = 0, mn = 1 };

// kind::f16 with bfloat16 operands and float32 sums. M of both CTAs together.
KC_HD constexpr uint32_t bf16_product(uint32_t m, uint32_t n, Major a, Major b) {
  return 1u << 4 | 1u << 7 | 1u << 10 | static_cast<uint32_t>(a) << 15 | static_cast<uint32_t>(b) << 16 |
         (n >> 3) << 17 | (m >> 4) << 24;
}

// kind::mxf4: E2M1 operands, a UE8M0 scale for each 32 values of K. A step takes K = 64, so two of the four bytes of a
// scale word: `half` 0 or 1.
KC_HD constexpr uint32_t mxf4_product(uint32_t m, uint32_t n, uint32_t half) {
  return (2 * half) << 4 | 1u << 7 | 1u << 10 | (n >> 3) << 17 | 1u << 23 | (m >> 7) << 27 | (2 * half) << 29;
}

// Where the word of row (or column) i with its four scales stands among the 512 bytes that one copy takes: after it, in
// lane i mod 32 of all four lane quarters, column i / 32.
KC_HD constexpr uint32_t scale_byte(uint32_t i) { return i % 32 * 16 + i / 32 * 4; }

#if defined(__CUDACC__)

// --- allocation: by one warp; `columns` a power of two from 32; of one CTA or, both together, of a pair --------------

template <int kCtas>
__device__ __forceinline__ void allocate(uint32_t where, uint32_t columns) {
  if constexpr (kCtas == 1) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(where), "r"(columns)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
  } else {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(where), "r"(columns)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
  }
}

template <int kCtas>
__device__ __forceinline__ void deallocate(uint32_t base, uint32_t columns) {
  if constexpr (kCtas == 1) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(base), "r"(columns));
  } else {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(base), "r"(columns));
  }
}

// --- order: around a barrier that hands TMEM from one thread to another ----------------------------------------------

__device__ __forceinline__ void fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// Arrives at `barrier` (of both CTAs of a pair) when all products and copies that this thread issued are done.
template <int kCtas>
__device__ __forceinline__ void commit(uint32_t barrier) {
  if constexpr (kCtas == 1) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
                 : "memory");
  } else {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
            barrier),
        "h"(static_cast<uint16_t>(3))
        : "memory");
  }
}

// --- products: by one thread. D = A B, plus D where `accumulate`
// ------------------------------------------------------

template <int kCtas>
__device__ __forceinline__ void multiply_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t kind, bool accumulate) {
  const uint32_t more = accumulate;
  if constexpr (kCtas == 1) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(kind), "r"(more)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(kind), "r"(more)
        : "memory");
  }
}

__device__ __forceinline__ void multiply_mxf4(uint32_t d, uint64_t a, uint64_t b, uint32_t kind, uint32_t a_scales,
                                              uint32_t b_scales, bool accumulate) {
  const uint32_t more = accumulate;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X [%0], %1, %2, %3, [%5], [%6], p;\n}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(kind), "r"(more), "r"(a_scales), "r"(b_scales)
      : "memory");
}

// 128 scale words to four columns of TMEM, the same in each quarter of the lanes. A product that the same thread issues
// after it waits for it.
__device__ __forceinline__ void copy_scales(uint32_t to, uint64_t from) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
}

// --- registers: thread l of a warp has lane l of the warp's quarter, register i column i
// -------------------------------

#define KC_EIGHT(p, i) \
  p(v[i]), p(v[i + 1]), p(v[i + 2]), p(v[i + 3]), p(v[i + 4]), p(v[i + 5]), p(v[i + 6]), p(v[i + 7])
#define KC_OUT(x) "=f"(x)
#define KC_IN(x) "f"(x)

__device__ __forceinline__ void load(float (&v)[8], uint32_t from) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
               : KC_EIGHT(KC_OUT, 0)
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void load(float (&v)[32], uint32_t from) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
      "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, [%32];"
      : KC_EIGHT(KC_OUT, 0), KC_EIGHT(KC_OUT, 8), KC_EIGHT(KC_OUT, 16), KC_EIGHT(KC_OUT, 24)
      : "r"(from)
      : "memory");
}

__device__ __forceinline__ void store(uint32_t to, const float (&v)[32]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,"
      "%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31};" ::KC_EIGHT(KC_IN, 0),
      KC_EIGHT(KC_IN, 8), KC_EIGHT(KC_IN, 16), KC_EIGHT(KC_IN, 24), "r"(to)
      : "memory");
}

#undef KC_EIGHT
#undef KC_OUT
#undef KC_IN

// Registers of a load may not be used before wait_load: ties their uses to the place after it.
template <int kCount>
__device__ __forceinline__ void pin(float (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(v[i])::"memory");
}

#endif  // __CUDACC__

}  // namespace tcgen05
}  // namespace kernel_core
