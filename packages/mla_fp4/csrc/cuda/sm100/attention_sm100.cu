// Sparse attention on SM100: S = Q K^T, one softmax, O = P V with V = K (docs/model.md, Attention). Compiled, never
// run.
//
// A CTA takes a row, 64 heads and a run of 128-key chunks; in a pair, two CTAs take the same run for 128 heads and
// decode half of the keys each. The chunks, their order and the arithmetic of the merge are those of sm90: a chunk's
// sum is finished before it joins the running one, so the bits do not depend on who walks which chunks.
// docs/kernels/mla_fp4_sm100.md has the plans of memory and the schedule.
#include "cuda/sm100/attention_sm100.hpp"

#include "cuda/sm100/attention_kernel_sm100.cuh"
#include "cuda/sm100/attention_merge_sm100.cuh"
#include "cuda/sm100/tensor_map_sm100.hpp"

namespace mla_fp4::sm100 {
namespace {

template <typename C, bool kSplit>
cudaError_t launch(const AttentionParams& a, const CUtensorMap& pool, int64_t walk, float* workspace,
                   cudaStream_t stream) {
  const int64_t chunks = chunk_count(a.selected), groups = kSplit ? (chunks + walk - 1) / walk : 1;
  const int64_t blocks = a.rows * groups * ((a.heads + C::kHeads - 1) / C::kHeads);
  if (blocks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const auto kernel = attention_sm100_kernel<C, kSplit>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes)) {
    return e;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {C::kCtas, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = {static_cast<unsigned>(blocks), 1, 1};
  config.blockDim = {C::kThreads, 1, 1};
  config.dynamicSmemBytes = C::kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, a, pool, static_cast<int>(walk), workspace);
  return error == cudaSuccess ? cudaGetLastError() : error;
}

template <typename C>
cudaError_t run(const AttentionParams& a, const CUtensorMap& pool, int64_t splits, float* workspace,
                cudaStream_t stream) {
  if (!is_split(a.selected, splits)) return launch<C, false>(a, pool, chunk_count(a.selected), nullptr, stream);
  if (const cudaError_t e = launch<C, true>(a, pool, splits, workspace, stream)) return e;
  attention_merge_sm100_kernel<<<static_cast<unsigned>(a.rows * a.heads), 128, 0, stream>>>(a, workspace);
  return cudaGetLastError();
}

}  // namespace

int64_t attention_workspace_floats(int64_t rows, int64_t heads, int64_t selected, int64_t splits) {
  return workspace_floats(rows, heads, selected, splits);
}

cudaError_t attention_wide(const AttentionParams& a, int64_t splits, float* workspace, cudaStream_t stream,
                           bool pairs) {
  if (!chunks_fit(a)) return cudaErrorInvalidValue;
  if (is_split(a.selected, splits) && (workspace == nullptr || !aligned16(workspace))) return cudaErrorInvalidValue;
  if (a.rows == 0) return cudaSuccess;
  // Without a pool the map needs some row to point at, which nobody asks for.
  const int64_t pool_rows = a.pages ? a.blocks * a.rows_per_block : 0;
  CUtensorMap pool;
  const cudaError_t error =
      pool_rows > 0 ? rows_map(pool, a.pages, pool_rows, kMainRowBytes) : rows_map(pool, a.new_rows, 1, kMainRowBytes);
  if (error != cudaSuccess) return error;
  return pairs && a.heads % 128 == 0 ? run<AttentionConfig<true>>(a, pool, splits, workspace, stream)
                                     : run<AttentionConfig<false>>(a, pool, splits, workspace, stream);
}

}  // namespace mla_fp4::sm100
