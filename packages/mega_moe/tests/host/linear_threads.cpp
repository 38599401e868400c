// The FP8 product's own code on host threads, all CTAs of a cluster as one block; the tensor unit is a loop.
#include "threads.hpp"

#include "cuda/sm90/linear_decode.cuh"
#include "cuda/sm90/linear_plan.cuh"

namespace mega_moe::cuda {

inline void product_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static uint32_t operands[8 * 256][6];
  const unsigned lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(operands[threadIdx.x], mine, sizeof(mine));
  __syncwarp();
  const auto value = [&](unsigned i, unsigned of, unsigned half) {
    return kernel_core::cuda::bf16_float(operands[threadIdx.x - lane + of][i] >> (16 * half) & 0xFFFF);
  };
  for (unsigned i = 0; i < 4; ++i) {
    double sum = d[i];
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned of = k % 8 / 2, upper = k / 8;
      sum += static_cast<double>(value(i / 2 + 2 * upper, g * 4 + of, k % 2)) *
             value(4 + upper, (2 * c + i % 2) * 4 + of, k % 2);
    }
    d[i] = static_cast<float>(sum);
  }
  __syncwarp();
}
inline size_t cta_bytes = 0;  // from a CTA's shared memory to the next one's
inline unsigned cta_threads = 0;
inline void linear_fetch(uint32_t to, const void* from) { kernel_core::ptx::cp_async_16(to, from); }
inline int linear_thread() { return static_cast<int>(threadIdx.x % cta_threads); }
inline void linear_cluster_arrive() {}
inline void linear_cluster_wait() { __syncthreads(); }
inline float linear_of_rank(uint32_t from, uint32_t rank) {
  float v;
  std::memcpy(&v, block->shared + rank * cta_bytes + from % cta_bytes, 4);
  return v;
}

}  // namespace mega_moe::cuda

#include "cuda/sm90/linear.cuh"

using namespace mega_moe::cuda;

template <typename Config>
int run(const LinearParams& a, LinearShape shape) {
  shape.tile = Config::tokens, shape.stages = Config::stages;
  if (!linear_fits(a, shape)) return 2;
  const int64_t bytes = linear_shared(a.tokens, a.columns, shape).bytes;
  if (bytes > kLinearMostShared) return 1;
  cta_bytes = static_cast<size_t>(bytes + 15) / 16 * 16;
  cta_threads = Config::threads;
  std::vector<uint4> memory(cta_bytes * static_cast<size_t>(shape.cluster) / 16);
  auto* shared = reinterpret_cast<uint8_t*>(memory.data());
  const int64_t blocks = (a.rows + Config::rows - 1) / Config::rows * a.groups;
  for (int64_t tile = 0; tile * Config::tokens < a.tokens; ++tile)
    for (int64_t b = 0; b < blocks; ++b) {
      std::memset(shared, 0xFF, cta_bytes * static_cast<size_t>(shape.cluster));
      run_block(shape.cluster * Config::threads, shared, 0, [&] {
        const int rank = static_cast<int>(threadIdx.x / cta_threads);
        linear_block<Config>(a, shape, b, tile, rank, shared + static_cast<size_t>(rank) * cta_bytes);
      });
    }
  return 0;
}

extern "C" int linear_host(int64_t tokens, int64_t groups, int64_t rows, int64_t columns, const float* x,
                           const uint8_t* weight, const uint8_t* scale, float* out, int terms, int cluster, int warps) {
  const LinearParams a = {tokens, groups, rows, columns, x, weight, scale, out};
  const LinearShape shape{terms, cluster, warps, 0};
  if (warps == 8) return run<LinearConfig<1, 8>>(a, shape);
  if (warps == 2) return run<LinearConfig<1, 2, 8>>(a, shape);
  if (tokens == 5) return run<LinearConfig<2, 4, 8>>(a, shape);  // a tile wider than it has to be
  return tokens <= 8 ? run<LinearConfig<1, 4, 8>>(a, shape) : run<LinearConfig<2, 4>>(a, shape);
}

extern "C" void linear_chosen(int64_t tokens, int64_t groups, int64_t rows, int64_t columns, int terms, int cluster,
                              int* out) {
  const LinearParams a = {tokens, groups, rows, columns, nullptr, nullptr, nullptr, nullptr};
  const LinearShape shape = linear_choose(a, terms, cluster, 132);
  out[0] = shape.warps, out[1] = shape.tile, out[2] = shape.stages, out[3] = linear_fits(a, shape);
}

extern "C" void split_host(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t t[3] = {};
    split_bf16(x[i], t);
    for (int j = 0; j < 3; ++j) out[i * 3 + j] = bf16_float(t[j]);
  }
}

extern "C" int slices_cover(int64_t columns, int cluster) {
  int64_t next = 0;
  for (int rank = 0; rank < cluster; ++rank) {
    const LinearSlice s = linear_slice(columns, cluster, rank);
    if (s.begin != next || s.end - s.begin > linear_most_chunks(columns, cluster)) return 0;
    next = s.end;
  }
  return next * 64 == columns;
}
