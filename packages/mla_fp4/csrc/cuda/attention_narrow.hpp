// Sparse attention by groups of 8, 16 or 32 heads on SM90: what a rank of a tensor-parallel group or a small model has,
// and rows of many heads where there are few of them.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/attention_params.hpp"

namespace mla_fp4::cuda {

// cudaErrorInvalidValue where sizes or alignments do not fit (attention_keys.cuh, attention_fits); nothing runs then.
// One CTA a multiprocessor takes groups in turn.
cudaError_t attention_narrow(const AttentionParams& params, int64_t heads_of_cta, int64_t multiprocessors,
                             cudaStream_t stream);

}  // namespace mla_fp4::cuda
