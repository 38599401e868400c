// Launch of the hyper-connection kernel for many tokens: as many clusters as run at once.
#include "cuda/sm90/hc_stay.cuh"

#include <atomic>

#include "cuda/sm90/hc_launch.cuh"

namespace mhc_engram::cuda {
namespace {

template <typename Parts>
__global__ void __launch_bounds__(Parts::threads, 1) hc_stay_kernel(HcParams p, HcShape shape) {
  extern __shared__ __align__(16) float shared[];
  hc_stay_block<Parts>(p, shape, static_cast<int>(blockIdx.x) / shape.cluster,
                       static_cast<int>(gridDim.x) / shape.cluster, cluster_rank(), shared);
}

// Clusters of the kernel that run at once. The device is asked once for each instance, cluster and size of shared
// memory in turn; devices of a process are of one kind. One cluster is right wherever it does not say: it takes all
// tiles.
template <typename Parts>
int clusters_at_once(const ClusterLaunch& launch) {
  static std::atomic<uint64_t> known{0};  // bytes, CTAs of a cluster, count
  const uint64_t key = static_cast<uint64_t>(launch.config.dynamicSmemBytes) << 32 | launch.cluster.val.clusterDim.x
                                                                                         << 16;
  const uint64_t before = known.load();
  if ((before & ~uint64_t{0xFFFF}) == key) return static_cast<int>(before & 0xFFFF);
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, hc_stay_kernel<Parts>, &launch.config) != cudaSuccess) {
    cudaGetLastError();
    return 1;
  }
  count = count < 1 ? 1 : (count > 0xFFFF ? 0xFFFF : count);
  known.store(key | static_cast<uint64_t>(count));
  return count;
}

template <typename Parts>
cudaError_t launch(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  const int64_t tiles = (p.tokens + shape.tile - 1) / shape.tile;
  if (p.tokens > INT32_MAX / 64) return cudaErrorInvalidValue;  // tokens beyond the last tile are counted in 32 bits
  const size_t bytes = hc_stay_shared(hc_plan(p.channels, shape.cluster), shape, Parts::cut).floats * sizeof(float);
  const auto kernel = hc_stay_kernel<Parts>;
  const cudaError_t allowed = allow_cluster(kernel, shape.cluster, bytes);
  if (allowed != cudaSuccess) return allowed;
  ClusterLaunch of(shape.cluster, tiles < 1024 ? tiles : 1024, Parts::threads, bytes, stream);
  const int64_t clusters = clusters_at_once<Parts>(of);
  of.config.gridDim.x = static_cast<unsigned>((tiles < clusters ? tiles : clusters) * shape.cluster);
  const cudaError_t launched = cudaLaunchKernelEx(&of.config, kernel, p, shape);
  return launched != cudaSuccess ? launched : cudaGetLastError();
}

template <int Groups, int Across, int Stages, bool Kept, int Channels = 0, int Cluster = 0>
cudaError_t with_update(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  return p.y ? launch<HcStay<true, Groups, Across, Stages, Kept, Channels, Cluster>>(p, shape, stream)
             : launch<HcStay<false, Groups, Across, Stages, Kept, Channels, Cluster>>(p, shape, stream);
}

}  // namespace

// The shape is one that hc_fits allows.
cudaError_t hc_stay(const HcParams& p, const HcShape& shape, cudaStream_t stream) {
  constexpr int usual = HcConfig::usual;
  const HcStayCut cut = hc_stay_cut(shape);
  if (cut.kept) return with_update<1, 2, 1, true, usual, 16>(p, shape, stream);
  if (cut.groups == 2) return with_update<2, 1, 2, false, usual, 8>(p, shape, stream);
  if (cut.groups == 3) return with_update<3, 1, 1, false, usual, 8>(p, shape, stream);
  return p.channels == usual ? with_update<1, 1, 2, false, usual>(p, shape, stream)
                             : with_update<1, 1, 2, false>(p, shape, stream);
}

}  // namespace mhc_engram::cuda
