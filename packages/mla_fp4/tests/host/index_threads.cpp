// The scoring kernel's own code on host threads; the tensor unit is a loop over its operands.
#include "threads.hpp"

#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace kernel_core::wgmma {

inline void fence() {}
inline void commit() {}
template <int Pending>
void wait() {}
template <int Count>
void pin(float (&)[Count]) {}

}  // namespace kernel_core::wgmma

namespace mla_fp4::sm90 {

alignas(1024) uint8_t memory[160 << 10];

inline uint32_t load_shared_4(uint32_t from) {
  uint32_t word;
  std::memcpy(&word, block->shared + from, 4);
  return word;
}

inline void cp_async_4(uint32_t to, const void* from, bool valid) { kernel_core::ptx::copy(to, from, 4, valid); }

// Register 2h + r of lane 4i + c holds bytes 16h + 4c ... of row i + 8r of the warp's 16.
inline void multiply_step(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  const unsigned thread = threadIdx.x, lane = thread % 32;
  std::memcpy(&block->operands[thread * 4], a, 16);
  sync_warpgroup();
  for (unsigned i = 0; i < 16; ++i) {
    const unsigned half = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = 0;
    for (unsigned k = 0; k < 32; ++k) {
      const uint32_t word = block->operands[(thread - lane + lane / 4 * 4 + k % 16 / 4) * 4 + half + (k / 16) * 2];
      const auto start = static_cast<uint32_t>((b & 0x3FFF) << 4);
      const uint32_t at = kernel_core::wgmma::swizzle128_offset(start + column * 128 + k);
      sum += static_cast<double>(kernel_core::cuda::e4m3_float(word >> (k % 4 * 8) & 0xFF)) *
             kernel_core::cuda::e4m3_float(block->shared[at]);
    }
    d[i] = static_cast<float>(sum);
  }
  sync_warpgroup();
}

}  // namespace mla_fp4::sm90

#include "index_score.cuh"

using namespace mla_fp4::sm90;
using mla_fp4::cuda::IndexScoreParams;

template <int kHeads, int kQueries, bool kCandidates>
void launch(const IndexScoreParams& p, int64_t keys) {
  using C = IndexConfig<kHeads, kQueries, 3>;
  static_assert(sizeof(IndexShared<C>) <= sizeof(memory));
  const PackedQueries queries = PackedQueries::in(p.workspace, p.rows, kHeads);
  for (unsigned row = 0; row < p.rows; ++row)
    run_block(kPackThreads, memory, row, [&] { pack_queries<kHeads>(p, queries); });
  IndexLaunch l;
  l.tile_rows = kCandidates ? 1 : C::kQueries;
  l.tiles_of_request = (p.longest_request + l.tile_rows - 1) / l.tile_rows;
  l.keys = keys;
  l.chunks = (p.width + keys - 1) / keys;
  l.page_bytes = static_cast<int>(p.rows_per_block * 68);
  l.page_shift = __builtin_ctzll(static_cast<uint64_t>(p.rows_per_block));
  l.candidate_shift = kCandidates ? __builtin_ctzll(static_cast<uint64_t>(p.candidate_block)) : 0;
  for (unsigned i = 0; i < p.batch * l.tiles_of_request * l.chunks; ++i) {
    std::memset(memory, 0xCD, sizeof(memory));
    run_block(C::kThreads, memory, i, [&] { score_keys<C, kCandidates>(p, l, queries); });
  }
}

template <int kHeads>
void choose(const IndexScoreParams& p, int64_t keys) {
  if (p.candidates) return launch<kHeads, 4, true>(p, keys);
  p.longest_request <= 4 ? launch<kHeads, 4, false>(p, keys) : launch<kHeads, 8, false>(p, keys);
}

extern "C" {

int64_t workspace_bytes(int64_t rows, int64_t heads) {
  return rows * PackedQueries::row_bytes(mla_fp4::index_plan::padded_heads(static_cast<int>(heads)));
}

// `numbers`: rows, heads, blocks, rows_per_block, table_width, batch, longest_request, width, candidates_width,
// candidate_block, stride, maxima_stride, keys of a block
void index_score(const float* q, const float* weights, const uint8_t* pages, const int32_t* table, const int32_t* cu,
                 const int32_t* visible, const int32_t* candidates, float* scores, float* maxima, void* workspace,
                 const int64_t* numbers) {
  IndexScoreParams p{};
  p.q = q, p.weights = weights, p.pages = pages, p.block_table = table, p.cu_seqlens = cu, p.visible = visible;
  p.candidates = candidates, p.scores = scores, p.maxima = maxima, p.workspace = workspace;
  p.rows = numbers[0], p.heads = numbers[1], p.blocks = numbers[2], p.rows_per_block = numbers[3];
  p.table_width = numbers[4], p.batch = numbers[5], p.longest_request = numbers[6], p.width = numbers[7];
  p.candidates_width = numbers[8], p.candidate_block = numbers[9], p.stride = numbers[10];
  p.maxima_stride = numbers[11];
  const int heads = mla_fp4::index_plan::padded_heads(static_cast<int>(p.heads));
  heads == 8 ? choose<8>(p, numbers[12]) : heads == 32 ? choose<32>(p, numbers[12]) : choose<64>(p, numbers[12]);
}
}
