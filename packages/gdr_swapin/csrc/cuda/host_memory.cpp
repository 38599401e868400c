#include "cuda/host_memory.hpp"

namespace gdr_swapin::cuda {
namespace {

// A refused call leaves its error behind, and the next launch of anybody would report it.
cudaError_t forgotten(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

}  // namespace

cudaError_t register_host(void* at, uint64_t bytes) {
  return forgotten(cudaHostRegister(at, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
}

cudaError_t unregister_host(void* at) { return forgotten(cudaHostUnregister(at)); }

cudaError_t device_address(void* at, uint64_t* address) {
  void* found = nullptr;
  const cudaError_t status = forgotten(cudaHostGetDevicePointer(&found, at, 0));
  *address = reinterpret_cast<uint64_t>(found);
  return status;
}

}  // namespace gdr_swapin::cuda
