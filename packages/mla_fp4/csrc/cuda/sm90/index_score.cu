// Launches of index scores: queries into their form, then keys by tiles of queries. The choice between the kernels for
// few and many queries of a request, and of the keys of a thread block, changes no bit of a score.
#include "../index_score.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "index_decode.cuh"

namespace mla_fp4::cuda {
namespace {

using sm90::DecodeConfig;
using sm90::DecodeShared;
using sm90::IndexConfig;
using sm90::IndexLaunch;
using sm90::IndexShared;
using sm90::KeySource;
using sm90::PackedQueries;

static_assert(kIndexDim == index_plan::kDim);

using ScoreKernel = void (*)(IndexScoreParams, IndexLaunch, PackedQueries);

// `bytes`(rows of a tile at most): of shared memory.
template <typename C, typename Bytes>
cudaError_t launch_kernel(ScoreKernel kernel, Bytes bytes, IndexScoreParams const& p, PackedQueries const& queries,
                          cudaStream_t stream) {
  constexpr bool candidates = C::kKeys == KeySource::candidates;
  int device = 0, multiprocessors = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
  IndexLaunch l;
  l.tile_rows = candidates ? 1 : C::kQueries;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes(l.tile_rows))))
    return e;
  const int64_t longest = std::min(p.longest_request, std::min(p.end_row, p.rows) - p.first_row);
  l.tiles_of_request = (longest + l.tile_rows - 1) / l.tile_rows;
  const int64_t tiles = p.batch * l.tiles_of_request, positions = p.width - p.first_position;
  l.keys = index_plan::keys_of_block(tiles, positions, multiprocessors * C::kBlocks, C::kStep);
  l.chunks = (positions + l.keys - 1) / l.keys;
  l.page_bytes = static_cast<int>(p.rows_per_block * (index_plan::kCodeBytes + index_plan::kGroups));
  l.page_shift = std::countr_zero(static_cast<uint64_t>(p.rows_per_block));
  l.candidate_shift = candidates ? std::countr_zero(static_cast<uint64_t>(p.candidate_block)) : 0;
  const int64_t grid = tiles * l.chunks;
  if (grid > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  return sm90::launch_early(!p.packed, kernel, static_cast<unsigned>(grid), C::kThreads,
                            static_cast<size_t>(bytes(std::min<int64_t>(longest, l.tile_rows))), stream, p, l, queries);
}

template <typename C>
cudaError_t launch_scores(IndexScoreParams const& p, PackedQueries const& queries, cudaStream_t stream) {
  static_assert(sizeof(IndexShared<C>) <= 227 << 10);
  return launch_kernel<C>(sm90::score_keys<C>, IndexShared<C>::bytes, p, queries, stream);
}

template <typename C>
cudaError_t launch_decode(IndexScoreParams const& p, PackedQueries const& queries, cudaStream_t stream) {
  static_assert((sizeof(DecodeShared<C>) + 1024) * C::kBlocks <= 228 << 10);
  static_assert(index_plan::kLargestChunk % C::kStep == 0);
  return launch_kernel<C>(sm90::score_decode<C>, [](int64_t) { return sizeof(DecodeShared<C>); }, p, queries, stream);
}

// kFew, kMany: queries of a tile for up to kFew rows of a request, and for more.
template <int kHeads, int kFew, int kMany, int kBlocks>
cudaError_t launch(IndexScoreParams const& p, cudaStream_t stream) {
  const PackedQueries queries = PackedQueries::in(p.workspace, p.rows, kHeads);
  if (!p.packed) {
    sm90::pack_queries<kHeads><<<static_cast<unsigned>(p.rows), sm90::kPackThreads, 0, stream>>>(p, queries);
    if (cudaError_t e = cudaGetLastError()) return e;
  }
  if (p.candidates)
    return launch_scores<IndexConfig<kHeads, 1, 1, 2, kBlocks - 1, KeySource::candidates>>(p, queries, stream);
  if (p.rows_per_block < sm90::kTile)
    return launch_scores<IndexConfig<kHeads, kFew, 1, 2, kBlocks - 1, KeySource::copied>>(p, queries, stream);
  // One row a request at 32 heads: five stages, two warpgroups, two blocks a multiprocessor, products of one tile while
  // the next is expanded, a warp for copies. Measured: 110 us for 64 x 65,536 keys; 113 to 124 without overlap, without
  // the copying warp or with other numbers of blocks; 133 for the general kernel. The bits are the same.
  if constexpr (kHeads == 32) {
    if (p.longest_request == 1 && p.variant == 0)
      return launch_decode<DecodeConfig<kHeads, 5, 2, 2, true, true>>(p, queries, stream);
  }
  if (p.longest_request == 1)
    return launch_scores<IndexConfig<kHeads, 1, 1, 3, kBlocks - 1, KeySource::bulk>>(p, queries, stream);
  if (p.longest_request <= kFew)
    return launch_scores<IndexConfig<kHeads, kFew, 1, 2, kBlocks - 1, KeySource::bulk>>(p, queries, stream);
  return launch_scores<IndexConfig<kHeads, kMany, 128 / kHeads, 2, 2, KeySource::bulk>>(p, queries, stream);
}

bool power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

bool valid(IndexScoreParams const& p) {
  if (p.rows < 0 || p.rows > std::numeric_limits<int32_t>::max() || p.batch < 0 || p.width < 0 || p.width > 1 << 30)
    return false;
  if (p.heads < 1 || p.heads > kIndexLargestHeads || p.longest_request < 0 || p.table_width < 0) return false;
  if (!power_of_two(p.rows_per_block) || p.rows_per_block < 16 || p.rows_per_block > 1 << 16 || p.blocks < 0)
    return false;
  if (p.first_row < 0 || p.first_position < 0 || p.first_position % sm90::kStageKeys ||
      (p.candidates && p.first_position))
    return false;
  if (p.rows == 0 || p.batch == 0 || p.width == 0) return true;
  const auto aligned = [](const void* at, uintptr_t to) { return at && reinterpret_cast<uintptr_t>(at) % to == 0; };
  if (!aligned(p.q, 16) || !p.weights || !aligned(p.pages, 16) || !p.block_table || !p.cu_seqlens || !p.visible)
    return false;
  if (!aligned(p.workspace, 16) || (!p.scores && !p.maxima) || (p.scores && p.stride < p.width - p.first_position))
    return false;
  if (p.maxima &&
      (p.candidates || p.maxima_stride < (p.width - p.first_position + kIndexMaximaBlock - 1) / kIndexMaximaBlock))
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
  if (p.rows == 0 || p.batch == 0 || p.width <= p.first_position || p.longest_request == 0) return cudaSuccess;
  if (std::min(p.end_row, p.rows) <= p.first_row) return cudaSuccess;
  switch (index_plan::padded_heads(static_cast<int>(p.heads))) {
    case 8:
      return launch<8, 8, 32, 4>(p, stream);
    case 32:
      return launch<32, 8, 16, 4>(p, stream);
    default:
      return launch<64, 4, 8, 3>(p, stream);
  }
}

}  // namespace mla_fp4::cuda
