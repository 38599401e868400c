// Window rows into their rings: one warp a row. A request's rows that stay are at most as many as the ring's, so no
// two warps write one place.
#include "cuda/ring_store.hpp"

#include "kernel_core/cuda/ragged.cuh"
#include "kernel_core/cuda/warp.cuh"

namespace swa_replay::cuda {
namespace {

using namespace kernel_core::cuda;

constexpr int kWarps = 4;

template <typename Unit>
__global__ void __launch_bounds__(kWarps * 32) ring_store_kernel(RingStoreParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const BatchRow at = locate_row(p.cu, p.start, p.batch, row);
  if (at.request >= p.batch || at.position < 0) return;
  const int64_t slot = p.slot[at.request];
  if (slot < 0 || slot >= p.slots || !ring_keeps(at.position, at.end, p.ring_rows, p.lowest[at.request])) return;
  warp_copy<Unit>(p.ring + ring_row(slot, at.position, p.ring_rows) * p.row_bytes, p.from + row * p.row_bytes,
                  p.row_bytes, threadIdx.x % 32);
}

}  // namespace

cudaError_t ring_store(const RingStoreParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.row_bytes <= 0 || p.batch < 0 || p.slots < 0 || p.ring_rows <= 0) return cudaErrorInvalidValue;
  if (p.ring_rows > kMaxRing) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.batch == 0) return cudaSuccess;
  if (!p.from || !p.ring || !p.slot || !p.cu || !p.start || !p.lowest) return cudaErrorInvalidValue;
  const int64_t blocks = (p.rows + kWarps - 1) / kWarps;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto bits =
      reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.ring) | static_cast<uint64_t>(p.row_bytes);
  return with_copy_unit(copy_unit(bits), [&](auto unit) {
    ring_store_kernel<decltype(unit)><<<static_cast<unsigned>(blocks), kWarps * 32, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace swa_replay::cuda
