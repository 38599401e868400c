// Launches window prefill (window_prefill.cuh).
#include "cuda/window_prefill.hpp"

#include "cuda/device.hpp"
#include "cuda/sm90/window_prefill.cuh"

namespace mla_fp4::cuda {
namespace {

using window::Config;

__global__ void __launch_bounds__(Config::kThreads, 1) window_prefill_kernel(const __grid_constant__ WindowParams a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  window::prefill_block(a, kernel_core::ptx::shared_address(memory));
#endif
}

}  // namespace

cudaError_t window_prefill(const WindowParams& a, cudaStream_t stream) {
  if (!window::window_fits(a)) return cudaErrorInvalidValue;
  if (a.rows == 0) return cudaSuccess;
  if (device_is_sm100()) return cudaErrorNotSupported;
  const int64_t blocks = window::run_items(a.rows, a.batch, a.run_rows) * (a.heads / Config::kHeads);
  const cudaError_t error =
      cudaFuncSetAttribute(window_prefill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kBytes);
  if (error != cudaSuccess) return error;
  window_prefill_kernel<<<static_cast<unsigned>(blocks), Config::kThreads, Config::kBytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace mla_fp4::cuda
