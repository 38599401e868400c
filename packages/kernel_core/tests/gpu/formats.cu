// The device's decoders over arrays, compiled by the test that calls them.
#include "kernel_core/cuda/formats.cuh"

using namespace kernel_core::cuda;

namespace {

constexpr int kBlock = 256;

__device__ int64_t index() { return static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; }

__global__ void e2m1(const uint32_t* words, const uint8_t* scales, int ue8m0, uint32_t* out, int64_t n) {
  const int64_t i = index();
  if (i < n) e2m1x8_scaled(words[i], ue8m0 ? ue8m0_bf16x2(scales[i]) : e4m3_bf16x2(scales[i]), out + 4 * i);
}

__global__ void e4m3(const uint32_t* words, const uint8_t* scales, int folded, uint32_t* out, int64_t n) {
  const int64_t i = index();
  if (i >= n) return;
  if (folded)
    e4m3x4_folded(words[i], mxfp8_factor(scales[i]), out + 2 * i);
  else
    e4m3x4_scaled(words[i], mxfp8_scale(scales[i]), out + 2 * i);
}

__global__ void expand(const uint32_t* words, uint32_t* out, int64_t n) {
  const int64_t i = index();
  if (i < n) e2m1x8_e4m3(words[i], out + 2 * i);
}

unsigned blocks(int64_t n) { return static_cast<unsigned>((n + kBlock - 1) / kBlock); }

int finish() {
  const cudaError_t launched = cudaGetLastError();
  return static_cast<int>(launched == cudaSuccess ? cudaDeviceSynchronize() : launched);
}

}  // namespace

extern "C" {

int decode_e2m1x8(const uint32_t* words, const uint8_t* scales, int ue8m0, uint32_t* out, int64_t n) {
  e2m1<<<blocks(n), kBlock>>>(words, scales, ue8m0, out, n);
  return finish();
}

int decode_e4m3x4(const uint32_t* words, const uint8_t* scales, int folded, uint32_t* out, int64_t n) {
  e4m3<<<blocks(n), kBlock>>>(words, scales, folded, out, n);
  return finish();
}

int e2m1_to_e4m3(const uint32_t* words, uint32_t* out, int64_t n) {
  expand<<<blocks(n), kBlock>>>(words, out, n);
  return finish();
}
}
