// Sparse attention of up to 32 heads on SM90: what a rank of a tensor-parallel group or a small model has.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/attention_params.hpp"

namespace mla_fp4::cuda {

// cudaErrorInvalidValue where sizes or alignments do not fit (attention_plan.cuh, attention_fits); nothing runs then.
cudaError_t attention_narrow(const AttentionParams& params, cudaStream_t stream);

}  // namespace mla_fp4::cuda
