// One launch of a collective, for one rank or for several ranks of one GPU at once.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/region.hpp"

namespace ep_comm::cuda {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostHere = 16;  // ranks in one launch

// What ended a wait, in pinned memory of the host. `state` is written last.
enum class Failure : int32_t { none = 0, timeout = 1, mismatch = 2, ended = 3 };
struct Report {
  int32_t state;  // Failure
  int32_t kind;   // of the collective that this rank was in
  uint64_t epoch;
  uint64_t missing;  // ranks that had not come; of a mismatch, those that are elsewhere
  uint64_t seen;     // of a mismatch a flag, of `ended` the word
};

enum class Op : int32_t { push = 0, announce = 1, collect = 2, combine = 3, barrier = 4 };

// Everything but `peers`' content is the rank's own. Values are checked by the caller; all pointers are multiples of
// 16 bytes. An id outside the group's experts is an empty slot.
struct RankArgs {
  Shape shape;
  Region region;
  int32_t rank;
  uint8_t* const* peers;  // on the device: regions of all ranks, the own one too
  Report* report;
  uint64_t limit;  // of a wait, nanoseconds

  int64_t tokens;  // of this rank in dispatch, and again in combine
  const void* x;   // dispatch
  bool x_narrow;   // bfloat16 rather than float32
  const int32_t* ids;
  const float* weights;
  int32_t* counts;       // [ranks]: a dispatch writes it, collect and combine read it
  int32_t* host_counts;  // the same in pinned memory, or null

  uint8_t* rows_x;  // packed: of collect. Fixed: in the region, unused here
  float* rows_scales;
  int32_t* rows_ids;  // collect writes these, combine reads them in both forms
  float* rows_weights;
  int32_t* rows_sources;

  const void* y;
  bool y_narrow;
  bool fixed;
  Form form;
  float* out;
};

// `ctas` a rank. All of them, and those of the peers that share the GPU, have to be resident together: they wait for
// each other. cudaErrorInvalidValue for sizes that do not fit.
cudaError_t launch(Op op, const RankArgs* ranks, int here, int ctas, cudaStream_t stream);

// Loads the kernels now: a first launch loads its code, which waits for kernels that may be waiting for it.
cudaError_t load_kernels();

}  // namespace ep_comm::cuda
