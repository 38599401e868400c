// Sparse attention of 64 or 128 heads (or any multiple of 64) on SM90.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/attention_params.hpp"

namespace mla_fp4::cuda {

// cudaErrorInvalidValue where sizes or alignments do not fit (attention_keys.cuh, attention_fits); nothing runs then.
// One CTA a multiprocessor takes rows in turn.
cudaError_t attention_wide(const AttentionParams& params, int64_t multiprocessors, cudaStream_t stream);

}  // namespace mla_fp4::cuda
