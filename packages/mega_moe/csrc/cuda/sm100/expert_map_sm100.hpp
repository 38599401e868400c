// Tensor maps of expert weights. The driver's encoder is asked for at run time: the module links no libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mega_moe::sm100 {

// Rows of `columns` E2M1 codes, two in a byte, or of E4M3 values; a copy takes 128 rows of 128 columns, with the
// 128-byte swizzle, and puts 16 codes into 16 bytes. `base` 32-byte aligned, `columns` a multiple of 128.
inline cudaError_t weights_map(CUtensorMap& map, const void* base, int64_t rows, int64_t columns, bool codes) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (const cudaError_t error =
          cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12080, cudaEnableDefault, &found)) {
    return error;
  }
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(codes ? columns / 2 : columns)};
  const cuuint32_t box[2] = {128, 128}, steps[2] = {1, 1};
  const CUresult result = reinterpret_cast<Encode>(entry)(
      &map, codes ? CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B : CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(base),
      sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace mega_moe::sm100
