// A stream that waits for a counter in device memory: so one kernel can tell of its parts one after the other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gdr_swapin::cuda {

// Whether the driver has cuStreamWaitValue32. Asked once.
bool has_wait_value();

// What follows on the stream waits until `counter` has come to `value` or passed it, counted modulo 2^32. Whatever
// raises the counter has to be queued before, or the stream may wait for ever.
cudaError_t wait_value(uint32_t* counter, uint32_t value, cudaStream_t stream);

}  // namespace gdr_swapin::cuda
