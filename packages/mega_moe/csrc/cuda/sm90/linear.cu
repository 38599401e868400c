// Launch of the FP8 products.
#include "cuda/sm90/linear.cuh"

namespace mega_moe::cuda {
namespace {

template <typename Config>
__global__ void __launch_bounds__(Config::threads) linear_kernel(LinearParams a, LinearShape shape) {
  extern __shared__ __align__(16) uint8_t shared[];
  linear_block<Config>(a, shape, blockIdx.x / shape.cluster, blockIdx.y, static_cast<int>(linear_rank()), shared);
}

template <typename Config>
cudaError_t launch(const LinearParams& a, const LinearShape& shape, cudaStream_t stream) {
  const int64_t blocks = (a.rows + Config::rows - 1) / Config::rows * a.groups;
  if (blocks > INT32_MAX / shape.cluster) return cudaErrorInvalidValue;
  const int64_t tiles = (a.tokens + Config::tokens - 1) / Config::tokens;
  if (tiles > 65535) return cudaErrorInvalidValue;
  const int bytes = static_cast<int>(linear_shared<Config>(a.columns, shape).bytes);
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

// f(LinearConfig) for the tile and warps.
template <int Warps, typename F>
auto by_tile(int tile, F f) {
  if (tile == 8) return f(LinearConfig<1, Warps>{});
  if (tile == 16) return f(LinearConfig<2, Warps>{});
  if (tile == 32) return f(LinearConfig<4, Warps>{});
  return f(LinearConfig<8, Warps>{});
}

template <typename F>
auto with_config(const LinearShape& shape, F f) {
  return shape.warps == 4 ? by_tile<4>(shape.tile, f) : by_tile<8>(shape.tile, f);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// All but the pointers.
bool fits(const LinearParams& a, const LinearShape& shape) {
  if (a.tokens < 0 || a.groups < 1 || a.rows < 0 || a.columns < 64 || a.columns % 64) return false;
  if (a.groups > 1 && a.rows % 32) return false;
  if (shape.terms < 1 || shape.terms > 3 || (shape.warps != 4 && shape.warps != 8)) return false;
  if (shape.cluster != 1 && shape.cluster != 2 && shape.cluster != 4 && shape.cluster != 8) return false;
  if (shape.tile != 8 && shape.tile != 16 && shape.tile != 32 && shape.tile != 64) return false;
  return with_config(
      shape, [&](auto config) { return linear_shared<decltype(config)>(a.columns, shape).bytes <= kLinearMostShared; });
}

}  // namespace

int linear_tile(const LinearParams& a, const LinearShape& shape) {
  LinearShape one = shape;
  int best = 0;
  for (one.tile = 8; one.tile <= 64; one.tile *= 2) {
    if (!fits(a, one)) break;
    best = one.tile;
    if (one.tile >= a.tokens) break;
  }
  return best;
}

cudaError_t linear(const LinearParams& a, const LinearShape& shape, cudaStream_t stream) {
  if (!fits(a, shape)) return cudaErrorInvalidValue;
  if (a.tokens == 0 || a.rows == 0) return cudaSuccess;
  if (!a.x || !a.weight || !a.scale || !a.out || !aligned(a.x) || !aligned(a.weight)) return cudaErrorInvalidValue;
  return with_config(shape, [&](auto config) { return launch<decltype(config)>(a, shape, stream); });
}

}  // namespace mega_moe::cuda
