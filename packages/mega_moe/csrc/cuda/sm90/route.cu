// Launches of the router and of the permutation.
#include "cuda/sm90/route_permute.cuh"
#include "cuda/sm90/route_select.cuh"

namespace mega_moe::cuda {
namespace {

constexpr int64_t kMostExperts = PermuteConfig::experts;
constexpr int64_t kMostSlots = 32;

constexpr int kRouteWarps = 4;  // small blocks leave less idle at the end

template <typename Config>
__global__ void __launch_bounds__(32 * kRouteWarps) route_kernel(RouteParams a) {
  __shared__ Candidate scratch[kRouteWarps][kCandidates];
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRouteWarps + threadIdx.x / 32;
  if (token < a.tokens) route_token<Config>(a, token, static_cast<int>(threadIdx.x % 32), scratch[threadIdx.x / 32]);
}

// The block that is last to finish its tokens sorts the rows of all.
template <typename Config>
__global__ void __launch_bounds__(Config::threads, 1)
    route_permute_kernel(RouteParams a, PermuteParams p, int32_t* ticket) {
  extern __shared__ int32_t shared[];
  __shared__ bool last;
  __shared__ Candidate scratch[Config::warps][kCandidates];
  const int64_t token = static_cast<int64_t>(blockIdx.x) * Config::warps + threadIdx.x / 32;
  if (token < a.tokens) route_token<Config>(a, token, static_cast<int>(threadIdx.x % 32), scratch[threadIdx.x / 32]);
  if (gridDim.x > 1) {
    __threadfence();  // ids before the ticket
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(ticket, 1) == static_cast<int32_t>(gridDim.x) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) *ticket = 0;
  } else {
    __syncthreads();
  }
  permute_block(p, 0, 1, Config::warps, nullptr, shared, [] {});
}

// The second of two launches starts while the first one runs, and waits for it where it needs its counts.
__device__ __forceinline__ void start_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_last_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__global__ void __launch_bounds__(PermuteConfig::threads) count_kernel(PermuteParams a, int32_t* block_counts) {
  extern __shared__ int32_t shared[];
  start_next_launch();
  count_block(a, blockIdx.x, PermuteConfig::warps, block_counts, shared);
}

__global__ void __launch_bounds__(PermuteConfig::threads) permute_kernel(PermuteParams a, const int32_t* block_counts) {
  extern __shared__ int32_t shared[];
  permute_block(a, blockIdx.x, gridDim.x, PermuteConfig::warps, block_counts, shared, [] { wait_for_last_launch(); });
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

bool route_fits(const RouteParams& a) {
  if (a.tokens < 0 || a.experts < 1 || a.experts > kMostExperts) return false;
  if (a.top_k < 1 || a.top_k > a.experts || a.top_k > kMostSlots) return false;
  if (a.tokens == 0) return true;
  if (!a.logits || !a.bias || !a.ids || !a.weights || (a.bias_vl != nullptr) != (a.is_image != nullptr)) return false;
  return a.tokens / kRouteWarps < INT32_MAX;
}

bool permute_fits(const PermuteParams& a) {
  if (a.tokens < 0 || a.experts < 1 || a.experts > kMostExperts || a.top_k < 1 || a.top_k > kMostSlots) return false;
  if (a.tokens > INT32_MAX / (a.top_k + 1)) return false;
  return a.offsets && (a.tokens == 0 || (a.ids && a.rows));
}

// f(RouteConfig) for the number of experts.
template <typename F>
cudaError_t with_config(const RouteParams& a, F f) {
  const bool vectors = a.experts % 4 == 0 && aligned(a.logits) && aligned(a.bias) && aligned(a.bias_vl);
  if (a.experts <= 128) return vectors ? f(RouteConfig<1, true>{}) : f(RouteConfig<1, false>{});
  if (a.experts <= 256) return vectors ? f(RouteConfig<2, true>{}) : f(RouteConfig<2, false>{});
  if (a.experts <= 384) return vectors ? f(RouteConfig<3, true>{}) : f(RouteConfig<3, false>{});
  return vectors ? f(RouteConfig<8, true>{}) : f(RouteConfig<8, false>{});
}

template <typename Kernel>
cudaError_t grow_shared(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

}  // namespace

cudaError_t route(const RouteParams& a, cudaStream_t stream) {
  if (!route_fits(a)) return cudaErrorInvalidValue;
  if (a.tokens == 0) return cudaSuccess;
  return with_config(a, [&](auto config) {
    using Config = decltype(config);
    const unsigned blocks = static_cast<unsigned>((a.tokens + kRouteWarps - 1) / kRouteWarps);
    route_kernel<Config><<<blocks, 32 * kRouteWarps, 0, stream>>>(a);
    return cudaGetLastError();
  });
}

int64_t permute_workspace(int64_t tokens, int64_t top_k, int64_t experts) {
  const int64_t blocks = permute_blocks(tokens * top_k);
  return blocks == 1 ? 0 : blocks * experts * 4;
}

cudaError_t permute(const PermuteParams& a, void* workspace, cudaStream_t stream) {
  if (!permute_fits(a)) return cudaErrorInvalidValue;
  const int64_t blocks = permute_blocks(a.tokens * a.top_k);
  if (blocks > 1 && !workspace) return cudaErrorInvalidValue;
  const size_t bytes = static_cast<size_t>(permute_shared(a.experts, PermuteConfig::warps)) * 4;
  auto* counts = blocks == 1 ? nullptr : static_cast<int32_t*>(workspace);
  if (blocks > 1) {
    if (const cudaError_t status = grow_shared(count_kernel, bytes); status != cudaSuccess) return status;
    count_kernel<<<static_cast<unsigned>(blocks), PermuteConfig::threads, bytes, stream>>>(a, counts);
    if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) return status;
  }
  if (const cudaError_t status = grow_shared(permute_kernel, bytes); status != cudaSuccess) return status;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(PermuteConfig::threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = blocks > 1 ? 1 : 0;
  const cudaError_t launched = cudaLaunchKernelEx(&config, permute_kernel, a, static_cast<const int32_t*>(counts));
  return launched != cudaSuccess ? launched : cudaGetLastError();
}

cudaError_t route_permute(const RouteParams& a, const PermuteParams& p, int32_t* ticket, cudaStream_t stream) {
  if (!route_fits(a) || !permute_fits(p) || !ticket) return cudaErrorInvalidValue;
  if (a.tokens != p.tokens || a.top_k != p.top_k || a.experts != p.experts || a.ids != p.ids)
    return cudaErrorInvalidValue;
  if (permute_blocks(p.tokens * p.top_k) != 1) return cudaErrorInvalidValue;
  if (a.tokens == 0) return permute(p, nullptr, stream);
  return with_config(a, [&](auto config) {
    using Config = decltype(config);
    const auto kernel = route_permute_kernel<Config>;
    const size_t bytes = static_cast<size_t>(permute_shared(a.experts, Config::warps)) * 4;
    if (const cudaError_t status = grow_shared(kernel, bytes); status != cudaSuccess) return status;
    const unsigned blocks = static_cast<unsigned>((a.tokens + Config::warps - 1) / Config::warps);
    kernel<<<blocks, Config::threads, bytes, stream>>>(a, p, ticket);
    return cudaGetLastError();
  });
}

}  // namespace mega_moe::cuda
