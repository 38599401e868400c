// The code of the experts for many tokens under emulated schedules, a launch after the other.
#include "device_threads.hpp"

struct alignas(8) float2 {
  float x, y;
};

namespace kernel_core::ptx {

inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  return emulation::arrival_barrier(emulation::me->cta, barrier).phase != parity;
}
inline float load_shared_f32(uint32_t from) { return emulation::load<float>(from); }
inline void fence_proxy_async() {}
inline void prefetch_l2(const void* from, uint32_t bytes) {
  // a sum over all that would be read, so that a checker of memory sees it
  volatile uint8_t sum = 0;
  for (uint32_t i = 0; i < bytes; ++i) sum = sum + static_cast<const uint8_t*>(from)[i];
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) emulation::fail("a prefetch's alignment");
}

}  // namespace kernel_core::ptx

#include "cuda/sm90/expert_prefill_ptx.cuh"

namespace mega_moe::sm90 {

inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
inline uint4 load_early_16(const uint8_t* from) { return *reinterpret_cast<const uint4*>(from); }
inline uint32_t load_early_4(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }
inline uint2 load_early_8(const uint8_t* from) { return *reinterpret_cast<const uint2*>(from); }
inline void store_shared_4(uint32_t to, uint32_t v) { std::memcpy(emulation::at(to, 4, 4), &v, 4); }
inline void wait_for_earlier_launch() {}
inline void let_later_launch() {}
inline void fence_proxy_async_all() {}

inline const std::vector<float>& e4m3_values() {
  static const std::vector<float> values = [] {
    std::vector<float> v(256);
    for (uint32_t i = 0; i < 256; ++i) v[i] = kernel_core::cuda::e4m3_float(i);
    return v;
  }();
  return values;
}

// 32 bytes of a row of a tile, as numbers.
template <bool kFp8>
void load_operand(uint64_t tile, uint32_t row, float* out) {
  const uint32_t start = static_cast<uint32_t>(tile & 0x3FFF) << 4, stride = static_cast<uint32_t>(tile >> 32 & 0x3FFF)
                                                                             << 4;
  for (uint32_t byte = 0; byte < 32; byte += kFp8 ? 1 : 2) {
    const uint8_t* const at = emulation::me->cta->shared +
                              kernel_core::wgmma::swizzle128_offset(start + row / 8 * stride + row % 8 * 128 + byte);
    *out++ = kFp8 ? e4m3_values()[*at] : kernel_core::cuda::bf16_float(at[0] | at[1] << 8);
  }
}

// Products of one step are one group: four of them.
template <bool kFp8, int kCount>
void product_shared(float (&d)[kCount], uint64_t a_tile, uint64_t b_tile, int accumulate) {
  namespace wgmma = kernel_core::wgmma;
  constexpr int kDepth = kFp8 ? 32 : 16;
  const int thread = static_cast<int>(emulation::me->number % 128);
  float* const to = d;
  const auto product = [=] {
    float rows[2][kDepth], column[kDepth];
    for (uint32_t r = 0; r < 2; ++r)
      load_operand<kFp8>(a_tile, static_cast<uint32_t>(wgmma::accumulator_row(thread)) + 8 * r, rows[r]);
    for (uint32_t n = 0; n < kCount / 2; ++n) {
      load_operand<kFp8>(b_tile, n / 2 * 8 + static_cast<uint32_t>(wgmma::accumulator_column(thread)) + n % 2, column);
      for (uint32_t r = 0; r < 2; ++r) {
        float& sum = to[n / 2 * 4 + r * 2 + n % 2];
        double total = accumulate ? sum : 0.0f;
        for (int k = 0; k < kDepth; ++k) total += static_cast<double>(rows[r][k]) * column[k];
        sum = static_cast<float>(total);
      }
    }
  };
  emulation::running->late_products ? emulation::me->products.push_back(product) : product();
}
inline void product_e4m3_shared(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  product_shared<true>(d, a, b, accumulate);
}
inline void product_bf16_shared(float (&d)[128], uint64_t a, uint64_t b) { product_shared<false>(d, a, b, 1); }
inline void wait_for_earlier_products() { kernel_core::wgmma::wait<1>(); }

}  // namespace mega_moe::sm90

#include "cuda/sm90/expert_prefill_kernel.cuh"

