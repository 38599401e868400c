// Launches of the expert kernels.
#include "expert_kernel.cuh"

namespace mega_moe::sm90 {
namespace {

// Cooperative: CTAs wait for each other, so all or none are started. Grids of several ranks wait for each other too,
// and the device may not run two cooperative grids at once.
struct Grid {
  int ctas;
  bool cooperative;
  cudaStream_t stream;
};

template <int kColumns, int kBlocks, int kSteps, int kStages, bool kFp8 = false, int kSplit = 1, int kPerSm = 1,
          int kGroup = ExpertConfig<kColumns, kBlocks, kSteps, kStages, kFp8, kSplit, kPerSm>::kGroup>
cudaError_t launch(const ExpertsParams& p, const Grid& grid) {
  using C = ExpertConfig<kColumns, kBlocks, kSteps, kStages, kFp8, kSplit, kPerSm, kGroup>;
  constexpr size_t kBytes = sizeof(ExpertShared<C>);
  static_assert((kBytes + 1024) * kPerSm <= 233472, "more shared memory than a CTA can have");
  const auto kernel = experts_kernel<C>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) return e;
  if constexpr (C::kPerSm > 1)  // else an SM may keep too little of it for the second CTA
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100)) return e;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.ctas)), config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kBytes, config.stream = grid.stream;
  config.attrs = &attribute, config.numAttrs = grid.cooperative ? 1 : 0;
  if (cudaError_t e = cudaLaunchKernelEx(&config, kernel, p)) return e;
  return cudaGetLastError();
}

bool aligned(const void* p, uint64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

bool fits(const ExpertsParams& p, int ctas) {
  const bool sizes = p.tokens >= 0 && p.slots > 0 && p.experts > 0 && p.experts <= kMostExperts && p.d > 0 &&
                     p.inter > 0 && p.d % 256 == 0 && p.inter % 256 == 0 && ctas > 0 && p.limit > 0;
  const bool own = p.tokens == 0 || (p.ids && p.weights && p.x && p.out);
  const bool given = own && p.offsets && p.rows && p.w13 && p.w2 && p.images && p.hidden && p.parts && p.state &&
                     (p.shared13 == nullptr) == (p.shared2 == nullptr) &&
                     (p.scale13 == nullptr) == (p.scale2 == nullptr) && !(p.scale13 && p.shared13);
  bool ranks = p.ranks.world <= kMostRanks && p.ranks.rank >= 0 && p.ranks.rank < p.ranks.world && p.ranks.rows > 0;
  for (int i = 0; ranks && i < p.ranks.world; ++i)
    ranks = p.ranks.world == 1 ? p.ranks.parts[i] != nullptr : p.ranks.flags[i] != nullptr;
  // A rank without tokens may have no x, gains and parts: nobody asks for them.
  return sizes && given && ranks && (p.shared_format == 0 || p.shared_format == 1) &&
         static_cast<int64_t>(p.tokens) * (p.slots + 1) * (p.d / 1024 + 1) < (int64_t{1} << 31) - 1 &&
         aligned(p.x, 16) && aligned(p.out, 16) && aligned(p.w13, 16) && aligned(p.w2, 16) && aligned(p.shared13, 16) &&
         aligned(p.shared2, 16) && aligned(p.images, 128) && aligned(p.hidden, 128) && aligned(p.parts, 16);
}

// One rank's tables are its own arguments.
ExpertsParams with_ranks(ExpertsParams p) {
  if (p.ranks.world > 1) return p;
  p.ranks = {.world = 1,
             .rank = 0,
             .rows = INT32_MAX,
             .met = false,
             .x = {p.x},
             .weights = {p.weights},
             .parts = {p.parts},
             .flags = {}};
  return p;
}

}  // namespace

ExpertsSizes experts_sizes(int64_t tokens, int64_t slots, int64_t d, int64_t inter, int64_t experts, bool shared,
                           int columns) {
  const int64_t rows = most_image_rows(tokens, slots, experts, shared, columns);
  return {rows * d * 2, rows * inter * 2, tokens * (slots + 1) * d * 4,
          (kTileDone + most_tiles(tokens, slots, experts, shared, 8)) * 4};
}

// Variants: 0 what the token tile is made for, 1 items of one block, 2 of two blocks, 3 as 2 with products asked for
// piece by piece, 4 two blocks with two warpgroups each, 5 one block and two CTAs on an SM (`ctas` twice as many);
// kPlain more: not a cooperative launch. 4 is there for tiles of 8 and 16, 5 for 8: with more columns their products
// find no registers.
constexpr int kPlain = 16;

cudaError_t experts(const ExpertsParams& given, int columns, int variant, int ctas, cudaStream_t stream) {
  const ExpertsParams p = with_ranks(given);
  if (!fits(p, ctas)) return cudaErrorInvalidValue;
  if (p.tokens == 0 && p.ranks.world == 1) return cudaSuccess;
  const Grid grid = {ctas, p.ranks.world == 1 && variant < kPlain, stream};
  variant %= kPlain;
  if (p.scale13 != nullptr) return columns == 128 ? launch<128, 2, 1, 6, true>(p, grid) : cudaErrorInvalidValue;
  const bool wide = variant == 2 || (variant == 0 && columns >= 64);
  if (variant == 4) {
    if (columns == 8) return launch<8, 2, 2, 5, false, 2>(p, grid);
    if (columns == 16) return launch<16, 2, 2, 4, false, 2>(p, grid);
  }
  if (variant == 5 && columns == 8) return launch<8, 1, 2, 4, false, 1, 2>(p, grid);
  if (variant > 3) return cudaErrorInvalidValue;
  switch (columns + (variant == 3 ? 1 : 0)) {
    case 8:
      return wide ? launch<8, 2, 2, 5>(p, grid) : launch<8, 1, 2, 10>(p, grid);
    case 9:
      return launch<8, 2, 2, 5, false, 1, 1, 1>(p, grid);
    case 16:
      return wide ? launch<16, 2, 2, 5>(p, grid) : launch<16, 1, 2, 8>(p, grid);
    case 32:
      return wide ? launch<32, 2, 2, 4>(p, grid) : launch<32, 1, 2, 6>(p, grid);
    case 64:
      return wide ? launch<64, 2, 1, 6>(p, grid) : launch<64, 1, 2, 4>(p, grid);
    case 128:
      return launch<128, 2, 1, 4>(p, grid);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace mega_moe::sm90
