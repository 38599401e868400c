// Launch of the schedule.
#include "cuda/schedule_launch.hpp"

#include "cuda/sm90/schedule.cuh"

namespace dspark_kernels::cuda {
namespace {

constexpr int kLeastThreads = 256;

template <int kDrafts>
__global__ void __launch_bounds__(kMostRequests, 1) schedule_kernel(Schedule a) {
  __shared__ ScheduleShared shared;
  schedule_block<kDrafts>(a, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), static_cast<int>(blockDim.x),
                          shared);
}

// A kernel for every number of drafts: at 1024 requests the number of instructions is most of its time.
template <int kDrafts = 1>
void launch(const Schedule& a, unsigned blocks, int threads, cudaStream_t stream) {
  if (a.drafts == kDrafts) {
    schedule_kernel<kDrafts><<<blocks, threads, 0, stream>>>(a);
  } else if constexpr (kDrafts < kMostDrafts) {
    launch<kDrafts + 1>(a, blocks, threads, stream);
  }
}

}  // namespace

cudaError_t schedule(const Schedule& a, cudaStream_t stream) {
  if (a.requests < 1 || a.requests > kMostRequests || a.drafts < 1 || a.drafts > kMostDrafts) {
    return cudaErrorInvalidValue;
  }
  if (a.capacity < 1 || a.capacity > INT32_MAX || !a.confidence || !a.tokens || !a.starts || !a.limits || !a.host) {
    return cudaErrorInvalidValue;
  }
  const int threads = static_cast<int>(a.requests <= kLeastThreads ? kLeastThreads : (a.requests + 31) / 32 * 32);
  launch(a, static_cast<unsigned>((a.requests + 31) / 32), threads, stream);
  return cudaGetLastError();
}

}  // namespace dspark_kernels::cuda
