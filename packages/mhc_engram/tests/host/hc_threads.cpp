// The hyper-connection kernel's own code on host threads, all CTAs of a cluster as one block; the tensor unit is a loop
// that drops the bits that TF32 drops. The engram functions that need no threads stand here too.
#include "threads.hpp"

#include "cuda/sm90/engram_math.cuh"
#include "cuda/sm90/hc_plan.cuh"
#include "kernel_core/cuda/formats.cuh"

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

namespace kernel_core::cuda {

inline constexpr unsigned kAllLanes = ~0u;
template <int N>
void load_values(const float* p, float (&out)[N]) {
  if (reinterpret_cast<uintptr_t>(p) % 16) __trap();
  std::memcpy(out, p, sizeof(out));
}
template <int N>
void store_values(float* p, const float (&x)[N]) {
  if (reinterpret_cast<uintptr_t>(p) % 16) __trap();
  std::memcpy(p, x, sizeof(x));
}
inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x = x + __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
template <int Lanes>
uint32_t lanes_max(uint32_t x) {
  for (int step = Lanes / 2; step > 0; step /= 2) x = std::max(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

}  // namespace kernel_core::cuda

namespace kernel_core::ptx {
template <int Registers>
void registers_grow() {}
template <int Registers>
void registers_shrink() {}
}  // namespace kernel_core::ptx

namespace mhc_engram::cuda {

inline void product_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  static uint32_t operands[16 * 384][6];
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(operands[threadIdx.x], mine, sizeof(mine));
  __syncwarp();
  const auto value = [&](unsigned i, unsigned of) {
    return kernel_core::cuda::bits_float(operands[threadIdx.x - lane + of][i] & 0xFFFFE000u);
  };
  for (unsigned i = 0; i < 4; ++i) {
    double sum = d[i];
    for (unsigned k = 0; k < 8; ++k) {
      const float a = value(i / 2 + k / 4 * 2, g * 4 + k % 4);
      const float b = value(4 + k / 4, (2 * c + i % 2) * 4 + k % 4);
      sum += static_cast<double>(a) * b;
    }
    d[i] = static_cast<float>(sum);
  }
  __syncwarp();
}
inline size_t cta_bytes = 0;  // from a CTA's shared memory to the next one's
inline int cta_threads = 0;
inline int cta_thread() { return static_cast<int>(threadIdx.x) % cta_threads; }
inline int cta_thread_again() { return cta_thread(); }
inline void cp_async_16_of_line(uint32_t to, const float* from, bool valid) {
  if (valid) kernel_core::ptx::cp_async_16(to, from);
}
inline void prefetch_line(const float* p) { static_cast<void>(*static_cast<const volatile float*>(p)); }
inline void cluster_arrive() {}
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() { __syncthreads(); }
inline float load_of_rank(const float* p, uint32_t rank) {
  const size_t offset = static_cast<size_t>(reinterpret_cast<const uint8_t*>(p) - block->shared) % cta_bytes;
  float v;
  std::memcpy(&v, block->shared + rank * cta_bytes + offset, 4);
  return v;
}

}  // namespace mhc_engram::cuda

#include "cuda/sm90/hc_stay.cuh"

using namespace mhc_engram::cuda;

template <typename Parts>
void run_parts(const HcParams& p, const HcShape& shape) {
  const HcShared at = hc_shared(hc_plan(p.channels, shape.cluster), shape, Parts::coefficients, Parts::mix);
  cta_bytes = static_cast<size_t>(at.floats * 4 + 15) / 16 * 16;
  cta_threads = Parts::threads;
  std::vector<float4> memory(cta_bytes * static_cast<size_t>(shape.cluster) / 16);
  auto* shared = reinterpret_cast<uint8_t*>(memory.data());
  for (int64_t i = 0; i * shape.tile < p.tokens; ++i) {
    std::memset(shared, 0xFF, cta_bytes * static_cast<size_t>(shape.cluster));  // NaN
    run_block(shape.cluster * Parts::threads, shared, 0, [&] {
      const uint32_t rank = threadIdx.x / Parts::threads;
      hc_block<Parts>(p, shape, i % 2 == 0, i, rank, reinterpret_cast<float*>(shared + rank * cta_bytes));
    });
  }
}

template <bool Update, bool Coefficients, bool Mix>
int run(const HcParams& p, const HcShape& shape) {
  if (!hc_fits(p.channels, shape)) return 1;
  const bool small = hc_halves(shape.tile) == 1;
  if (p.channels == 256 && !small) {  // a width that the kernel knows
    run_parts<HcParts<Update, Coefficients, Mix, 2, 4, 256>>(p, {shape.cluster, shape.tile, 4});
    return 0;
  }
  if (shape.warps == 4)
    small ? run_parts<HcParts<Update, Coefficients, Mix, 1, 4>>(p, shape)
          : run_parts<HcParts<Update, Coefficients, Mix, 2, 4>>(p, shape);
  else
    small ? run_parts<HcParts<Update, Coefficients, Mix, 1, 8>>(p, shape)
          : run_parts<HcParts<Update, Coefficients, Mix, 2, 8>>(p, shape);
  return 0;
}

template <typename Parts>
void run_stay(const HcParams& p, const HcShape& shape, int clusters) {
  constexpr HcStayCut cut = Parts::cut;
  cta_bytes = static_cast<size_t>(hc_stay_shared(hc_plan(p.channels, shape.cluster), shape, cut).floats) * 4;
  cta_threads = Parts::threads;
  const size_t bytes = cta_bytes * static_cast<size_t>(shape.cluster);
  std::vector<float4> memory(bytes / 16);
  auto* shared = reinterpret_cast<uint8_t*>(memory.data());
  for (int own = 0; own < clusters && own * shape.tile < p.tokens; ++own) {
    std::memset(shared, 0xFF, bytes);  // NaN
    run_block(shape.cluster * Parts::threads, shared, 0, [&] {
      const uint32_t rank = threadIdx.x / Parts::threads;
      hc_stay_block<Parts>(p, shape, own, clusters, rank, reinterpret_cast<float*>(shared + rank * cta_bytes));
    });
  }
}

int stay(const HcParams& p, const HcShape& shape, bool update, int clusters) {
  const HcStayCut cut = hc_stay_cut(shape);
  if (!update)
    run_stay<HcStay<false, 1, 1, 2, false>>(p, shape, clusters);
  else if (cut.kept)
    run_stay<HcStay<true, 1, 2, 1, true>>(p, shape, clusters);
  else if (cut.groups == 1)
    run_stay<HcStay<true, 1, 1, 2, false>>(p, shape, clusters);
  else if (cut.groups == 2)
    run_stay<HcStay<true, 2, 1, 2, false>>(p, shape, clusters);
  else
    run_stay<HcStay<true, 3, 1, 1, false>>(p, shape, clusters);
  return 0;
}

// clusters: that stay, each with its tiles in turn; 0 for one tile and no more.
extern "C" int hc_threads(int64_t tokens, int64_t channels, int parts, int cluster, int tile, int warps, int stays,
                          int clusters, float* streams, const float* y, const float* post, const float* comb,
                          const float* fn, const float* base, const float* scale, float* pre_out, float* post_out,
                          float* comb_out, const float* pre_mix, const float* norm_weight, float* mixed, uint8_t* codes,
                          uint8_t* code_scales) {
  const HcParams p = {tokens, channels, streams,     y,        post,     comb,    fn,
                      base,   scale,    pre_out,     post_out, comb_out, pre_mix, norm_weight,
                      mixed,  codes,    code_scales, 1e-20f,   1e-6f,    1e-20f,  20};
  if (stays) return stay(p, {cluster, tile, 8, stays}, parts == 7, clusters);
  switch (parts) {
    case 1:
      return run<true, false, false>(p, {cluster, tile, warps});
    case 2:
      return run<false, true, false>(p, {cluster, tile, warps});
    case 4:
      return run<false, false, true>(p, {cluster, tile, warps});
    case 6:
      return run<false, true, true>(p, {cluster, tile, warps});
    default:
      return run<true, true, true>(p, {cluster, tile, warps});
  }
}

// Whether the units of all CTAs of a cluster cover every chunk once, each at a place of its own in the CTA.
extern "C" int hc_covers(int64_t channels, int cluster) {
  const HcPlan plan = hc_plan(channels, cluster);
  std::vector<int> seen(static_cast<size_t>(plan.chunks));
  for (int rank = 0; rank < cluster; ++rank) {
    std::vector<int> place(static_cast<size_t>(plan.width / HcConfig::chunk));
    for (int u = 0; u < plan.units_a_cta; ++u)
      for (int64_t k = rank * plan.units_a_cta + u; k < plan.chunks; k += HcConfig::units) {
        const int64_t local = hc_local(plan, static_cast<int>(k));
        if (hc_chunk(plan, rank, local) != k || place.at(static_cast<size_t>(local))++) return 0;
        ++seen.at(static_cast<size_t>(k));
      }
  }
  return std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; });
}

extern "C" void hc_chosen(int64_t tokens, int64_t channels, int64_t multiprocessors, int* out) {
  const HcShape shape = hc_choose(tokens, channels, hc_room(multiprocessors));
  out[0] = shape.cluster, out[1] = shape.tile, out[2] = hc_fits(channels, shape) ? shape.warps : 0, out[3] = shape.stay;
}

extern "C" void engram_rows_host(int64_t tokens, int64_t requests, int64_t orders, int64_t heads, const int64_t* mapped,
                                 const uint8_t* dead, const int64_t* history, const int32_t* cu, const int64_t* mult,
                                 const int64_t* primes, const int64_t* offsets, int64_t pad, int64_t* rows) {
  const EngramRowsParams a = {tokens, requests, orders, heads,   mapped, dead, history,
                              cu,     mult,     primes, offsets, pad,    rows};
  for (int64_t i = 0; i < tokens * orders * heads; ++i)
    rows[i] = engram_row(a, i / (orders * heads), i % (orders * heads));
}

extern "C" float engram_gate_host(float sum, float xs, float ks, int64_t channels, float eps) {
  return engram_gate(sum, xs, ks, channels, eps);
}
