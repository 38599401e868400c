// Launch of the confidence head.
#include <climits>

#include "cuda/rows.hpp"
#include "cuda/sm90/confidence.cuh"

namespace dspark_kernels::cuda {
namespace {

__global__ void __launch_bounds__(32 * kMostHeads) confidence_kernel(ConfidenceHead a, bool vectors) {
  __shared__ float shared[kMostHeads];
  confidence_request(a, blockIdx.x, vectors, shared);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

cudaError_t confidence_head(const ConfidenceHead& a, cudaStream_t stream) {
  if (a.requests < 0 || a.requests > INT_MAX || a.drafts < 1 || a.drafts > kMostHeads) return cudaErrorInvalidValue;
  if (a.hidden_size < 1 || a.markov_size < 0) return cudaErrorInvalidValue;
  if (a.requests == 0) return cudaSuccess;
  if (!a.hidden || !a.weight || !a.logits || !a.confidence || !a.survival) return cudaErrorInvalidValue;
  const bool fours = (a.hidden_size | a.markov_size | a.hidden_request | a.hidden_draft) % 4 == 0;
  const bool vectors = fours && aligned(a.hidden) && aligned(a.markov) && aligned(a.weight);
  confidence_kernel<<<static_cast<unsigned>(a.requests), static_cast<unsigned>(32 * a.drafts), 0, stream>>>(a, vectors);
  return cudaGetLastError();
}

}  // namespace dspark_kernels::cuda
