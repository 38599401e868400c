#include "cuda/copies.hpp"

#include <cuda.h>

#include <algorithm>
#include <vector>

#include "cuda/driver_entry.hpp"

namespace gdr_swapin::cuda {
namespace {

// The 12.8 interface, which later drivers keep.
using BatchCopy = CUresult(CUDAAPI*)(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count,
                                     CUmemcpyAttributes* attributes, size_t* attribute_starts, size_t attribute_count,
                                     size_t* failed, CUstream stream);
using StridedBatchCopy = CUresult(CUDAAPI*)(size_t count, CUDA_MEMCPY3D_BATCH_OP* copies, size_t* failed,
                                            unsigned long long flags, CUstream stream);
constexpr unsigned kBatchVersion = 12080;

BatchCopy batch() {
  static const BatchCopy found = driver_entry<BatchCopy>("cuMemcpyBatchAsync", kBatchVersion);
  return found;
}

StridedBatchCopy strided_batch() {
  static const StridedBatchCopy found = driver_entry<StridedBatchCopy>("cuMemcpy3DBatchAsync", kBatchVersion);
  return found;
}

CUmemcpySrcAccessOrder access_order(bool any_order) {
  return any_order ? CU_MEMCPY_SRC_ACCESS_ORDER_ANY : CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
}

unsigned overlap_flag(bool prefer_overlap) {
  return prefer_overlap ? CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE : CU_MEMCPY_FLAG_DEFAULT;
}

CUmemcpy3DOperand strided_operand(uint64_t at, uint64_t pitch, uint64_t rows) {
  CUmemcpy3DOperand operand = {};
  operand.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
  operand.op.ptr.ptr = at;
  operand.op.ptr.rowLength = pitch;
  operand.op.ptr.layerHeight = rows;
  return operand;
}

cudaError_t as_runtime(CUresult status) {
  switch (status) {
    case CUDA_SUCCESS:
      return cudaSuccess;
    case CUDA_ERROR_INVALID_VALUE:
      return cudaErrorInvalidValue;
    case CUDA_ERROR_OUT_OF_MEMORY:
      return cudaErrorMemoryAllocation;
    case CUDA_ERROR_NOT_SUPPORTED:
      return cudaErrorNotSupported;
    default:
      return cudaErrorUnknown;
  }
}

}  // namespace

bool has_batch() { return batch() != nullptr; }

cudaError_t copy_batch(const Pieces& pieces, int64_t per_call, bool any_order, bool prefer_overlap, cudaStream_t stream,
                       int64_t* queued) {
  *queued = 0;
  if (!batch()) return cudaErrorNotSupported;
  if (pieces.count < 0 || per_call < 1) return cudaErrorInvalidValue;
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = access_order(any_order);
  attributes.flags = overlap_flag(prefer_overlap);
  // The call takes pointers to non-const; copies of its own keep the caller's arrays as they are.
  const size_t most = static_cast<size_t>(std::min(per_call, std::max<int64_t>(pieces.count, 1)));
  std::vector<CUdeviceptr> targets(most), sources(most);
  std::vector<size_t> sizes(most);
  for (int64_t at = 0; at < pieces.count; at += per_call) {
    const size_t count = static_cast<size_t>(std::min(per_call, pieces.count - at));
    std::copy_n(pieces.targets + at, count, targets.begin());
    std::copy_n(pieces.sources + at, count, sources.begin());
    std::copy_n(pieces.sizes + at, count, sizes.begin());
    size_t start = 0, failed = 0;
    const CUresult status = batch()(targets.data(), sources.data(), sizes.data(), count, &attributes, &start, 1,
                                    &failed, reinterpret_cast<CUstream>(stream));
    if (status != CUDA_SUCCESS) return as_runtime(status);
    *queued = at + static_cast<int64_t>(count);
  }
  return cudaSuccess;
}

cudaError_t copy_each(const Pieces& pieces, cudaStream_t stream, int64_t* queued) {
  *queued = 0;
  for (int64_t i = 0; i < pieces.count; ++i) {
    const cudaError_t status =
        cudaMemcpyAsync(reinterpret_cast<void*>(pieces.targets[i]), reinterpret_cast<const void*>(pieces.sources[i]),
                        pieces.sizes[i], cudaMemcpyDefault, stream);
    if (status != cudaSuccess) return status;
    *queued = i + 1;
  }
  return cudaSuccess;
}

cudaError_t copy_strided(const StridedPieces& pieces, int64_t per_call, bool any_order, bool prefer_overlap,
                         cudaStream_t stream, int64_t* queued) {
  *queued = 0;
  if (pieces.count < 0 || per_call < 1) return cudaErrorInvalidValue;
  std::vector<CUDA_MEMCPY3D_BATCH_OP> ops;
  for (int64_t at = 0; at < pieces.count;) {
    const int64_t end = std::min(at + per_call, pieces.count);
    if (strided_batch()) {
      ops.assign(static_cast<size_t>(end - at), {});
      for (int64_t i = at; i < end; ++i) {
        CUDA_MEMCPY3D_BATCH_OP& op = ops[static_cast<size_t>(i - at)];
        op.src = strided_operand(pieces.sources[i], pieces.source_pitches[i], pieces.rows[i]);
        op.dst = strided_operand(pieces.targets[i], pieces.target_pitches[i], pieces.rows[i]);
        op.extent = {pieces.widths[i], pieces.rows[i], 1};
        op.srcAccessOrder = access_order(any_order);
        op.flags = overlap_flag(prefer_overlap);
      }
      size_t failed = 0;
      const CUresult status = strided_batch()(ops.size(), ops.data(), &failed, 0, reinterpret_cast<CUstream>(stream));
      if (status != CUDA_SUCCESS) return as_runtime(status);
    } else {
      for (int64_t i = at; i < end; ++i) {
        const cudaError_t status = copy_rows(reinterpret_cast<void*>(pieces.targets[i]), pieces.target_pitches[i],
                                             reinterpret_cast<const void*>(pieces.sources[i]), pieces.source_pitches[i],
                                             pieces.widths[i], pieces.rows[i], stream);
        if (status != cudaSuccess) return status;
      }
    }
    *queued = at = end;
  }
  return cudaSuccess;
}

cudaError_t copy_rows(void* to, uint64_t to_pitch, const void* from, uint64_t from_pitch, uint64_t width, uint64_t rows,
                      cudaStream_t stream) {
  if (width == 0 || rows == 0) return cudaSuccess;
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, cudaMemcpyDefault, stream);
}

}  // namespace gdr_swapin::cuda
