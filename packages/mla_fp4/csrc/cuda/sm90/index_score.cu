// Launches of index scores: queries into their form, then keys by tiles of queries. The choice between the kernels for
// few and many queries of a request, and of the keys of a thread block, changes no bit of a score.
#include "../index_score.hpp"

#include <bit>
#include <limits>

#include "index_score.cuh"

namespace mla_fp4::cuda {
namespace {

using sm90::IndexConfig;
using sm90::IndexLaunch;
using sm90::IndexShared;
using sm90::PackedQueries;

static_assert(kIndexDim == index_plan::kDim);

template <typename C, bool kCandidates>
cudaError_t launch_scores(IndexScoreParams const& p, PackedQueries const& queries, cudaStream_t stream) {
  constexpr int bytes = sizeof(IndexShared<C>);
  static_assert(bytes <= 113 << 10, "two thread blocks share a multiprocessor");
  int device = 0, multiprocessors = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
  if (cudaError_t e =
          cudaFuncSetAttribute(sm90::score_keys<C, kCandidates>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  IndexLaunch l;
  l.tile_rows = kCandidates ? 1 : C::kQueries;
  l.tiles_of_request = (p.longest_request + l.tile_rows - 1) / l.tile_rows;
  l.keys = index_plan::keys_of_block(p.batch * l.tiles_of_request, p.width, multiprocessors);
  l.chunks = (p.width + l.keys - 1) / l.keys;
  l.page_bytes = static_cast<int>(p.rows_per_block * (index_plan::kCodeBytes + index_plan::kGroups));
  l.page_shift = std::countr_zero(static_cast<uint64_t>(p.rows_per_block));
  l.candidate_shift = kCandidates ? std::countr_zero(static_cast<uint64_t>(p.candidate_block)) : 0;
  const int64_t grid = p.batch * l.tiles_of_request * l.chunks;
  if (grid > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  sm90::score_keys<C, kCandidates><<<static_cast<unsigned>(grid), C::kThreads, bytes, stream>>>(p, l, queries);
  return cudaGetLastError();
}

template <int kHeads, typename Few, typename Many>
cudaError_t launch(IndexScoreParams const& p, cudaStream_t stream) {
  const PackedQueries queries = PackedQueries::in(p.workspace, p.rows, kHeads);
  sm90::pack_queries<kHeads><<<static_cast<unsigned>(p.rows), sm90::kPackThreads, 0, stream>>>(p, queries);
  if (cudaError_t e = cudaGetLastError()) return e;
  if (p.candidates) return launch_scores<Few, true>(p, queries, stream);
  return p.longest_request <= Few::kQueries ? launch_scores<Few, false>(p, queries, stream)
                                            : launch_scores<Many, false>(p, queries, stream);
}

bool power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

bool valid(IndexScoreParams const& p) {
  if (p.rows < 0 || p.rows > std::numeric_limits<int32_t>::max() || p.batch < 0 || p.width < 0 || p.width > 1 << 30)
    return false;
  if (p.heads < 1 || p.heads > kIndexLargestHeads || p.longest_request < 0 || p.table_width < 0) return false;
  if (!power_of_two(p.rows_per_block) || p.rows_per_block < 16 || p.rows_per_block > 1 << 16 || p.blocks < 0)
    return false;
  if (p.rows == 0 || p.batch == 0 || p.width == 0) return true;
  const auto aligned = [](const void* at, uintptr_t to) { return at && reinterpret_cast<uintptr_t>(at) % to == 0; };
  if (!aligned(p.q, 16) || !p.weights || !aligned(p.pages, 16) || !p.block_table || !p.cu_seqlens || !p.visible)
    return false;
  if (!aligned(p.workspace, 16) || (!p.scores && !p.maxima) || (p.scores && p.stride < p.width)) return false;
  if (p.maxima && (p.candidates || p.maxima_stride < (p.width + kIndexMaximaBlock - 1) / kIndexMaximaBlock))
    return false;
  return !p.candidates || (power_of_two(p.candidate_block) && p.candidates_width > 0 &&
                           p.width <= p.candidates_width * p.candidate_block);
}

}  // namespace

int64_t index_score_workspace(int64_t rows, int64_t heads) {
  return rows * PackedQueries::row_bytes(index_plan::padded_heads(static_cast<int>(heads)));
}

cudaError_t index_score(IndexScoreParams const& p, cudaStream_t stream) {
  if (!valid(p)) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.batch == 0 || p.width == 0 || p.longest_request == 0) return cudaSuccess;
  switch (index_plan::padded_heads(static_cast<int>(p.heads))) {
    case 8:
      return launch<8, IndexConfig<8, 8, 6>, IndexConfig<8, 32, 5>>(p, stream);
    case 32:
      return launch<32, IndexConfig<32, 8, 6>, IndexConfig<32, 16, 4>>(p, stream);
    default:
      return launch<64, IndexConfig<64, 4, 6>, IndexConfig<64, 8, 4>>(p, stream);
  }
}

}  // namespace mla_fp4::cuda
