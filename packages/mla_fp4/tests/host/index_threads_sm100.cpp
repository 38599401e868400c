// The SM100 scoring kernels' own code on host threads.
#include "sm100_tensor.hpp"

#include "cuda/sm100/index_score_sm100.cuh"

using namespace mla_fp4::sm100;

namespace {

template <int kHeads, bool kCandidates>
void launch(const IndexScoreParams& p, int64_t keys, int64_t groups) {
  const ScaledQueries queries = ScaledQueries::in(p.workspace, p.rows, kHeads);
  for (unsigned row = 0; row < p.rows; ++row) {
    run_group(1, kQueryThreads, row, [&] { scale_queries_sm100<kHeads>(p, queries); });
  }
  IndexLaunch l;
  l.tile_rows = kCandidates ? 1 : static_cast<int>(groups * (IndexPlan::kColumns / kHeads));
  l.tiles_of_request = (p.longest_request + l.tile_rows - 1) / l.tile_rows;
  l.keys = keys;
  l.chunks = (p.width - p.first_position + keys - 1) / keys;
  l.page_bytes = static_cast<int>(p.rows_per_block * (IndexPlan::kCodeBytes + IndexPlan::kScales));
  l.page_shift = __builtin_ctzll(static_cast<uint64_t>(p.rows_per_block));
  l.candidate_shift = kCandidates ? __builtin_ctzll(static_cast<uint64_t>(p.candidate_block)) : 0;
  for (unsigned i = 0; i < p.batch * l.tiles_of_request * l.chunks; ++i) {
    run_group(1, IndexPlan::kThreads, i, [&] { score_keys_sm100<kHeads, kCandidates>(p, l, queries); });
  }
}

template <int kHeads>
void choose(const IndexScoreParams& p, int64_t keys, int64_t groups) {
  p.candidates ? launch<kHeads, true>(p, keys, 1) : launch<kHeads, false>(p, keys, groups);
}

}  // namespace

extern "C" {

int64_t workspace_bytes(int64_t rows, int64_t heads) {
  return rows * ScaledQueries::row_bytes(padded_heads(static_cast<int>(heads)));
}

// `numbers`: rows, heads, blocks, rows_per_block, table_width, batch, longest_request, width, candidates_width,
// candidate_block, stride, maxima_stride, keys of a block, groups of a tile, fill_hidden, first_row, end_row,
// first_position
void index_score(const float* q, const float* weights, const uint8_t* pages, const int32_t* table, const int32_t* cu,
                 const int32_t* visible, const int32_t* candidates, float* scores, float* maxima, void* workspace,
                 const int64_t* numbers) {
  IndexScoreParams p{};
  p.q = q, p.weights = weights, p.pages = pages, p.block_table = table, p.cu_seqlens = cu, p.visible = visible;
  p.candidates = candidates, p.scores = scores, p.maxima = maxima, p.workspace = workspace;
  p.rows = numbers[0], p.heads = numbers[1], p.blocks = numbers[2], p.rows_per_block = numbers[3];
  p.table_width = numbers[4], p.batch = numbers[5], p.longest_request = numbers[6], p.width = numbers[7];
  p.candidates_width = numbers[8], p.candidate_block = numbers[9], p.stride = numbers[10];
  p.maxima_stride = numbers[11], p.fill_hidden = numbers[14];
  p.first_row = numbers[15], p.end_row = numbers[16], p.first_position = numbers[17];
  const int heads = padded_heads(static_cast<int>(p.heads));
  const int64_t keys = numbers[12], groups = numbers[13];
  heads == 8 ? choose<8>(p, keys, groups) : heads == 32 ? choose<32>(p, keys, groups) : choose<64>(p, keys, groups);
}

uint64_t k_major(uint32_t address) { return tcgen05::k_major(address); }
uint64_t mn_major(uint32_t address, uint32_t next) { return tcgen05::mn_major(address, next); }
uint64_t k_major_64(uint32_t address) { return tcgen05::k_major_64(address); }
uint64_t scale_source(uint32_t address) { return tcgen05::scale_source(address); }
uint64_t advance(uint64_t d, uint32_t bytes) { return tcgen05::advance(d, bytes); }
uint32_t swizzle64(uint32_t row, uint32_t byte) { return tcgen05::swizzle64(row, byte); }
uint32_t bf16_product(uint32_t m, uint32_t n, int a_mn, int b_mn) {
  return tcgen05::bf16_product(m, n, static_cast<tcgen05::Major>(a_mn), static_cast<tcgen05::Major>(b_mn));
}
uint32_t mxf4_product(uint32_t m, uint32_t n, uint32_t half) { return tcgen05::mxf4_product(m, n, half); }
uint32_t scale_byte(uint32_t i) { return tcgen05::scale_byte(i); }
int64_t keys_of_block(int64_t tiles, int64_t width, int64_t multiprocessors) {
  return keys_of_thread_block(tiles, width, multiprocessors);
}
}
