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

inline uint32_t load_shared_1(uint32_t from) { return block->shared[from]; }

inline constexpr uint32_t kFirstShared = 0;

inline uint32_t load_shared_4(uint32_t from) {
  uint32_t v;
  std::memcpy(&v, block->shared + from, 4);
  return v;
}

inline uint2 load_shared_8(uint32_t from) {
  uint2 v;
  std::memcpy(&v, block->shared + from, 8);
  return v;
}

inline void cp_async_4(uint32_t to, const void* from, bool valid) { kernel_core::ptx::copy(to, from, 4, valid); }
inline uint32_t once(uint32_t x) { return x; }
inline void allow_next() {}
inline void wait_for_previous() {}

// Register 2h + r of lane 4i + c holds bytes 16h + 4c ... of row i + 8r of the warp's 16.
template <int N>
struct IndexProduct {
  static void run(float (&d)[N / 2], const uint32_t (&keys)[4][4], uint64_t columns) {
    const unsigned thread = threadIdx.x, lane = thread % 32;
    const auto start = static_cast<uint32_t>((columns & 0x3FFF) << 4);
    double sums[N / 2] = {};
    for (unsigned step = 0; step < 4; ++step) {
      std::memcpy(&block->operands[thread * 4], keys[step], 16);
      sync_warpgroup();
      for (unsigned i = 0; i < N / 2; ++i) {
        const unsigned half = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 32; ++k) {
          const uint32_t word = block->operands[(thread - lane + lane / 4 * 4 + k % 16 / 4) * 4 + half + (k / 16) * 2];
          const uint32_t at = kernel_core::wgmma::swizzle128_offset(start + column * 128 + step * 32 + k);
          sums[i] += static_cast<double>(kernel_core::cuda::e4m3_float(word >> (k % 4 * 8) & 0xFF)) *
                     kernel_core::cuda::e4m3_float(block->shared[at]);
        }
      }
      sync_warpgroup();
    }
    for (unsigned i = 0; i < N / 2; ++i) d[i] = static_cast<float>(sums[i]);
  }
};

}  // namespace mla_fp4::sm90

#include "index_decode.cuh"

using namespace mla_fp4::sm90;
using mla_fp4::cuda::IndexScoreParams;

// `kernel`(parameters, launch, queries)
template <typename C, typename Kernel>
void launch_as(const IndexScoreParams& p, int64_t keys, Kernel kernel) {
  const PackedQueries queries = PackedQueries::in(p.workspace, p.rows, C::kHeads);
  for (unsigned row = 0; row < p.rows; ++row)
    run_block(kPackThreads, memory, row, [&] { pack_queries<C::kHeads>(p, queries); });
  IndexLaunch l;
  l.tile_rows = C::kKeys == KeySource::candidates ? 1 : C::kQueries;
  l.tiles_of_request = (p.longest_request + l.tile_rows - 1) / l.tile_rows;
  l.keys = keys;
  l.chunks = (p.width + keys - 1) / keys;
  l.page_bytes = static_cast<int>(p.rows_per_block * 68);
  l.page_shift = __builtin_ctzll(static_cast<uint64_t>(p.rows_per_block));
  l.candidate_shift = C::kKeys == KeySource::candidates ? __builtin_ctzll(static_cast<uint64_t>(p.candidate_block)) : 0;
  for (unsigned i = 0; i < p.batch * l.tiles_of_request * l.chunks; ++i) {
    std::memset(memory, 0xCD, sizeof(memory));
    run_block(C::kThreads, memory, i, [&] { kernel(p, l, queries); });
  }
}

template <typename C>
void launch(const IndexScoreParams& p, int64_t keys) {
  static_assert(sizeof(IndexShared<C>) <= sizeof(memory));
  launch_as<C>(p, keys, score_keys<C>);
}

template <typename C>
void launch_decode(const IndexScoreParams& p, int64_t keys) {
  static_assert(sizeof(DecodeShared<C>) <= sizeof(memory));
  launch_as<C>(p, keys, score_decode<C>);
}

template <int kHeads>
void choose(const IndexScoreParams& p, int64_t keys) {
  if (p.candidates) return launch<IndexConfig<kHeads, 1, 1, 2, 1, KeySource::candidates>>(p, keys);
  if (p.rows_per_block < kTile) return launch<IndexConfig<kHeads, 4, 1, 2, 1, KeySource::copied>>(p, keys);
  if (p.longest_request == 1 && p.variant == 6)
    return launch_decode<DecodeConfig<kHeads, 4, 1, 1, true, false>>(p, keys);
  if (p.longest_request == 1 && p.variant == 3)
    return launch_decode<DecodeConfig<kHeads, 3, 2, 1, true, true>>(p, keys);
  if (p.longest_request == 1 && p.variant == 4)
    return launch_decode<DecodeConfig<kHeads, 2, 2, 1, false, true>>(p, keys);
  if (p.longest_request == 1 && p.variant == 5)
    return launch_decode<DecodeConfig<kHeads, 3, 2, 1, false, false>>(p, keys);
  if (p.longest_request == 1) return launch<IndexConfig<kHeads, 1, 1, 3, 1, KeySource::bulk>>(p, keys);
  if (p.longest_request <= 4) return launch<IndexConfig<kHeads, 4, 1, 2, 1, KeySource::bulk>>(p, keys);
  launch<IndexConfig<kHeads, 128 / kHeads, 128 / kHeads, 2, 1, KeySource::bulk>>(p, keys);
}

extern "C" {

int64_t workspace_bytes(int64_t rows, int64_t heads) {
  return rows * PackedQueries::row_bytes(mla_fp4::index_plan::padded_heads(static_cast<int>(heads)));
}

// `numbers`: rows, heads, blocks, rows_per_block, table_width, batch, longest_request, width, candidates_width,
// candidate_block, stride, maxima_stride, keys of a block, variant, whether hidden scores become -inf
void index_score(const float* q, const float* weights, const uint8_t* pages, const int32_t* table, const int32_t* cu,
                 const int32_t* visible, const int32_t* candidates, float* scores, float* maxima, void* workspace,
                 const int64_t* numbers) {
  IndexScoreParams p{};
  p.q = q, p.weights = weights, p.pages = pages, p.block_table = table, p.cu_seqlens = cu, p.visible = visible;
  p.candidates = candidates, p.scores = scores, p.maxima = maxima, p.workspace = workspace;
  p.rows = numbers[0], p.heads = numbers[1], p.blocks = numbers[2], p.rows_per_block = numbers[3];
  p.table_width = numbers[4], p.batch = numbers[5], p.longest_request = numbers[6], p.width = numbers[7];
  p.candidates_width = numbers[8], p.candidate_block = numbers[9], p.stride = numbers[10];
  p.maxima_stride = numbers[11], p.variant = static_cast<int>(numbers[13]), p.fill_hidden = numbers[14] != 0;
  const int heads = mla_fp4::index_plan::padded_heads(static_cast<int>(p.heads));
  heads == 8 ? choose<8>(p, numbers[12]) : heads == 32 ? choose<32>(p, numbers[12]) : choose<64>(p, numbers[12]);
}
}
