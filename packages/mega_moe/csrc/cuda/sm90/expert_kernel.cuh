// Experts in one persistent kernel: gather, first product, SwiGLU, second product, sum of slots.
#pragma once

#include "expert_consumer_fp8.cuh"
#include "expert_roles.cuh"

namespace mega_moe::sm90 {

template <typename C>
__device__ void init_barriers(ExpertShared<C>& s) {
  namespace ptx = kernel_core::ptx;
  constexpr int kWarps = C::kConsumers / 32;
  for (int i = 0; i < C::kStages; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&s.full[i]), 1 + C::kImageWarps);
    ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), kWarps);
  }
  for (int i = 0; i < kSlots; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&s.known[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&s.rows_known[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&s.stored[i]), kWarps);
    ptx::mbarrier_init(ptx::shared_address(&s.finished[i]), C::kImageWarps + 1);  // warps that read its slot last
  }
  ptx::mbarrier_init(ptx::shared_address(&s.announced), 1);
  ptx::fence_barrier_init();
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kPerSm) experts_kernel(const __grid_constant__ ExpertsParams p) {
  MEGA_MOE_SHARED(memory);
  auto& shared = *reinterpret_cast<ExpertShared<C>*>(memory);
  if (kernel_core::ptx::shared_address(memory) != kFirstShared) kernel_core::ptx::fail();
  const int warp = uniform(static_cast<int>(threadIdx.x / 32));
  mark(p, kBegan, threadIdx.x == 0), mark_clock_zero(p, threadIdx.x == 0);
  if (threadIdx.x == 0) init_barriers(shared);
  if (C::kDirect && warp == C::kImageWarp) warm_caches(p);
  if (warp == C::kWeightWarp) make_plan<C>(p, shared.plan);
  __syncthreads();
  mark(p, kPlanned, threadIdx.x == 0);
  if (warp < C::kWeightWarp) {
    kernel_core::ptx::registers_grow<C::kConsumerRegisters>();
    if constexpr (C::kFp8)
      ConsumerFp8<C>(p, shared).run();
    else
      Consumer<C>(p, shared).run();
    return;
  }
  kernel_core::ptx::registers_shrink<C::kProducerRegisters>();
  if (p.parts_of_work & (kFirst | kSecond)) {
    Producer<C> producer(p, shared);
    if (warp == C::kWeightWarp) producer.weights();
    if (warp == C::kRowWarp) producer.rows();
    if (warp == C::kImageWarp) producer.images(0);
    if (C::kDirect && warp == C::kImageWarp + 1) producer.images(1);
  }
}

}  // namespace mega_moe::sm90
