// Sparse attention on SM100. Compiled, never run. A CTA has 64 heads; fewer leave a part of its products unused.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/attention_params.hpp"

namespace mla_fp4::sm100 {

// cudaErrorInvalidValue where sizes or alignments do not fit (attention_chunks_sm100.cuh, chunks_fit); nothing runs
// then. `splits`: chunks of 128 keys that one CTA walks, 0 for all; where they are fewer than a row has, every chunk's
// partial result goes to `workspace` (16-byte aligned) and a second kernel merges them. `pairs`: two CTAs share the
// keys of 128 heads, where the heads allow it. The bits of `out` do not depend on `splits`.
cudaError_t attention_wide(const cuda::AttentionParams& params, int64_t splits, float* workspace, cudaStream_t stream,
                           bool pairs = true);
int64_t attention_workspace_floats(int64_t rows, int64_t heads, int64_t selected, int64_t splits);

}  // namespace mla_fp4::sm100
