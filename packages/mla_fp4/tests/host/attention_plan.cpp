// The attention kernels' arithmetic and walk on the host, one row at a time.
#include <cmath>
#include <vector>

#include "cuda/sm90/attention_decode.cuh"
#include "cuda/sm90/attention_plan.cuh"
#include "kernel_core/cuda/wgmma.cuh"

using namespace mla_fp4::cuda;
namespace kc = kernel_core::cuda;
namespace wgmma = kernel_core::wgmma;

namespace {

struct HostTile {
  uint16_t* image;  // kTiles tiles
  uint32_t own;
  int tile;
  void begin(int) const {}
  void store(int s, int c, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) const {
    const uint32_t words[4] = {v0, v1, v2, v3};
    std::memcpy(reinterpret_cast<uint8_t*>(image) + tile_piece(own, tile, s, c), words, 16);
  }
};

}  // namespace

extern "C" {

uint64_t k_major(uint32_t address) { return wgmma::k_major(address); }
uint64_t mn_major(uint32_t address, uint32_t next) { return wgmma::mn_major(address, next); }
uint64_t advance(uint64_t d, uint32_t bytes) { return wgmma::advance(d, bytes); }
uint32_t swizzle128(uint32_t row, uint32_t byte) { return wgmma::swizzle128(row, byte); }
uint32_t swizzle128_offset(uint32_t offset) { return wgmma::swizzle128_offset(offset); }
int accumulator_row(int thread) { return wgmma::accumulator_row(thread); }
int accumulator_column(int thread) { return wgmma::accumulator_column(thread); }
int staged_main(int row, int u) { return staged_main_unit(row, u); }
int64_t workspace_floats(int64_t rows, int64_t heads, int64_t selected, int64_t splits) {
  return attention_workspace_floats(rows, heads, selected, splits);
}

// The keys of a row, in the order in which a CTA of chunks `first` .. `first + count - 1` takes them, and how often
// each place was brought. Kinds: -1 none, 0 ring, 1 new row, 2 pool.
void walk(int64_t row, int64_t first_row, int64_t start, int64_t lower, int32_t slot, int64_t window, int64_t ring_rows,
          const int32_t* indices, int64_t selected, const int32_t* table, int64_t table_width, int64_t rows_per_block,
          int64_t blocks, int first, int count, int32_t* kind, int64_t* source, int32_t* times) {
  const RowPlace place = row_place(row, first_row, start, lower, slot, window, ring_rows);
  const int passes = pass_count(first, count);
  for (int i = 0; i < passes; ++i) {
    const Pass p = pass_at(i, first);
    for (int k = 0; k < kTileKeys; ++k) {
      const int in_chunk = p.tile * kTileKeys + k;
      const int64_t at = (p.chunk - first) * kChunkKeys + in_chunk;
      KeyRow key = kNoKey;
      if (p.chunk == 0) {
        key = window_key(place, in_chunk, window, ring_rows);
      } else if (const int64_t n = (p.chunk - 1) * kChunkKeys + in_chunk; n < selected) {
        const int32_t index = indices[n];
        if (index_in_reach(index, rows_per_block, table_width))
          key = selected_key(index, table[index / rows_per_block], rows_per_block, blocks);
      }
      times[at] += 1 + pass_ends_tile(p) * 100;
      kind[at] = key == kNoKey ? -1 : p.chunk > 0 ? 2 : key & kNewRow ? 1 : 0;
      source[at] = key == kNoKey ? -1 : p.chunk > 0 ? main_offset(key) : window_offset(key);
    }
  }
}

// 64 stored rows (missing ones null bytes) through staging and decoding to a tile of shared memory.
void decode_tile(const uint8_t* rows, bool main, int tile, uint16_t* image) {
  const int units = main ? kMainUnits : kWindowUnits, bytes = main ? kMainRowBytes : kWindowRowBytes;
  for (int part = 0; part < (main ? 1 : 2); ++part) {
    for (int warp = 0; warp < 4; ++warp) {
      std::vector<Unit> stage(16 * kMainUnits, Unit{~0u, ~0u, ~0u, ~0u});
      for (int n = 0; n < 16 * units; ++n) {
        const int key = n / units, u = n % units;
        std::memcpy(&stage[key * units + (main ? staged_main_unit(key, u) : u)],
                    rows + (warp * 16 + key) * bytes + (main ? u : window_unit(u, part)) * 16, 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int key = lane % 16, half = lane / 16;
        Unit raw[8], scales;
        const Unit* own = &stage[key * units];
        for (int u = 0; u < 8; ++u) raw[u] = own[main ? staged_main_unit(key, half * 8 + u) : half * 8 + u];
        scales = own[main ? staged_main_unit(key, 16 + half) : 16];
        const HostTile out = {image, tile_own(warp * 16 + key, half), tile};
        if (main) {
          decode_main(raw, scales, out);
        } else {
          decode_window(raw, window_scales(scales, half, part), part, out);
        }
      }
    }
  }
}

// What a K-major or MN-major reader of the tile finds at (key, column): the swizzle's own formula.
uint16_t tile_value(const uint16_t* image, int tile, int key, int column) {
  const uint32_t at = tile * kTileBytes + column / 64 * kColumnBytes + wgmma::swizzle128(key, column % 64 * 2);
  return image[at / 2];
}

// Attention of one row and head over chunks of 128 keys [chunks, 128, 512], `seen` [chunks, 128]. split: every chunk's
// partial result first, then the merge kernel's loop; else each chunk joins the running sums at once.
void attend(const float* q, const float* keys, const uint8_t* seen, int chunks, float sink, float scale, bool split,
            float* out) {
  struct State {
    float top, sum[2];
    std::vector<float> o;
  };
  State run = {minus_infinity(), {0, 0}, std::vector<float>(kDim, 0.0f)};
  std::vector<State> parts;
  const auto join = [&](const State& c) {
    const Merge m = merge_factors(run.top, c.top);
    run.top = m.top;
    for (int w = 0; w < 2; ++w) run.sum[w] = merge_value(run.sum[w], c.sum[w], m);
    for (int d = 0; d < kDim; ++d) run.o[d] = merge_value(run.o[d], c.o[d], m);
  };
  for (int c = 0; c < chunks; ++c) {
    State chunk = {minus_infinity(), {0, 0}, std::vector<float>(kDim, 0.0f)};
    float scores[kChunkKeys];
    for (int k = 0; k < kChunkKeys; ++k) {
      const float* key = keys + (c * kChunkKeys + k) * kDim;
      float s = 0;
      for (int d = 0; d < kDim; ++d) s += q[d] * key[d];
      scores[k] = seen[c * kChunkKeys + k] ? s * (scale * kLog2E) : minus_infinity();
      chunk.top = scores[k] > chunk.top ? scores[k] : chunk.top;
    }
    for (int k = 0; k < kChunkKeys; ++k) {
      const float w = weight(scores[k], chunk.top);
      chunk.sum[k / kTileKeys] += w;
      const float p = kc::round_bf16(w);
      for (int d = 0; d < kDim; ++d) chunk.o[d] += p * keys[(c * kChunkKeys + k) * kDim + d];
    }
    split ? parts.push_back(chunk) : join(chunk);
  }
  for (const State& c : parts) join(c);
  const float factor = finish_factor(run.top, run.sum[0] + run.sum[1], sink * kLog2E);
  for (int d = 0; d < kDim; ++d) out[d] = run.o[d] * factor;
}
}
