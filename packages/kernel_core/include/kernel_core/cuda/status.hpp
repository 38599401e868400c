// Launch results for Python: a wrong argument, or a kernel that has no code for the device, is a ValueError, anything
// else a RuntimeError with CUDA's words.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace kernel_core::cuda {

inline void check(cudaError_t status, const char* op) {
  if (status == cudaSuccess) return;
  const std::string what = std::string(op) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorInvalidValue) throw std::invalid_argument(what + " (a size, alignment or null pointer)");
  if (status == cudaErrorNotSupported) throw std::invalid_argument(what + " (no code for this kind of GPU)");
  throw std::runtime_error(what);
}

inline cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace kernel_core::cuda
