#include <algorithm>

#include "cuda/sm90/memory.cuh"

// What follows is written against it.
#include "cuda/sm90/publish.cuh"

namespace ep_comm::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 1) publish_kernel(const __grid_constant__ PublishArgs args) {
  __shared__ int word;
  publish(args, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), &word);
}

bool fits(const PublishArgs& a) {
  const Shape& s = a.rank.shape;
  const bool sizes = s.ranks >= 1 && s.ranks <= kMostRanks && s.top_k >= 1 && s.hidden % 16 == 0 && s.max_tokens >= 1 &&
                     s.experts >= 1 && a.rank.tokens >= 0 && a.rank.tokens <= s.max_tokens;
  const bool tables = a.copies.counts ? a.copies.own && a.copies.copies && a.copies.logical > 0 : !a.routed;
  return sizes && tables && a.rows && a.weights && a.slots && (a.rank.tokens == 0 || a.physical);
}

}  // namespace

cudaError_t launch_publish(const PublishArgs& args, int ctas, cudaStream_t stream) {
  if (!fits(args) || ctas < 1) return cudaErrorInvalidValue;
  publish_kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t load_publish() {
  cudaFuncAttributes unused{};
  return cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(publish_kernel));
}

}  // namespace ep_comm::cuda
