// Functions of the driver, looked up and not linked: the module has to load without a driver.
#pragma once

#include <cuda_runtime_api.h>

namespace gdr_swapin::cuda {

// The function as of a version of the interface, which later drivers keep; null where the driver has none.
template <typename Function>
Function driver_entry(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

}  // namespace gdr_swapin::cuda
