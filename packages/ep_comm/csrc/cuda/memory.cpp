#include "cuda/memory.hpp"

#include <cstring>

namespace ep_comm::cuda {
namespace {

// A stream for `f`, which is waited for.
template <typename F>
cudaError_t on_own_stream(F&& f) {
  cudaStream_t stream = nullptr;
  cudaError_t status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (status != cudaSuccess) return status;
  status = f(stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  const cudaError_t destroyed = cudaStreamDestroy(stream);
  return status == cudaSuccess ? destroyed : status;
}

}  // namespace

cudaError_t allocate(int64_t bytes, void** base) {
  const cudaError_t status = cudaMalloc(base, static_cast<size_t>(bytes));
  if (status != cudaSuccess) return status;
  return on_own_stream([&](cudaStream_t s) { return cudaMemsetAsync(*base, 0, static_cast<size_t>(bytes), s); });
}

cudaError_t release(void* base) { return cudaFree(base); }

cudaError_t export_memory(void* base, std::string* handle) {
  cudaIpcMemHandle_t raw;
  const cudaError_t status = cudaIpcGetMemHandle(&raw, base);
  if (status == cudaSuccess) handle->assign(reinterpret_cast<const char*>(&raw), sizeof raw);
  return status;
}

cudaError_t open_peer(const std::string& handle, void** base) {
  cudaIpcMemHandle_t raw;
  if (handle.size() != sizeof raw) return cudaErrorInvalidValue;
  std::memcpy(&raw, handle.data(), sizeof raw);
  return cudaIpcOpenMemHandle(base, raw, cudaIpcMemLazyEnablePeerAccess);
}

cudaError_t close_peer(void* base) { return cudaIpcCloseMemHandle(base); }

cudaError_t store_word(uint64_t* to, uint64_t value) {
  return on_own_stream(
      [&](cudaStream_t s) { return cudaMemcpyAsync(to, &value, sizeof value, cudaMemcpyHostToDevice, s); });
}

}  // namespace ep_comm::cuda
