// A step's window rows into the rings, on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace swa_replay::cuda {

struct RingStoreParams {
  const uint8_t* from;    // [rows, row_bytes]
  uint8_t* ring;          // [slots, ring_rows, row_bytes]
  const int32_t* slot;    // [batch]; requests with rows have distinct slots, one out of range stores nothing
  const int32_t* cu;      // [batch + 1]
  const int64_t* start;   // [batch]
  const int64_t* lowest;  // [batch]: positions below are not stored
  int64_t rows, row_bytes, batch, slots;
  int64_t ring_rows;  // up to 65536
};

cudaError_t ring_store(const RingStoreParams& params, cudaStream_t stream);

}  // namespace swa_replay::cuda
