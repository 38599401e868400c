// Device memory that other processes of the host can open.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace ep_comm::cuda {

// Zeros, all of which have arrived when this returns. Of the current device.
cudaError_t allocate(int64_t bytes, void** base);
cudaError_t release(void* base);

// What a peer process needs to open it, and its mapping here. Closed by `close_peer`.
cudaError_t export_memory(void* base, std::string* handle);
cudaError_t open_peer(const std::string& handle, void** base);
cudaError_t close_peer(void* base);

// Eight bytes to device memory, by a stream that waits for no other: peers' kernels may be waiting for them.
cudaError_t store_word(uint64_t* to, uint64_t value);

}  // namespace ep_comm::cuda
