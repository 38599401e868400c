// Finished rows to their slots: one warp a row, in the widest units that sizes and addresses allow.
#include "cuda/kv_rows.hpp"
#include "kernel_core/cuda/ragged.cuh"
#include "kernel_core/cuda/warp.cuh"

namespace mla_fp4::cuda {
namespace {

using namespace kernel_core::cuda;

constexpr int kWarps = 4;

template <typename Unit>
__global__ void __launch_bounds__(kWarps * 32) store_rows_kernel(StoreRowsParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int64_t slot = p.slots[row];
  if (slot < 0 || slot >= p.capacity) return;
  const uint8_t* from = p.from + row * (p.code_bytes + p.scale_bytes);
  const RowPlace place = row_place(slot, p.code_bytes, p.scale_bytes, p.rows_per_block);
  warp_copy<Unit>(p.out + place.codes, from, p.code_bytes, lane);
  warp_copy<Unit>(p.out + place.scales, from + p.code_bytes, p.scale_bytes, lane);
}

}  // namespace

cudaError_t store_rows(const StoreRowsParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.code_bytes < 0 || p.scale_bytes < 0 || p.rows_per_block < 0 || p.capacity < 0)
    return cudaErrorInvalidValue;
  if (p.capacity > kMaxSlots || p.rows_per_block > kMaxSlots) return cudaErrorInvalidValue;
  if (p.rows_per_block && p.capacity % p.rows_per_block) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.code_bytes + p.scale_bytes == 0) return cudaSuccess;
  if (!p.from || !p.slots || !p.out) return cudaErrorInvalidValue;
  const int64_t blocks = (p.rows + kWarps - 1) / kWarps;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto bits = reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.out) |
                    static_cast<uint64_t>(p.code_bytes) | static_cast<uint64_t>(p.scale_bytes);
  return with_copy_unit(copy_unit(bits), [&](auto unit) {
    store_rows_kernel<decltype(unit)><<<static_cast<unsigned>(blocks), kWarps * 32, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace mla_fp4::cuda
