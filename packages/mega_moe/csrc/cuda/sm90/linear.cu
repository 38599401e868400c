// Launch of the FP8 products.
#include "cuda/sm90/linear.cuh"

namespace mega_moe::cuda {
namespace {

template <typename Config>
__global__ void __launch_bounds__(Config::threads, Config::together) linear_kernel(LinearParams a, LinearShape shape) {
  extern __shared__ __align__(16) uint8_t shared[];
  linear_block<Config>(a, shape, blockIdx.x / shape.cluster, blockIdx.y, static_cast<int>(linear_rank()), shared);
}

template <typename Config>
cudaError_t launch(const LinearParams& a, const LinearShape& shape, cudaStream_t stream) {
  const int64_t blocks = (a.rows + Config::rows - 1) / Config::rows * a.groups;
  if (blocks > INT32_MAX / shape.cluster) return cudaErrorInvalidValue;
  const int64_t tiles = (a.tokens + Config::tokens - 1) / Config::tokens;
  if (tiles > 65535) return cudaErrorInvalidValue;
  const int bytes = static_cast<int>(linear_shared(a.tokens, a.columns, shape).bytes);
  const auto kernel = linear_kernel<Config>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks * shape.cluster), static_cast<unsigned>(tiles));
  config.blockDim = dim3(Config::threads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, a, shape);
  return launched != cudaSuccess ? launched : cudaGetLastError();
}

// f(LinearConfig) for the shape.
template <int Warps, int Stages, typename F>
auto by_tile(int tile, F f) {
  if (tile == 8) return f(LinearConfig<1, Warps, Stages>{});
  if (tile == 16) return f(LinearConfig<2, Warps, Stages>{});
  if constexpr (Stages == 4) {
    if (tile == 64) return f(LinearConfig<8, Warps, Stages>{});
  }
  return f(LinearConfig<4, Warps, Stages>{});
}

template <typename F>
auto with_config(const LinearShape& shape, F f) {
  if (shape.stages == 4) return shape.warps == 4 ? by_tile<4, 4>(shape.tile, f) : by_tile<8, 4>(shape.tile, f);
  if (shape.warps == 2) return by_tile<2, 8>(shape.tile, f);
  return shape.warps == 4 ? by_tile<4, 8>(shape.tile, f) : by_tile<8, 8>(shape.tile, f);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

LinearShape linear_shape(const LinearParams& a, int terms, int cluster, int64_t multiprocessors) {
  return linear_choose(a, terms, cluster, multiprocessors);
}

cudaError_t linear(const LinearParams& a, const LinearShape& shape, cudaStream_t stream) {
  if (!linear_fits(a, shape)) return cudaErrorInvalidValue;
  if (a.tokens == 0 || a.rows == 0) return cudaSuccess;
  if (!a.x || !a.weight || !a.scale || !a.out || !aligned(a.x) || !aligned(a.weight)) return cudaErrorInvalidValue;
  return with_config(shape, [&](auto config) { return launch<decltype(config)>(a, shape, stream); });
}

}  // namespace mega_moe::cuda
