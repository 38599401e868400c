#include "cuda/stage.hpp"

namespace gdr_swapin::cuda {
namespace {

struct DeviceQueue {
  const StagePlan& plan;
  const StageQueue& to;

  int before(int64_t stream, int64_t part) const {
    return cudaStreamWaitEvent(to.streams[stream], to.emptied[part], 0);
  }

  int copy(int64_t stream, const uint64_t* targets, const uint64_t* sources, const uint64_t* sizes, int64_t n) const {
    const Pieces pieces = {targets, sources, sizes, n};
    int64_t queued = 0;
    if (to.batched) return copy_batch(pieces, n, to.any_order, to.prefer_overlap, to.streams[stream], &queued);
    return copy_each(pieces, to.streams[stream], &queued);
  }

  int rows(int64_t stream, uint64_t target, uint64_t to_pitch, uint64_t from, uint64_t from_pitch, uint64_t width,
           uint64_t n) const {
    return copy_rows(reinterpret_cast<void*>(target), to_pitch, reinterpret_cast<const void*>(from), from_pitch, width,
                     n, to.streams[stream]);
  }

  int after(int64_t stream, int64_t part) const {
    const cudaError_t status = cudaEventRecord(to.filled[part], to.streams[stream]);
    return status != cudaSuccess ? status : cudaStreamWaitEvent(to.join, to.filled[part], 0);
  }

  int deal(int64_t part, uint64_t at, int64_t start, int64_t n) const {
    MoveParams move = to.move;
    move.source = reinterpret_cast<const uint8_t*>(at);
    move.source_stride = static_cast<int64_t>(plan.size);
    move.slots = nullptr;
    move.blocks = to.move.blocks + start;
    move.count = n;
    const cudaError_t status =
        to.loads ? move_plain(move, to.ctas, to.loads, to.join) : move_bulk(move, to.ctas, to.stages, to.join);
    return status != cudaSuccess ? status : cudaEventRecord(to.emptied[part], to.join);
  }
};

}  // namespace

cudaError_t stage(const StagePlan& plan, const StageQueue& queue, int64_t* rounds) {
  *rounds = 0;
  if (!sound(plan) || !queue.streams || !queue.filled || !queue.emptied || !queue.move.blocks)
    return cudaErrorInvalidValue;
  DeviceQueue device = {plan, queue};
  return static_cast<cudaError_t>(run_stage(plan, device, rounds));
}

cudaError_t make_events(uint64_t* events, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    cudaEvent_t event = nullptr;
    const cudaError_t status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (status != cudaSuccess) {
      free_events(events, i);
      return status;
    }
    events[i] = reinterpret_cast<uint64_t>(event);
  }
  return cudaSuccess;
}

cudaError_t free_events(const uint64_t* events, int64_t count) {
  cudaError_t first = cudaSuccess;
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t status = cudaEventDestroy(reinterpret_cast<cudaEvent_t>(events[i]));
    if (first == cudaSuccess) first = status;
  }
  return first;
}

cudaError_t upload_ids(int32_t* pinned, int32_t* device, const int64_t* slots, const int64_t* blocks, int64_t count,
                       cudaStream_t stream) {
  if (count < 0 || !pinned || !device || !slots || !blocks) return cudaErrorInvalidValue;
  for (int64_t i = 0; i < count; ++i) {
    pinned[i] = static_cast<int32_t>(slots[i]);
    pinned[count + i] = static_cast<int32_t>(blocks[i]);
  }
  return cudaMemcpyAsync(device, pinned, static_cast<size_t>(count) * 2 * sizeof(int32_t), cudaMemcpyHostToDevice,
                         stream);
}

}  // namespace gdr_swapin::cuda
