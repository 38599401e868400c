// Launch of a kernel in clusters.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace mhc_engram::cuda {

// What cudaLaunchKernelEx and the question for room take; it holds the attribute that its configuration points to.
struct ClusterLaunch {
  cudaLaunchAttribute cluster = {};
  cudaLaunchConfig_t config = {};

  ClusterLaunch(int ctas, int64_t clusters, int threads, size_t bytes, cudaStream_t stream = nullptr) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(ctas);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(clusters * ctas));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

// Dynamic shared memory and clusters beyond 8 CTAs, which a kernel has to be allowed.
template <typename Kernel>
cudaError_t allow_cluster(Kernel* kernel, int ctas, size_t bytes) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status != cudaSuccess || ctas <= 8) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

}  // namespace mhc_engram::cuda
