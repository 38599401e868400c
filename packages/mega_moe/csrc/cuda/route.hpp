// The router on the device: the best experts of each token, and the order of rows by expert.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mega_moe::cuda {

struct RouteParams {
  int64_t tokens;
  int64_t experts;          // 1 to 1024
  int64_t top_k;            // 1 to 32 and at most `experts`
  const float* logits;      // [tokens, experts]
  const float* bias;        // [experts]
  const float* bias_vl;     // [experts], or null
  const uint8_t* is_image;  // [tokens], with bias_vl
  float scale;
  int32_t* ids;    // [tokens, top_k]
  float* weights;  // [tokens, top_k]
};

// Rows by expert. Row t * top_k + s is slot s of token t; a slot with an id outside 0 to experts - 1 has no row. With
// `shared`, each token has one more row, tokens * top_k + t, of the expert number `experts`.
struct PermuteParams {
  int64_t tokens;
  int64_t experts;     // 1 to 1024
  int64_t top_k;       // 1 to 32
  const int32_t* ids;  // [tokens, top_k]
  bool shared;
  int32_t* offsets;  // [experts + shared + 1]; expert e has rows[offsets[e]] to rows[offsets[e + 1] - 1], ascending
  int32_t* rows;     // [tokens * (top_k + shared)]; what no expert has is -1
};

cudaError_t route(const RouteParams& params, cudaStream_t stream);

// Bytes of scratch memory for permute; 0 for tokens * top_k up to 2048.
int64_t permute_workspace(int64_t tokens, int64_t top_k, int64_t experts);

cudaError_t permute(const PermuteParams& params, void* workspace, cudaStream_t stream);

// Both in one launch, for tokens * top_k up to 2048. `ticket`: an int32 of device memory that is 0 and is left 0;
// launches that may run at the same time need one each. `permute.ids` is `route.ids`.
cudaError_t route_permute(const RouteParams& route, const PermuteParams& permute, int32_t* ticket, cudaStream_t stream);

}  // namespace mega_moe::cuda
