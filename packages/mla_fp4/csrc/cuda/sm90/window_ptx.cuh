// The PTX of window prefill that other kernels do not share.
#pragma once

#include "kernel_core/cuda/ptx.cuh"
#include "kernel_core/cuda/wgmma.cuh"

#if defined(__CUDACC__)

namespace mla_fp4::cuda::window {

namespace ptx = kernel_core::ptx;
namespace wgmma = kernel_core::wgmma;

// 64 x 144 x 16, bfloat16, A in registers, B K-major in shared memory. d += A B, or d = A B where `accumulate` is 0.
// Sums as in kernel_core/cuda/wgmma.cuh.
__device__ __forceinline__ void product_144(float (&d)[72], const uint32_t (&a)[4], uint64_t b, int accumulate) {
#define WINDOW_8(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %77, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,"
      "%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,"
      "%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
      "%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71"
      "}, {%72,%73,%74,%75}, %76, p, 1, 1, 0;\n}\n"
      : WINDOW_8(0), WINDOW_8(8), WINDOW_8(16), WINDOW_8(24), WINDOW_8(32), WINDOW_8(40), WINDOW_8(48), WINDOW_8(56),
        WINDOW_8(64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#undef WINDOW_8
}

// 64 x 128 x 16, A in registers, B MN-major.
__device__ __forceinline__ void product_128(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  wgmma::Product<128>::rs<wgmma::Major::mn>(d, a, b, accumulate);
}

// Arrives once all copies that this thread has started are there.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void store_shared_1(uint32_t to, uint32_t value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_1(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_8(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}

}  // namespace mla_fp4::cuda::window

#endif  // __CUDACC__
