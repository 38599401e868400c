// Launches of index scores on SM100: queries into their form, then keys by tiles of queries. How many queries a tile
// has and how many keys a thread block changes no bit of a score.
#include "cuda/sm100/index_score_sm100.hpp"

#include <algorithm>
#include <bit>

#include "cuda/index_checks.hpp"
#include "cuda/sm100/index_score_sm100.cuh"

namespace mla_fp4::sm100 {
namespace {

template <int kHeads, bool kCandidates>
cudaError_t launch_scores(IndexScoreParams const& p, ScaledQueries const& queries, cudaStream_t stream) {
  constexpr int64_t kGroupRows = IndexPlan::kColumns / kHeads;
  const auto kernel = score_keys_sm100<kHeads, kCandidates>;
  int device = 0, multiprocessors = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, IndexPlan::kBytes)) {
    return e;
  }
  const int64_t longest = std::min(p.longest_request, std::min(p.end_row, p.rows) - p.first_row);
  const int64_t groups = std::min<int64_t>((longest + kGroupRows - 1) / kGroupRows, IndexPlan::kMaxGroups);
  const int64_t positions = p.width - p.first_position;
  IndexLaunch l;
  l.tile_rows = kCandidates ? 1 : static_cast<int>(groups * kGroupRows);
  l.tiles_of_request = (longest + l.tile_rows - 1) / l.tile_rows;
  l.keys = keys_of_thread_block(p.batch * l.tiles_of_request, positions, multiprocessors);
  l.chunks = (positions + l.keys - 1) / l.keys;
  l.page_bytes = static_cast<int>(p.rows_per_block * (IndexPlan::kCodeBytes + IndexPlan::kScales));
  l.page_shift = std::countr_zero(static_cast<uint64_t>(p.rows_per_block));
  l.candidate_shift = kCandidates ? std::countr_zero(static_cast<uint64_t>(p.candidate_block)) : 0;
  const int64_t grid = p.batch * l.tiles_of_request * l.chunks;
  if (grid > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  kernel<<<static_cast<unsigned>(grid), IndexPlan::kThreads, IndexPlan::kBytes, stream>>>(p, l, queries);
  return cudaGetLastError();
}

template <int kHeads>
cudaError_t launch(IndexScoreParams const& p, cudaStream_t stream) {
  const ScaledQueries queries = ScaledQueries::in(p.workspace, p.rows, kHeads);
  if (!p.packed) {
    scale_queries_sm100<kHeads><<<static_cast<unsigned>(p.rows), kQueryThreads, 0, stream>>>(p, queries);
    if (cudaError_t e = cudaGetLastError()) return e;
  }
  return p.candidates ? launch_scores<kHeads, true>(p, queries, stream)
                      : launch_scores<kHeads, false>(p, queries, stream);
}

}  // namespace

int64_t index_score_workspace(int64_t rows, int64_t heads) {
  return rows * ScaledQueries::row_bytes(padded_heads(static_cast<int>(heads)));
}

cudaError_t index_score(IndexScoreParams const& p, cudaStream_t stream) {
  if (!cuda::index_score_fits(p)) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.batch == 0 || p.width <= p.first_position || p.longest_request == 0) return cudaSuccess;
  if (std::min(p.end_row, p.rows) <= p.first_row) return cudaSuccess;
  switch (padded_heads(static_cast<int>(p.heads))) {
    case 8:
      return launch<8>(p, stream);
    case 32:
      return launch<32>(p, stream);
    default:
      return launch<64>(p, stream);
  }
}

}  // namespace mla_fp4::sm100
