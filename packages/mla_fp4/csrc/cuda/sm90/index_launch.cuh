// A kernel whose first steps do not need what the kernel before it in the stream writes: it may start while that one
// still runs, once all of its blocks have called allow_next(), and calls wait_for_previous() before it reads.
#pragma once

#include <cuda_runtime_api.h>

namespace mla_fp4::sm90 {

#if defined(__CUDACC__)

__device__ __forceinline__ void allow_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until the kernel before has ended and its stores are visible. Returns at once after an ordinary launch.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <typename... Parameters>
cudaError_t launch_early(bool early, void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t shared,
                         cudaStream_t stream, Parameters... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  if (cudaError_t e = cudaLaunchKernelEx(&config, kernel, arguments...)) return e;
  return cudaGetLastError();
}

#endif  // __CUDACC__

}  // namespace mla_fp4::sm90
