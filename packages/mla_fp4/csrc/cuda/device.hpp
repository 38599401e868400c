// Which of the compiled architectures the current device runs, for launchers that have code for both.
#pragma once

#include <cuda_runtime_api.h>

namespace mla_fp4::cuda {

// Compute capability 10.x. A failing query counts as no: the launch that follows reports the error.
inline bool device_is_sm100() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 10;
}

}  // namespace mla_fp4::cuda
