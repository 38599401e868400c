// Index scores on SM100. Compiled, never run.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/index_score.hpp"

namespace mla_fp4::sm100 {

// As mla_fp4::cuda::index_score, by block-scaled products. Its workspace needs index_score_workspace bytes of this
// namespace.
int64_t index_score_workspace(int64_t rows, int64_t heads);
cudaError_t index_score(cuda::IndexScoreParams const& p, cudaStream_t stream);

}  // namespace mla_fp4::sm100
