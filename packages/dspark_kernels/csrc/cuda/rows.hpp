// Ops on rows of logits on an NVIDIA GPU. Nothing here waits for the device or allocates.
#pragma once

#include <cuda_runtime_api.h>

#include "arguments.hpp"

namespace dspark_kernels::cuda {

// Bytes of scratch memory for `rows` rows, 16-byte aligned.
int64_t rows_workspace(int64_t rows, int64_t vocab);
// Whether the kernels take rows of `vocab` tokens.
bool rows_fit(int64_t vocab);

cudaError_t sample(const Sample& a, void* workspace, cudaStream_t stream);
cudaError_t draft_step(const DraftStep& a, void* workspace, cudaStream_t stream);
// Scratch memory for the larger of rows and requests. Many rows without filters (no top_p, no top_k) are decided as
// they are measured; others in separate launches. Results are equal to the bit.
cudaError_t verify(const Verify& a, void* workspace, cudaStream_t stream);
cudaError_t confidence_head(const ConfidenceHead& a, cudaStream_t stream);
cudaError_t token_mask(const TokenMask& a, cudaStream_t stream);

}  // namespace dspark_kernels::cuda
