#include "cuda/stream_wait.hpp"

#include <cuda.h>

#include "cuda/driver_entry.hpp"

namespace gdr_swapin::cuda {
namespace {

using WaitValue = CUresult(CUDAAPI*)(CUstream stream, CUdeviceptr counter, cuuint32_t value, unsigned flags);

WaitValue found_wait_value() {
  static const WaitValue found = driver_entry<WaitValue>("cuStreamWaitValue32", 12000);
  return found;
}

}  // namespace

bool has_wait_value() { return found_wait_value() != nullptr; }

cudaError_t wait_value(uint32_t* counter, uint32_t value, cudaStream_t stream) {
  if (!found_wait_value()) return cudaErrorNotSupported;
  if (!counter) return cudaErrorInvalidValue;
  const CUresult status = found_wait_value()(reinterpret_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(counter),
                                             value, CU_STREAM_WAIT_VALUE_GEQ);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

}  // namespace gdr_swapin::cuda
