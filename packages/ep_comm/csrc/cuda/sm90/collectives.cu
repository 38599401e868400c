// Kernels: a range of CTAs for each rank of the launch.
#include "cuda/collectives.hpp"

#include <algorithm>

#include "cuda/sm90/memory.cuh"

// What follows is written against these.
#include "cuda/sm90/combine.cuh"
#include "cuda/sm90/dispatch.cuh"

namespace ep_comm::cuda {
namespace {

template <int Count>
struct Group {
  int ctas;  // a rank
  RankArgs ranks[Count];
};

template <Format F, bool Push, int Count>
__global__ void __launch_bounds__(kThreads, 1) dispatch_kernel(const __grid_constant__ Group<Count> g) {
  __shared__ DispatchShared shared;
  const int cta = static_cast<int>(blockIdx.x);
  dispatch<F, Push, kWarps>(g.ranks[cta / g.ctas], cta % g.ctas, g.ctas, shared);
}

template <Format F, int Count>
__global__ void __launch_bounds__(kThreads, 1) collect_kernel(const __grid_constant__ Group<Count> g) {
  __shared__ DispatchShared shared;
  const int cta = static_cast<int>(blockIdx.x);
  collect<F, kWarps>(g.ranks[cta / g.ctas], cta % g.ctas, g.ctas, shared);
}

template <Format F, int Count>
__global__ void __launch_bounds__(kThreads, 1) combine_kernel(const __grid_constant__ Group<Count> g) {
  __shared__ CombineShared shared;
  const int cta = static_cast<int>(blockIdx.x);
  combine<F, kWarps>(g.ranks[cta / g.ctas], cta % g.ctas, g.ctas, shared);
}

template <int Count>
__global__ void __launch_bounds__(32, 1) barrier_kernel(const __grid_constant__ Group<Count> g) {
  __shared__ int word;
  const int cta = static_cast<int>(blockIdx.x);
  barrier(g.ranks[cta / g.ctas], cta % g.ctas, g.ctas, &word);
}

template <int Count>
using Kernel = void (*)(Group<Count>);

template <int Count>
Kernel<Count> kernel_of(Op op, const Shape& s) {
  const auto dispatched = [&]<Format F>() -> Kernel<Count> {
    return op == Op::push       ? dispatch_kernel<F, true, Count>
           : op == Op::announce ? dispatch_kernel<F, false, Count>
                                : collect_kernel<F, Count>;
  };
  if (op == Op::barrier) return barrier_kernel<Count>;
  if (op == Op::combine)
    return s.combine == Format::float32 ? combine_kernel<Format::float32, Count>
                                        : combine_kernel<Format::bfloat16, Count>;
  return s.dispatch == Format::float32    ? dispatched.template operator()<Format::float32>()
         : s.dispatch == Format::bfloat16 ? dispatched.template operator()<Format::bfloat16>()
                                          : dispatched.template operator()<Format::fp8>();
}

bool fits(const Shape& s) {
  return s.ranks >= 1 && s.ranks <= kMostRanks && s.top_k >= 1 && s.top_k <= kMostSlots && s.hidden % 16 == 0 &&
         s.max_tokens >= 1 && s.experts >= 1;
}

template <int Count>
cudaError_t launch_group(Op op, const RankArgs* ranks, int here, int ctas, cudaStream_t stream) {
  Group<Count> group{};
  group.ctas = ctas;
  std::copy_n(ranks, here, group.ranks);
  const unsigned threads = op == Op::barrier ? 32 : kThreads;
  kernel_of<Count>(op, ranks[0].shape)<<<static_cast<unsigned>(here * ctas), threads, 0, stream>>>(group);
  return cudaGetLastError();
}

template <int Count>
cudaError_t load_group() {
  for (const Op op : {Op::push, Op::announce, Op::collect, Op::combine, Op::barrier})
    for (const Format format : {Format::float32, Format::bfloat16, Format::fp8}) {
      Shape s{};
      s.dispatch = format, s.combine = format == Format::fp8 ? Format::float32 : format;
      cudaFuncAttributes unused{};
      const cudaError_t status = cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(kernel_of<Count>(op, s)));
      if (status != cudaSuccess) return status;
    }
  return cudaSuccess;
}

}  // namespace

cudaError_t launch(Op op, const RankArgs* ranks, int here, int ctas, cudaStream_t stream) {
  if (here < 1 || here > kMostHere || ctas < 1 || (op == Op::barrier && ctas != 1)) return cudaErrorInvalidValue;
  for (int i = 0; i < here; ++i)
    if (!fits(ranks[i].shape)) return cudaErrorInvalidValue;
  return here == 1 ? launch_group<1>(op, ranks, here, ctas, stream)
                   : launch_group<kMostHere>(op, ranks, here, ctas, stream);
}

cudaError_t load_kernels() {
  const cudaError_t status = load_group<1>();
  return status == cudaSuccess ? load_group<kMostHere>() : status;
}

}  // namespace ep_comm::cuda
