// Launch of the kernels that move slices of cache blocks into the pools.
#include "cuda/sm90/move_bulk.cuh"

namespace gdr_swapin::cuda {
namespace {

constexpr int kPlainThreads = 512;
constexpr int kMostCtas = 1024;
constexpr int64_t kMostShared = 227 << 10;

__global__ void __launch_bounds__(32) move_bulk_kernel(const __grid_constant__ MoveParams p, int stages) {
  extern __shared__ __align__(128) uint8_t shared[];
  if (threadIdx.x == 0) move_ring(p, stages, blockIdx.x, gridDim.x, shared);
}

// Each thread has `Loads` loads of 16 bytes under way: with one, eight CTAs keep 64 KB in flight, too little for the
// link.
template <int Loads>
__global__ void __launch_bounds__(kPlainThreads) move_plain_kernel(const __grid_constant__ MoveParams p) {
  const int64_t items = item_count(p);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Piece piece = piece_at(p, item);
    const uint4* from = reinterpret_cast<const uint4*>(piece.from);
    uint4* index = reinterpret_cast<uint4*>(piece.index);
    uint4* main = reinterpret_cast<uint4*>(piece.main);
    const uint32_t split = piece.to_index / 16, all = (piece.to_index + piece.to_main) / 16;
    for (uint32_t start = threadIdx.x; start < all; start += kPlainThreads * Loads) {
      uint4 value[Loads];
#pragma unroll
      for (int j = 0; j < Loads; ++j)
        if (start + j * kPlainThreads < all) value[j] = from[start + j * kPlainThreads];
#pragma unroll
      for (int j = 0; j < Loads; ++j) {
        const uint32_t i = start + j * kPlainThreads;
        if (i < all) *(i < split ? index + i : main + (i - split)) = value[j];
      }
    }
  }
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// The checks of Python stand before these; here they keep a wrong number from becoming a wild address.
cudaError_t checked(const MoveParams& p, int ctas) {
  if (p.count < 0 || p.layers < 1 || p.layers > MoveParams::most_layers || ctas < 1 || ctas > kMostCtas)
    return cudaErrorInvalidValue;
  if (!p.source || !p.blocks || !aligned(p.source) || p.source_stride % 16 || p.piece < 16 || p.piece % 16)
    return cudaErrorInvalidValue;
  for (int l = 0; l < p.layers; ++l) {
    const SliceLayer& layer = p.layer[l];
    if (!layer.index || !layer.main || !aligned(layer.index) || !aligned(layer.main)) return cudaErrorInvalidValue;
    if (layer.offset < 0 || (layer.offset | layer.index_bytes | layer.main_bytes) % 16 || slice_bytes(layer) == 0)
      return cudaErrorInvalidValue;
    if (layer.offset + slice_bytes(layer) > p.source_stride) return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

}  // namespace

int64_t move_bulk_shared(uint32_t piece, int stages) { return kHeadBytes + static_cast<int64_t>(piece) * stages; }

cudaError_t move_bulk(const MoveParams& p, int ctas, int stages, cudaStream_t stream) {
  cudaError_t status = checked(p, ctas);
  if (status != cudaSuccess) return status;
  const int64_t bytes = move_bulk_shared(p.piece, stages);
  if (stages < kFewestStages || stages > kMostStages || bytes > kMostShared) return cudaErrorInvalidValue;
  if (p.count == 0) return cudaSuccess;
  status = cudaFuncSetAttribute(move_bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status != cudaSuccess) return status;
  move_bulk_kernel<<<ctas, 32, static_cast<size_t>(bytes), stream>>>(with_parts(p), stages);
  return cudaGetLastError();
}

cudaError_t move_plain(const MoveParams& p, int ctas, int loads, cudaStream_t stream) {
  const cudaError_t status = checked(p, ctas);
  if (status != cudaSuccess) return status;
  if (p.done) return cudaErrorInvalidValue;
  const auto kernel = loads == 1   ? move_plain_kernel<1>
                      : loads == 4 ? move_plain_kernel<4>
                      : loads == 8 ? move_plain_kernel<8>
                                   : nullptr;
  if (!kernel) return cudaErrorInvalidValue;
  if (p.count == 0) return cudaSuccess;
  kernel<<<ctas, kPlainThreads, 0, stream>>>(with_parts(p));
  return cudaGetLastError();
}

}  // namespace gdr_swapin::cuda