namespace {

using namespace mega_moe::sm90;

template <typename C>
std::string products(const PrefillParams& p, unsigned ctas, uint64_t seed, double seconds) {
  const size_t bytes = sizeof(PrefillShared<C>);
  std::string error =
      emulation::launch(ctas, C::kThreads, bytes, seed, seconds, [&] { prefill_product_kernel<C, true>(p); });
  if (!error.empty()) return "first: " + error;
  error = emulation::launch(ctas, C::kThreads, bytes, seed, seconds, [&] { prefill_product_kernel<C, false>(p); });
  return error.empty() ? error : "second: " + error;
}

std::string run(const PrefillParams& p, int64_t tile, unsigned ctas, uint64_t seed, double seconds) {
  const bool fp8 = p.scale13 != nullptr;
  std::string error;
  if (p.expanded13 != nullptr) {
    const int64_t steps13 = int64_t{p.experts} * (2 * p.inter / kBlockRows) * (p.d / kFp8Group);
    const int64_t steps2 = int64_t{p.experts} * (p.d / kBlockRows) * (p.inter / kFp8Group);
    error =
        emulation::launch(ctas, 128, 0, seed, seconds, [&] { prefill_expand_kernel(p.w13, p.expanded13, steps13); });
    error += emulation::launch(ctas, 128, 0, seed, seconds, [&] { prefill_expand_kernel(p.w2, p.expanded2, steps2); });
  }
  error += emulation::launch(ctas, kRowThreads, sizeof(PrefillPlan), seed, seconds,
                             [&] { fp8 ? prefill_rows_kernel<true>(p) : prefill_rows_kernel<false>(p); });
  if (!error.empty()) return "rows: " + error;
  const auto of_kind = [&]<PrefillKind kKind>() {
    return tile == 64 ? products<PrefillConfig<64, 3, kKind>>(p, ctas, seed, seconds)
                      : products<PrefillConfig<128, 4, kKind>>(p, ctas, seed, seconds);
  };
  error = p.expanded13 != nullptr ? of_kind.operator()<PrefillKind::expanded>()
          : fp8                   ? of_kind.operator()<PrefillKind::fp8>()
                                  : of_kind.operator()<PrefillKind::bf16>();
  if (!error.empty()) return error;
  return emulation::launch(ctas, kRowThreads, 0, seed, seconds, [&] { prefill_sum_kernel(p); });
}

}  // namespace

// `pointers`: x, ids, weights, offsets, rows, w13, w2, scale13, scale2, out, images, hidden, parts, expanded13,
// expanded2; `numbers`: x_is_float, tokens, slots, d, inter, experts, out_is_float, parts_are_float, tile, ctas, lag.
// Returns an empty text or what went wrong.
extern "C" const char* run_prefill(void* const* pointers, const int64_t* numbers, float limit, uint64_t seed,
                                   double seconds) {
  const auto number = [&](int i) { return static_cast<int>(numbers[i]); };
  const auto at = [&](int i) { return static_cast<uint8_t*>(pointers[i]); };
  const auto ints = [&](int i) { return static_cast<int32_t*>(pointers[i]); };
  const auto floats = [&](int i) { return static_cast<float*>(pointers[i]); };
  PrefillParams p{};
  p.x = pointers[0], p.ids = ints(1), p.weights = floats(2), p.offsets = ints(3), p.rows = ints(4);
  p.w13 = at(5), p.w2 = at(6), p.scale13 = floats(7), p.scale2 = floats(8), p.out = pointers[9];
  p.images = at(10), p.hidden = at(11), p.parts = pointers[12], p.expanded13 = at(13), p.expanded2 = at(14);
  p.x_is_float = number(0), p.tokens = number(1), p.slots = number(2), p.d = number(3), p.inter = number(4);
  p.experts = number(5), p.out_is_float = number(6), p.parts_are_float = number(7);
  p.lag = number(10), p.limit = limit, p.steps = kPrefillAll;
  static std::string error;
  error = run(p, numbers[8], static_cast<unsigned>(numbers[9]), seed, seconds);
  return error.c_str();
}

// tokens, slots, d, inter, experts, fp8 to the bytes of images and of hidden rows.
extern "C" void prefill_bytes(const int64_t* n, int64_t* bytes) {
  const int64_t blocks = most_blocks(n[0], n[1], n[4]);
  bytes[0] = chunks_bytes(blocks, n[2], n[5] != 0), bytes[1] = chunks_bytes(blocks, n[3], n[5] != 0);
}

// Every tile of a plan whose experts have `counts` rows: expert, block, blocks, group, groups.
extern "C" int64_t prefill_tiles(const int64_t* counts, int experts, int groups, int tile, int32_t* out) {
  PrefillPlan plan{};
  plan.experts = experts;
  const int of_tile = tile / kBlockTokens;
  for (int e = 0; e < experts; ++e) {
    const int blocks = static_cast<int>((counts[e] + kBlockTokens - 1) / kBlockTokens);
    plan.first[e + 1] = plan.first[e] + static_cast<int>(counts[e]);
    plan.blocks[e + 1] = plan.blocks[e] + blocks;
    plan.tiles[e + 1] = plan.tiles[e] + (blocks + of_tile - 1) / of_tile;
  }
  int64_t count = 0;
  for (;; ++count) {
    const PrefillTile t =
        tile == 64 ? prefill_tile<PrefillConfig<64, 3, PrefillKind::fp8>>(plan, static_cast<int>(count), groups)
                   : prefill_tile<PrefillConfig<128, 4, PrefillKind::fp8>>(plan, static_cast<int>(count), groups);
    if (t.expert < 0) return count;
    const int32_t row[5] = {t.expert, t.block, t.blocks, t.group, t.groups};
    std::copy(row, row + 5, out + 5 * count);
  }
}
