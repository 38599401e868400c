// Host memory that copy engines and kernels reach: registration of memory that somebody else allocated.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gdr_swapin::cuda {

// Pins `bytes` at `at` (page-aligned) for all devices and maps them.
cudaError_t register_host(void* at, uint64_t bytes);
cudaError_t unregister_host(void* at);
// The address by which the current device's kernels read pinned host memory; an error where it is not pinned.
cudaError_t device_address(void* at, uint64_t* address);

}  // namespace gdr_swapin::cuda
