// Staging on a device: one call queues every copy, event and kernel of a span of many blocks.
#pragma once

#include "cuda/copies.hpp"
#include "cuda/move_slices.hpp"
#include "cuda/stage_plan.hpp"

namespace gdr_swapin::cuda {

// Where a plan's work goes. Arrays of `plan.streams` streams and of `plan.parts` events.
struct StageQueue {
  const cudaStream_t* streams;
  cudaStream_t join;           // the kernels' stream
  const cudaEvent_t* filled;   // recorded behind a part's copies
  const cudaEvent_t* emptied;  // recorded behind the kernel that dealt it
  bool batched, any_order, prefer_overlap;
  MoveParams move;  // source, blocks and count are set for each round; `blocks` stands for block 0 of the plan
  int ctas, loads;  // loads 0: asynchronous bulk copies through `stages` pieces
  int stages;
};

// Waits for nothing. On failure `*rounds` tells the rounds begun, of which the last is queued in part.
cudaError_t stage(const StagePlan& plan, const StageQueue& queue, int64_t* rounds);

// Events that order streams and take no time; `events` gets their handles, all or none.
cudaError_t make_events(uint64_t* events, int64_t count);
cudaError_t free_events(const uint64_t* events, int64_t count);

// Ids as int32 into pinned memory of 2 * `count`, slots first, and on to the device on `stream`.
cudaError_t upload_ids(int32_t* pinned, int32_t* device, const int64_t* slots, const int64_t* blocks, int64_t count,
                       cudaStream_t stream);

}  // namespace gdr_swapin::cuda
