// The schedule of a step on an NVIDIA GPU, in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include "schedule.hpp"

namespace dspark_kernels::cuda {

// Up to 1024 requests of up to 8 drafts. `host` may be pinned CPU memory. Does not wait, and allocates nothing.
cudaError_t schedule(const Schedule& a, cudaStream_t stream);

}  // namespace dspark_kernels::cuda
