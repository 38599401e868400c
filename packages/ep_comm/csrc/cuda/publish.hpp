// One launch that lays a rank's tokens out for kernels of all ranks: rows stay at home, where peers read them, and each
// rank learns which slots of them are its own.
#pragma once

#include "cuda/collectives.hpp"

namespace ep_comm::cuda {

// Where copies of each logical expert are, by the rule that a rank's own copy goes first, and else token t of rank r
// takes copy (r + t) mod counts. Without `counts` ids are physical already.
struct Copies {
  int32_t logical;        // experts
  const int32_t* own;     // [logical], the copy on this rank or -1
  const int32_t* counts;  // [logical]
  const int32_t* copies;  // [logical, ranks], physical numbers
};

struct PublishArgs {
  RankArgs rank;          // its tokens, x, ids, weights; the rest says who the peers are
  uint16_t* rows;         // the own [max_tokens, hidden], bfloat16
  float* weights;         // the own [max_tokens, top_k]
  int32_t* const* slots;  // on the device: of every rank, [ranks, max_tokens, top_k]: its own numbers of experts, or -1
  int32_t* physical;      // [tokens, top_k]
  const uint8_t* padding;  // [tokens], 1 for rows that go nowhere; or null
  Copies copies;
  int32_t* routed;    // [logical], adds how often each was wanted, without padding; or null
  int64_t* received;  // slots that came to this rank; or null
};

cudaError_t launch_publish(const PublishArgs& args, int ctas, cudaStream_t stream);
cudaError_t load_publish();

}  // namespace ep_comm::cuda
