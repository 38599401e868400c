// Launches of the selection: one thread block a row, or slices of a long row and then a selection among their best.
#include "../topk.hpp"

#include <algorithm>
#include <limits>

#include "index_launch.cuh"
#include "topk.cuh"

namespace mla_fp4::cuda {
namespace {

using sm90::Topk;
using sm90::TopkConfig;
using sm90::TopkRow;
using sm90::TopkShared;

using Short = TopkConfig<512, 4096, 512, 2>;            // short rows, or slices
using Long = TopkConfig<kTopkLargestK, 8192, 1024, 1>;  // long rows, and candidate blocks

constexpr int64_t kLongFrom = 24 << 10;  // entries of a row
constexpr int64_t kShortestSlice = 8192, kSliceUnit = 4096;
static_assert(kShortestSlice >= kTopkLargestK && Long::kLongestRow >= kTopkLargestWidth);
static_assert(Short::kLongestRow >= kLongFrom);

// The two halves of the workspace: the slices' best scores and their positions, `merged_stride` of each a row.
constexpr int64_t merged_stride(int64_t k, int64_t slices) { return (k * slices + 3) / 4 * 4; }

struct Best {
  float* scores;
  int32_t* positions;
  int64_t stride;
};

int64_t slice_length(int64_t width, int64_t slices) {
  const int64_t units = (width + kSliceUnit - 1) / kSliceUnit;
  return (units + slices - 1) / slices * kSliceUnit;
}

// The number of entries of a row. All threads, the same result.
template <typename C>
__device__ int64_t row_length(const TopkParams& p, int64_t row, TopkShared<C>& shared) {
  const int64_t visible = p.lengths[row];
  if (!p.blocks) return min(max(visible, int64_t{0}), p.width);
  if (threadIdx.x == 0) shared.kept = 0;
  __syncthreads();
  const int32_t* const ids = p.blocks + row * p.blocks_width;
  int mine = 0;
  for (int64_t i = threadIdx.x; i < p.blocks_width; i += C::kThreads) mine += ids[i] >= 0 && ids[i] * p.block < visible;
  if (mine) atomicAdd(&shared.kept, mine);
  __syncthreads();
  const int64_t count = shared.kept;
  __syncthreads();
  return min(topk_plan::candidate_length(count, count ? ids[count - 1] : 0, p.block, visible), p.width);
}

__device__ int32_t position_of(const TopkParams& p, int64_t row, int64_t entry) {
  if (!p.blocks) return static_cast<int32_t>(entry);
  return static_cast<int32_t>(p.blocks[row * p.blocks_width + entry / p.block] * p.block + entry % p.block);
}

template <typename C>
__device__ TopkShared<C>& shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return *reinterpret_cast<TopkShared<C>*>(memory);
}

// Rows that one thread block holds, or with `from` those whose slices have chosen.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) select_rows(TopkParams p, Best from, int64_t slice) {
  TopkShared<C>& shared = shared_memory<C>();
  sm90::wait_for_previous();
  const int64_t row = blockIdx.x;
  const int64_t whole = row_length(p, row, shared);
  const int64_t length = p.keep_last && whole > 0 ? whole - 1 : whole;
  const int k = static_cast<int>(p.keep_last ? p.k - 1 : p.k);
  const bool merging = from.scores != nullptr;
  const TopkRow source = {merging ? from.scores + row * from.stride : p.scores + row * p.stride,
                          static_cast<int>(merging ? topk_plan::merged_length(length, slice, k) : length)};
  const int count = Topk<C>(shared, k).run(source);
  int32_t* const out = p.out + row * p.k;
  for (int i = threadIdx.x; i < p.k; i += C::kThreads) {
    int32_t position = -1;
    if (i < count) {
      const int entry = shared.sorted[i];
      position = position_of(p, row, merging ? from.positions[row * from.stride + entry] : entry);
    } else if (i == count && length < whole) {
      position = position_of(p, row, length);
    }
    out[i] = position;
  }
}

// A piece of a row with the best of the pieces before it: they come first, so equal scores stay in the order of
// positions.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) select_piece(TopkParams p, float* scores) {
  TopkShared<C>& shared = shared_memory<C>();
  const int64_t row = blockIdx.x, visible = min(int64_t{p.lengths[row]}, p.width);
  if (p.piece_begin > 0 && visible <= p.piece_begin) return;
  const int k = static_cast<int>(p.k), before = p.piece_begin > 0 ? k : 0;
  float* const best = scores + row * p.stride;
  const TopkRow source = {best + k - before, before + static_cast<int>(max(visible - p.piece_begin, int64_t{0}))};
  const int count = Topk<C>(shared, k).run(source);
  constexpr int kOwn = (C::kMaxK + C::kThreads - 1) / C::kThreads;
  int32_t* const out = p.out + row * p.k;
  int32_t positions[kOwn];
  float values[kOwn];
  MLA_FP4_UNROLL
  for (int n = 0; n < kOwn; ++n) {  // all are read before one is written
    const int i = n * C::kThreads + static_cast<int>(threadIdx.x);
    positions[n] = -1, values[n] = 0;
    if (i >= count) continue;
    const int entry = shared.sorted[i];
    positions[n] = entry < before ? out[entry] : static_cast<int32_t>(p.piece_begin + entry - before);
    values[n] = source.scores[entry];
  }
  __syncthreads();
  MLA_FP4_UNROLL
  for (int n = 0; n < kOwn; ++n) {
    const int i = n * C::kThreads + static_cast<int>(threadIdx.x);
    if (i >= k) continue;
    out[i] = positions[n];
    best[i] = values[n];
  }
}

