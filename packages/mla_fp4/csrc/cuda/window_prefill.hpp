// Window attention of many consecutive rows on SM90: sparse attention without selected keys, for 64 heads or a
// multiple.
//
// Its bits are its own: keys are summed in the order of their position modulo 144, not of their age. They depend on the
// row's position, keys and queries alone, so whoever calls it for a layer calls it for all rows of the layer, one row a
// request or many.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/window_params.hpp"

namespace mla_fp4::cuda {

// cudaErrorInvalidValue where sizes or alignments do not fit (window_plan.cuh, window_fits), cudaErrorNotSupported on
// SM100, which has no code for it and attends by attention_on_device; nothing runs then.
cudaError_t window_prefill(const WindowParams& params, cudaStream_t stream);

}  // namespace mla_fp4::cuda
