// Launches of the experts on SM100: MXFP4 weights, activations in MXFP8, products by block-scaled tcgen05. Compiled,
// never run. docs/kernels/mega_moe_sm100.md has the plans of memory and the schedule.
#include <limits>

#include "cuda/sm100/expert_kernel_sm100.cuh"
#include "cuda/sm100/expert_map_sm100.hpp"

namespace mega_moe::sm100 {
namespace {

struct Maps {
  CUtensorMap routed, shared;  // the second one is the first without a shared expert
};

cudaError_t make_maps(Maps& maps, const uint8_t* routed, const uint8_t* shared, int experts, int64_t rows,
                      int64_t columns) {
  if (const cudaError_t e = weights_map(maps.routed, routed, experts * rows, columns, true)) return e;
  if (shared != nullptr) return weights_map(maps.shared, shared, rows, columns, false);
  maps.shared = maps.routed;
  return cudaSuccess;
}

template <typename C, bool kSecond>
cudaError_t product(const ExpertsParams& p, const Maps& maps, int grid, cudaStream_t stream) {
  const auto kernel = experts_sm100_kernel<C, kSecond>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes)) {
    return e;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {C::kCtas, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = {static_cast<unsigned>(grid / C::kCtas * C::kCtas), 1, 1};
  config.blockDim = {C::kThreads, 1, 1};
  config.dynamicSmemBytes = C::kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (const cudaError_t e = cudaLaunchKernelEx(&config, kernel, p, maps.routed, maps.shared)) return e;
  return cudaGetLastError();
}

template <typename C>
cudaError_t launch(const ExpertsParams& p, int grid, cudaStream_t stream) {
  Maps first, second;
  if (const cudaError_t e = make_maps(first, p.w13, p.shared13, p.experts, int64_t{2} * p.inter, p.d)) return e;
  if (const cudaError_t e = make_maps(second, p.w2, p.shared2, p.experts, p.d, p.inter)) return e;
  const int64_t tiles = most_tiles(p.tokens, p.slots, p.experts, p.shared13 != nullptr, C::kTokens);
  gather_experts_sm100<C::kTokens>
      <<<static_cast<unsigned>(tiles * kGatherParts), kGatherThreads, kGatherShared, stream>>>(p);
  if (const cudaError_t e = cudaGetLastError()) return e;
  if (const cudaError_t e = product<C, false>(p, first, grid, stream)) return e;
  if (const cudaError_t e = product<C, true>(p, second, grid, stream)) return e;
  const int64_t fours = int64_t{p.tokens} * p.d / 4;
  combine_experts_sm100<<<static_cast<unsigned>((fours + kCombineThreads - 1) / kCombineThreads), kCombineThreads, 0,
                          stream>>>(p);
  return cudaGetLastError();
}

bool aligned(const void* p, uint64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

bool fits(const ExpertsParams& p, int tile, int ctas, int grid) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const bool sizes = p.tokens >= 0 && p.slots > 0 && p.experts > 0 && p.experts <= kMostExperts && p.limit > 0 &&
                     grid >= ctas && experts_shape(tile, ctas, p.d, p.inter);
  if (!sizes) return false;
  // 32-bit numbers of rows, weight rows, tiles and items, and of CTAs of the small kernels
  const int64_t tiles = most_tiles(p.tokens, p.slots, p.experts, p.shared13 != nullptr, tile);
  const int64_t wide = p.d > 2 * p.inter ? p.d : 2 * p.inter;
  if (int64_t{p.tokens} * (p.slots + 1) > kMost || p.experts * wide > kMost || tiles * (wide / 128) > kMost - grid ||
      tiles * kGatherParts > kMost || int64_t{p.tokens} * p.d / 4 / kCombineThreads >= kMost) {
    return false;
  }
  const bool own = p.tokens == 0 || (p.x && p.ids && p.weights && p.out && p.rows && p.images && p.hidden && p.parts);
  return own && p.offsets && p.w13 && p.w2 && p.scale13 && p.scale2 && aligned(p.w13, 32) && aligned(p.w2, 32) &&
         (p.shared13 == nullptr) == (p.shared2 == nullptr) && aligned(p.shared13, 32) && aligned(p.shared2, 32) &&
         aligned(p.x, 16) && aligned(p.out, 16) && aligned(p.scale13, 16) && aligned(p.scale2, 16) &&
         aligned(p.images, 16) && aligned(p.hidden, 16) && aligned(p.parts, 16);
}

}  // namespace

bool experts_shape(int tile, int ctas, int64_t d, int64_t inter) {
  const bool known = ctas == 1 ? tile == 16 || tile == 64 : ctas == 2 && (tile == 64 || tile == 96);
  return known && d > 0 && inter > 0 && d % (256 * ctas) == 0 && inter % (128 * ctas) == 0;
}

ExpertsSizes experts_sizes(int64_t tokens, int64_t slots, int64_t d, int64_t inter, int64_t experts, bool shared,
                           int tile) {
  const int64_t tiles = most_tiles(tokens, slots, experts, shared, tile);
  const int64_t step = kScaleBytes + int64_t{tile} * kStepColumns;
  return {tiles * (d / kStepColumns) * step, tiles * (inter / kStepColumns) * step, tokens * (slots + shared) * d * 4};
}

cudaError_t experts(const ExpertsParams& p, int tile, int ctas, int grid, cudaStream_t stream) {
  if (!fits(p, tile, ctas, grid)) return cudaErrorInvalidValue;
  if (p.tokens == 0) return cudaSuccess;
  if (ctas == 1) {
    return tile == 16 ? launch<ExpertConfig<16, 1, 6>>(p, grid, stream)
                      : launch<ExpertConfig<64, 1, 5>>(p, grid, stream);
  }
  return tile == 64 ? launch<ExpertConfig<64, 2, 5>>(p, grid, stream) : launch<ExpertConfig<96, 2, 5>>(p, grid, stream);
}

}  // namespace mega_moe::sm100
