// The SM100 attention kernels' own code on host threads, one CTA or pair after the other.
#include "sm100_tensor.hpp"

#include "cuda/sm100/attention_kernel_sm100.cuh"
#include "cuda/sm100/attention_merge_sm100.cuh"

using namespace mla_fp4::sm100;

namespace {

template <typename C, bool kSplit>
void launch(const AttentionParams& a, const CUtensorMap& pool, int64_t walk, float* workspace) {
  const int64_t chunks = chunk_count(a.selected), groups = kSplit ? (chunks + walk - 1) / walk : 1;
  const int64_t blocks = a.rows * groups * ((a.heads + C::kHeads - 1) / C::kHeads);
  for (int64_t i = 0; i < blocks; i += C::kCtas) {
    run_group(C::kCtas, C::kThreads, static_cast<unsigned>(i),
              [&] { attention_sm100_kernel<C, kSplit>(a, pool, static_cast<int>(walk), workspace); });
  }
}

// attention_merge_sm100_kernel, by its arithmetic
void merge(const AttentionParams& a, const float* workspace) {
  const int64_t chunks = chunk_count(a.selected);
  const float* all_stats = workspace + a.rows * a.heads * chunks * kDim;
  for (int64_t at = 0; at < a.rows * a.heads; ++at) {
    float top = minus_infinity(), left = 0, right = 0;
    std::vector<float> o(kDim, 0.0f);
    for (int64_t c = 0; c < chunks; ++c) {
      const float* stats = all_stats + (at * chunks + c) * 4;
      const Merge m = merge_factors(top, stats[0]);
      top = m.top;
      left = merge_value(left, stats[1], m), right = merge_value(right, stats[2], m);
      for (int d = 0; d < kDim; ++d) o[d] = merge_value(o[d], workspace[(at * chunks + c) * kDim + d], m);
    }
    const float factor = finish_factor(top, add_rn(left, right), mul_rn(a.sink[at % a.heads], kLog2E));
    const float* rope = a.rope + at / a.heads * kRopeDim;
    for (int d = 0; d < kDim; d += 2) {
      float even = mul_rn(o[d], factor), odd = mul_rn(o[d + 1], factor);
      if (const int turned = d - (kDim - kRopeDim); turned >= 0) {
        turn_back(even, odd, rope[turned / 2], rope[kRopeDim / 2 + turned / 2]);
      }
      static_cast<uint32_t*>(a.out)[(at * kDim + d) / 2] = pack_bf16(even, odd);
    }
  }
}

template <typename C>
void run(const AttentionParams& a, const CUtensorMap& pool, int64_t splits, float* workspace) {
  if (!is_split(a.selected, splits)) return launch<C, false>(a, pool, chunk_count(a.selected), nullptr);
  launch<C, true>(a, pool, splits, workspace);
  merge(a, workspace);
}

}  // namespace

extern "C" {

// `pointers`: q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, pages, block_table, indices, sink, rope, out,
// workspace; `numbers`: rows, heads, batch, slots, ring_rows, window, blocks, rows_per_block, table_width, selected,
// splits
int attend_sm100(void* const* pointers, const int64_t* numbers, float scale, bool pairs) {
  AttentionParams a{};
  a.q = pointers[0], a.out = pointers[12];
  float* workspace = static_cast<float*>(pointers[13]);
  a.new_rows = static_cast<uint8_t*>(pointers[1]), a.ring = static_cast<uint8_t*>(pointers[2]);
  a.ring_slot = static_cast<int32_t*>(pointers[3]), a.cu_seqlens = static_cast<int32_t*>(pointers[4]);
  a.start_pos = static_cast<int64_t*>(pointers[5]), a.lower = static_cast<int64_t*>(pointers[6]);
  a.pages = static_cast<uint8_t*>(pointers[7]), a.block_table = static_cast<int32_t*>(pointers[8]);
  a.indices = static_cast<int32_t*>(pointers[9]);
  a.sink = static_cast<float*>(pointers[10]), a.rope = static_cast<float*>(pointers[11]);
  a.rows = numbers[0], a.heads = numbers[1], a.batch = numbers[2], a.slots = numbers[3], a.ring_rows = numbers[4];
  a.window = numbers[5], a.blocks = numbers[6], a.rows_per_block = numbers[7], a.table_width = numbers[8];
  a.selected = numbers[9], a.scale = scale;
  if (!chunks_fit(a) || (pairs && a.heads % 128 != 0)) return 1;
  const CUtensorMap pool = {a.pages, a.blocks * a.rows_per_block, kMainRowBytes};
  pairs ? run<AttentionConfig<true>>(a, pool, numbers[10], workspace)
        : run<AttentionConfig<false>>(a, pool, numbers[10], workspace);
  return 0;
}
}
