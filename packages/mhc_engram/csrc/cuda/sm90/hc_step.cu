// Launch of the hyper-connection kernel: which parts run, and how a launch is cut.
#include "cuda/sm90/hc_step.cuh"

#include "cuda/sm90/hc_launch.cuh"

namespace mhc_engram::cuda {

cudaError_t hc_stay(const HcParams& p, const HcShape& shape, cudaStream_t stream);  // hc_stay.cu

namespace {

template <typename Parts>
__global__ void __launch_bounds__(Parts::threads, Parts::warps == 4 ? 2 : 1)
    hc_step_kernel(HcParams p, HcShape shape, bool cold) {
  extern __shared__ __align__(16) float shared[];
  hc_block<Parts>(p, shape, cold, blockIdx.x / shape.cluster, cluster_rank(), shared);
}

// Up to so many tokens, each CTA asks for its part of fn at once: its reads would wait for memory one after the other.
constexpr int64_t kColdTokens = 256;

template <typename Parts>
cudaError_t launch(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  const int64_t tiles = (p.tokens + shape.tile - 1) / shape.tile;
  if (tiles > INT32_MAX / shape.cluster) return cudaErrorInvalidValue;
  const size_t bytes =
      hc_shared(hc_plan(p.channels, shape.cluster), shape, Parts::coefficients, Parts::mix).floats * sizeof(float);
  const auto kernel = hc_step_kernel<Parts>;
  const cudaError_t allowed = allow_cluster(kernel, shape.cluster, bytes);
  if (allowed != cudaSuccess) return allowed;
  const ClusterLaunch of(shape.cluster, tiles, Parts::threads, bytes, stream);
  const cudaError_t launched = cudaLaunchKernelEx(&of.config, kernel, p, shape, p.tokens <= kColdTokens);
  return launched != cudaSuccess ? launched : cudaGetLastError();
}

// The step of a model whose width is known.
template <bool Update, int Halves, int Warps>
cudaError_t whole(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  constexpr int usual = HcConfig::usual;
  return p.channels == usual ? launch<HcParts<Update, true, true, Halves, Warps, usual>>(p, shape, stream)
                             : launch<HcParts<Update, true, true, Halves, Warps>>(p, shape, stream);
}

template <int Halves, int Warps>
cudaError_t by_parts(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  switch ((p.y ? 1 : 0) | (p.fn ? 2 : 0) | (p.pre_mix ? 4 : 0)) {
    case 1:
      return launch<HcParts<true, false, false, Halves, Warps>>(p, shape, stream);
    case 2:
      return launch<HcParts<false, true, false, Halves, Warps>>(p, shape, stream);
    case 3:
      return launch<HcParts<true, true, false, Halves, Warps>>(p, shape, stream);
    case 4:
      return launch<HcParts<false, false, true, Halves, Warps>>(p, shape, stream);
    case 5:
      return launch<HcParts<true, false, true, Halves, Warps>>(p, shape, stream);
    case 6:
      return whole<false, Halves, Warps>(p, shape, stream);
    case 7:
      return whole<true, Halves, Warps>(p, shape, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// Clusters that the current device runs at once; what is safe where it does not say.
HcRoom ask_room(int64_t multiprocessors) {
  HcRoom room = hc_room(multiprocessors);
  const auto kernel = hc_step_kernel<HcParts<true, true, true, 2, 8>>;
  constexpr int bytes = 128 << 10;  // one CTA on a multiprocessor
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess) {
    cudaGetLastError();
    return room;
  }
  for (int i = 0; i < HcRoom::sizes && 1 << i <= 8; ++i) {
    const ClusterLaunch of(1 << i, 256, 256, bytes);
    int count = 0;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &of.config) == cudaSuccess && count > 0)
      room.clusters[i] = count;
    else
      cudaGetLastError();
  }
  return room;
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

HcShape hc_shape(int64_t tokens, int64_t channels, int64_t multiprocessors) {
  static const HcRoom room = ask_room(multiprocessors);  // devices of a process are of one kind
  return hc_choose(tokens, channels, room);
}

cudaError_t hc_step(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  const bool mixes = p.pre_mix != nullptr;
  if (p.tokens < 0 || p.channels <= 0 || p.channels % HcConfig::chunk || p.channels > INT32_MAX / 128)
    return cudaErrorInvalidValue;
  if (!hc_fits(p.channels, shape)) return cudaErrorInvalidValue;
  if (p.tokens == 0) return cudaSuccess;
  if (!p.streams || !aligned(p.streams) || !aligned(p.y) || !aligned(p.fn)) return cudaErrorInvalidValue;
  if (!aligned(p.norm_weight) || !aligned(p.mixed) || !aligned(p.codes)) return cudaErrorInvalidValue;
  if (p.y && (!p.post || !p.comb)) return cudaErrorInvalidValue;
  if (p.fn && (!p.base || !p.scale || !p.pre_out || !p.post_out || !p.comb_out || p.iters < 1))
    return cudaErrorInvalidValue;
  if (!aligned(p.comb_out) || (!p.y && !p.fn && !mixes)) return cudaErrorInvalidValue;
  if (mixes && !p.mixed && !p.codes) return cudaErrorInvalidValue;
  if (p.codes && (!p.code_scales || p.channels % 32)) return cudaErrorInvalidValue;
  if (shape.stay && p.fn && mixes) return hc_stay(p, shape, stream);
  if (shape.stay) return hc_step(p, hc_of_many(p.tokens, p.channels), stream);
  if (shape.warps == 4)
    return hc_halves(shape.tile) == 1 ? by_parts<1, 4>(p, shape, stream) : by_parts<2, 4>(p, shape, stream);
  return hc_halves(shape.tile) == 1 ? by_parts<1, 8>(p, shape, stream) : by_parts<2, 8>(p, shape, stream);
}

}  // namespace mhc_engram::cuda
