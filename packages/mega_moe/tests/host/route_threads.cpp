// The router's and the permutation's own code on host threads.
#include "threads.hpp"

#include "cuda/route.hpp"
#include "kernel_core/cuda/hd.cuh"

inline unsigned __match_any_sync(unsigned, int value) {
  block->lanes[threadIdx.x] = static_cast<uint32_t>(value);
  __syncwarp();
  unsigned mask = 0;
  const unsigned warp = threadIdx.x / 32 * 32;
  for (unsigned i = 0; i < 32; ++i)
    mask |= static_cast<unsigned>(block->lanes[warp + i] == static_cast<uint32_t>(value)) << i;
  __syncwarp();
  return mask;
}

#include "cuda/sm90/route_permute.cuh"
#include "cuda/sm90/route_select.cuh"

using namespace mega_moe::cuda;

template <int Groups, bool Vectors>
void route_all(const RouteParams& a) {
  using Config = RouteConfig<Groups, Vectors>;
  std::vector<uint8_t> memory(16);
  Candidate scratch[kCandidates];
  run_block(32, memory.data(), 0, [&] {
    for (int64_t t = 0; t < a.tokens; ++t) route_token<Config>(a, t, static_cast<int>(threadIdx.x), scratch);
  });
}

extern "C" void route_host(int64_t tokens, int64_t experts, int64_t top_k, const float* logits, const float* bias,
                           const float* bias_vl, const uint8_t* is_image, float scale, int32_t* ids, float* weights) {
  const RouteParams a = {tokens, experts, top_k, logits, bias, bias_vl, is_image, scale, ids, weights};
  if (experts % 4 == 0)
    experts <= 128 ? route_all<1, true>(a) : experts <= 384 ? route_all<3, true>(a) : route_all<8, true>(a);
  else
    experts <= 128 ? route_all<1, false>(a) : experts <= 256 ? route_all<2, false>(a) : route_all<8, false>(a);
}

extern "C" void permute_host(int64_t tokens, int64_t experts, int64_t top_k, const int32_t* ids, int shared, int warps,
                             int32_t* offsets, int32_t* rows) {
  const PermuteParams a = {tokens, experts, top_k, ids, shared != 0, offsets, rows};
  const int64_t blocks = permute_blocks(tokens * top_k);
  std::vector<int32_t> counts(static_cast<size_t>(blocks * experts), -7);
  std::vector<int32_t> memory(static_cast<size_t>(permute_shared(experts, warps)));
  const auto each = [&](auto f) {
    for (int64_t b = 0; b < blocks; ++b) {
      std::fill(memory.begin(), memory.end(), 0x5A5A5A5A);
      run_block(32 * warps, reinterpret_cast<uint8_t*>(memory.data()), 0, [&] { f(b); });
    }
  };
  if (blocks > 1) each([&](int64_t b) { count_block(a, b, warps, counts.data(), memory.data()); });
  each([&](int64_t b) {
    permute_block(a, b, blocks, warps, blocks > 1 ? counts.data() : nullptr, memory.data(), [] {});
  });
}
