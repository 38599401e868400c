// Launch of the hyper-connection kernel: which parts run, and how a launch is cut.
#include "cuda/sm90/hc_step.cuh"

namespace mhc_engram::cuda {
namespace {

template <typename Parts>
__global__ void __launch_bounds__(HcConfig::threads, 1) hc_step_kernel(HcParams p, HcShape shape) {
  extern __shared__ __align__(16) float shared[];
  hc_block<Parts>(p, shape, blockIdx.x / shape.cluster, cluster_rank(), shared);
}

template <typename Parts>
cudaError_t launch(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  const int64_t tiles = (p.tokens + shape.tile - 1) / shape.tile;
  if (tiles > INT32_MAX / shape.cluster) return cudaErrorInvalidValue;
  const size_t bytes = hc_shared(hc_plan(p.channels, shape.cluster), shape.tile, Parts::mix).floats * sizeof(float);
  const auto kernel = hc_step_kernel<Parts>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiles * shape.cluster));
  config.blockDim = dim3(HcConfig::threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, p, shape);
  return launched != cudaSuccess ? launched : cudaGetLastError();
}

template <int Halves>
cudaError_t by_parts(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  switch ((p.y ? 1 : 0) | (p.fn ? 2 : 0) | (p.pre_mix ? 4 : 0)) {
    case 1:
      return launch<HcParts<true, false, false, Halves>>(p, shape, stream);
    case 2:
      return launch<HcParts<false, true, false, Halves>>(p, shape, stream);
    case 3:
      return launch<HcParts<true, true, false, Halves>>(p, shape, stream);
    case 4:
      return launch<HcParts<false, false, true, Halves>>(p, shape, stream);
    case 5:
      return launch<HcParts<true, false, true, Halves>>(p, shape, stream);
    case 6:
      return launch<HcParts<false, true, true, Halves>>(p, shape, stream);
    case 7:
      return launch<HcParts<true, true, true, Halves>>(p, shape, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

HcShape hc_shape(int64_t tokens, int64_t channels, int64_t multiprocessors) {
  return hc_choose(tokens, channels, multiprocessors);
}

cudaError_t hc_step(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  const bool mixes = p.pre_mix != nullptr;
  if (p.tokens < 0 || p.channels <= 0 || p.channels % HcConfig::chunk) return cudaErrorInvalidValue;
  if (!hc_fits(p.channels, shape, mixes)) return cudaErrorInvalidValue;
  if (p.tokens == 0) return cudaSuccess;
  if (!p.streams || !aligned(p.streams) || !aligned(p.y) || !aligned(p.fn)) return cudaErrorInvalidValue;
  if (!aligned(p.norm_weight) || !aligned(p.mixed) || !aligned(p.codes)) return cudaErrorInvalidValue;
  if (p.y && (!p.post || !p.comb)) return cudaErrorInvalidValue;
  if (p.fn && (!p.base || !p.scale || !p.pre_out || !p.post_out || !p.comb_out || p.iters < 1))
    return cudaErrorInvalidValue;
  if (!aligned(p.comb_out) || (!p.y && !p.fn && !mixes)) return cudaErrorInvalidValue;
  if (mixes && !p.mixed && !p.codes) return cudaErrorInvalidValue;
  if (p.codes && (!p.code_scales || p.channels % 32)) return cudaErrorInvalidValue;
  return shape.tile <= 8 ? by_parts<1>(p, shape, stream) : by_parts<2>(p, shape, stream);
}

}  // namespace mhc_engram::cuda
