// The kernel of sparse attention: barriers, tensor memory, and who does what.
#pragma once

#include "cuda/sm100/attention_gather_sm100.cuh"
#include "cuda/sm100/attention_roles_sm100.cuh"

namespace mla_fp4::sm100 {

template <typename C, bool kSplit>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_sm100_kernel(const __grid_constant__ AttentionParams a, const __grid_constant__ CUtensorMap pool,
                           const int walk, float* workspace) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || !defined(__CUDACC__)
  const uint32_t shared = shared_base();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int rank = C::kPair ? static_cast<int>(rank_in_pair()) : 0;
  const uint32_t tiles = (static_cast<uint32_t>(a.heads) + C::kHeads - 1) / C::kHeads;
  const int chunks = static_cast<int>(chunk_count(a.selected));
  const uint32_t groups = kSplit ? (chunks + walk - 1) / walk : 1;
  const int head0 = static_cast<int>(blockIdx.x % tiles) * C::kHeads;
  const uint32_t item = blockIdx.x / tiles;
  const int first = static_cast<int>(item % groups) * walk;
  const Walk run = {item / groups, first, chunks - first < walk ? chunks - first : walk};

  if (thread == 0) {
    if (shared % 1024 != 0) ptx::fail();  // descriptors and swizzle need it
    const auto init = [&](uint32_t at, int count, int arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(shared + at + i * 8, arrivals);
    };
    init(C::kRawFull, 1, 1);
    init(C::kRawFree, 1, 4);
    init(C::kFull, kTiles, 4);  // by the warps that decode the tile, wherever they are
    init(C::kQFull, 1, 4 * C::kCtas);
    init(C::kScores, 1, 1);
    init(C::kWeights, 1, 4 * C::kCtas);
    init(C::kSliceFull, 2, 1);
    init(C::kSliceFree, 2, 4 * C::kCtas);
    init(C::kFree, kSlices, 1);
    ptx::fence_barrier_init();
  }
  if (warp == C::kProductWarp) tcgen05::allocate<C::kCtas>(shared + C::kTmem, C::kTmemColumns);
  tcgen05::fence_before();
  __syncthreads();
  if constexpr (C::kPair) cluster_sync();
  tcgen05::fence_after();
  const uint32_t tmem = load_shared_4(shared + C::kTmem);

  const Place<C> place = {a, workspace, run.row, head0, thread % 128, chunks, shared, tmem};
  if (warp < 4) {
    Decoder<C>{run, shared, rank, thread}.run();
  } else if (warp < 8) {
    Weights<C, kSplit>{place}.run(first, run.count);
  } else if (warp < 12) {
    Merging<C, kSplit>{place}.run(first, run.count);
  } else if (warp == C::kProductWarp) {
    if (lane == 0 && rank == 0) Products<C>{shared, tmem}.run(run.count);
  } else if (warp == C::kGatherWarp) {
    RowCopies<C>(a, pool, run, shared, rank, lane).run();
  }
  __syncwarp();
  tcgen05::fence_before();
  __syncthreads();
  if constexpr (C::kPair) cluster_sync();  // nobody leaves while the partner may write here
  tcgen05::fence_after();
  if (warp == C::kProductWarp) tcgen05::deallocate<C::kCtas>(tmem, C::kTmemColumns);
#endif
}

}  // namespace mla_fp4::sm100