// The best of one slice of a row, in the order of their positions.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    select_slices(TopkParams p, Best to, int64_t slice, int slices) {
  TopkShared<C>& shared = shared_memory<C>();
  sm90::allow_next();
  const int64_t row = blockIdx.x / slices, part = blockIdx.x % slices;
  const int64_t whole = row_length(p, row, shared);
  const int64_t length = p.keep_last && whole > 0 ? whole - 1 : whole, begin = part * slice;
  if (begin >= length) return;
  const int k = static_cast<int>(p.keep_last ? p.k - 1 : p.k);
  const float* const scores = p.scores + row * p.stride + begin;
  const int count = Topk<C>(shared, k).run({scores, static_cast<int>(min(slice, length - begin))});
  for (int i = threadIdx.x; i < count; i += C::kThreads) {
    const int64_t at = row * to.stride + part * k + i;
    to.scores[at] = scores[shared.sorted[i]];
    to.positions[at] = static_cast<int32_t>(begin + shared.sorted[i]);
  }
}

template <typename C>
cudaError_t launch_slices(TopkParams const& p, Best best, int64_t slice, cudaStream_t stream) {
  constexpr int bytes = sizeof(TopkShared<C>);
  if (cudaError_t e = cudaFuncSetAttribute(select_slices<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  select_slices<C><<<static_cast<unsigned>(p.rows * p.slices), C::kThreads, bytes, stream>>>(
      p, best, slice, static_cast<int>(p.slices));
  return cudaGetLastError();
}

template <typename C>
cudaError_t launch_rows(TopkParams const& p, Best best, int64_t slice, cudaStream_t stream) {
  constexpr int bytes = sizeof(TopkShared<C>);
  if (cudaError_t e = cudaFuncSetAttribute(select_rows<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  return sm90::launch_early(p.slices > 1, select_rows<C>, static_cast<unsigned>(p.rows), C::kThreads, bytes, stream, p,
                            best, slice);
}

template <typename C>
cudaError_t launch_piece(TopkParams const& p, cudaStream_t stream) {
  constexpr int bytes = sizeof(TopkShared<C>);
  if (cudaError_t e = cudaFuncSetAttribute(select_piece<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  select_piece<C><<<static_cast<unsigned>(p.rows), C::kThreads, bytes, stream>>>(p, const_cast<float*>(p.scores));
  return cudaGetLastError();
}

// The result does not depend on the choice.
bool is_short(TopkParams const& p, int64_t length) { return p.k <= Short::kMaxK && length < kLongFrom; }

cudaError_t launch(TopkParams const& p, cudaStream_t stream) {
  if (p.piece_begin >= 0) {
    const auto piece = is_short(p, p.width - p.piece_begin + p.k) ? launch_piece<Short> : launch_piece<Long>;
    return piece(p, stream);
  }
  const int64_t slice = slice_length(p.width, p.slices);
  Best best = {nullptr, nullptr, merged_stride(p.k, p.slices)};
  if (p.slices > 1) {
    best.scores = static_cast<float*>(p.workspace);
    best.positions = reinterpret_cast<int32_t*>(best.scores + p.rows * best.stride);
    const auto slices = is_short(p, slice) ? launch_slices<Short> : launch_slices<Long>;
    if (cudaError_t e = slices(p, best, slice, stream)) return e;
  }
  const auto rows = is_short(p, p.slices > 1 ? best.stride : p.width) ? launch_rows<Short> : launch_rows<Long>;
  return rows(p, best, slice, stream);
}

bool valid(TopkParams const& p) {
  if (p.rows < 0 || p.width < 0 || p.width > kTopkLargestWidth || p.piece_begin > p.width || p.k < 1 ||
      p.k > kTopkLargestK)
    return false;
  if (p.slices < 1 || p.rows * p.slices > std::numeric_limits<int32_t>::max()) return false;
  if (p.rows == 0) return true;
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  const bool whole = p.piece_begin < 0;
  const int64_t held = whole ? p.width : p.width - p.piece_begin + p.k;  // entries of a row
  if (!p.scores || !p.lengths || !p.out || !aligned(p.scores) || p.stride % 4 || p.stride < held) return false;
  if (!whole && (p.k % 4 || p.blocks || p.keep_last || p.slices > 1 || held > kTopkLargestWidth)) return false;
  if (p.slices > 1 && (!p.workspace || !aligned(p.workspace))) return false;
  return !p.blocks || (p.block > 0 && p.blocks_width >= 0 && !p.keep_last);
}

}  // namespace

// For rows that leave at least half of the device idle; a slice is worth its second kernel from a few tiles on.
int64_t topk_slices(int64_t rows, int64_t width, int64_t k, int64_t multiprocessors) {
  if (rows <= 0 || k <= 0) return 1;
  const int64_t idle = multiprocessors / rows, most = width / std::max(kShortestSlice, 4 * k);
  return std::max<int64_t>(1, std::min({idle, most, int64_t{32}}));
}

int64_t topk_workspace(int64_t rows, int64_t k, int64_t slices) {
  return slices > 1 ? rows * merged_stride(k, slices) * static_cast<int64_t>(sizeof(float) + sizeof(int32_t)) : 0;
}

cudaError_t topk(TopkParams const& p, cudaStream_t stream) {
  if (!valid(p)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  return launch(p, stream);
}

}  // namespace mla_fp4::cuda
