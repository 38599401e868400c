// Index scores with float32 vectors: keys in lanes, each product a chain over channels 0, 1, 2, ...
#include "cpu/index_score.hpp"

#include <vector>

#include "cpu/key_walk.hpp"
#include "cpu/transpose.hpp"
#include "kernel_core/encode.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

using namespace kernel_core::KERNEL_CORE_ISA;

namespace {

constexpr int kHeads = 4;  // heads and key vectors of one register block
constexpr int kVectors = F32::width == 8 ? 2 : 4;
constexpr int kTile = kVectors * F32::width;  // keys

int64_t padded_heads(int64_t heads) { return (heads + kHeads - 1) / kHeads * kHeads; }

// A tile of keys as [dim][kTile], channel-major. Lanes beyond `end` hold zeros.
void load_tile(const ScoreArgs& a, int64_t begin, int64_t end, float* rows, float* tile) {
  constexpr int w = F32::width;
  const int64_t dim = a.keys.dim;
  KeyWalk walk(a, begin, end);
  float* row = rows;
  for (KeyRun run; (run = walk.next(kTile)).count;) {
    for (int64_t i = 0; i < run.count; ++i, row += dim) {
      if (a.keys.packed) {
        decode_mxfp4_row(run.codes + i * (dim / 2), run.scales + i * (dim / 32), row, dim);
      } else {
        std::memcpy(row, run.codes + i * dim * 4, static_cast<size_t>(dim) * sizeof(float));
      }
    }
  }
  std::memset(rows + (end - begin) * dim, 0, static_cast<size_t>((kTile - (end - begin)) * dim) * sizeof(float));
  for (int64_t k = 0; k < kTile; k += w) {
    int64_t d = 0;
    for (; d + w <= dim; d += w) transpose_block(rows + k * dim + d, dim, tile + d * kTile + k, kTile);
    for (; d < dim; ++d)
      for (int64_t j = k; j < k + w; ++j) tile[d * kTile + j] = rows[j * dim + d];
  }
}

void score_row(const float* q, const float* weights, int64_t heads, int64_t dim, const float* tile, float* out,
               int64_t count) {
  constexpr int w = F32::width;
  F32 score[kVectors];
  for (F32& s : score) s = F32::zero();
  for (int64_t h = 0; h < heads; h += kHeads) {
    F32 product[kHeads][kVectors];
    for (auto& head : product)
      for (F32& p : head) p = F32::zero();
    for (int64_t d = 0; d < dim; ++d) {
      F32 key[kVectors];
      for (int v = 0; v < kVectors; ++v) key[v] = F32::load(tile + d * kTile + v * w);
      for (int i = 0; i < kHeads; ++i) {
        const F32 query = F32::set(q[(h + i) * dim + d]);
        for (int v = 0; v < kVectors; ++v) product[i][v] = fma(query, key[v], product[i][v]);
      }
    }
    for (int i = 0; i < kHeads; ++i)  // max(0, NaN) is NaN in this order
      for (int v = 0; v < kVectors; ++v)
        score[v] = fma(F32::set(weights[h + i]), max(F32::zero(), product[i][v]), score[v]);
  }
  for (int v = 0; v < kVectors && v * w < count; ++v)
    score[v].store_n(out + v * w, static_cast<int>(count - v * w < w ? count - v * w : w));
}

}  // namespace

PackedSize packed_size(int64_t rows, int64_t heads, int64_t dim) {
  const int64_t padded = rows * padded_heads(heads);
  return {padded * dim * static_cast<int64_t>(sizeof(float)), padded};
}

void pack_queries(const PackArgs& a) {
  const int64_t padded = padded_heads(a.heads), dim = a.dim;
  std::vector<uint8_t> codes(static_cast<size_t>(dim / 2)), scales(static_cast<size_t>(dim / 32));
  auto* out = static_cast<float*>(a.packed);
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t h = 0; h < padded; ++h) {
      float* to = out + (row * padded + h) * dim;
      const float* from = a.q + (row * a.heads + h) * dim;
      a.packed_weights[row * padded + h] = h < a.heads ? a.weights[row * a.heads + h] : 0.0f;
      if (h >= a.heads) {
        std::memset(to, 0, static_cast<size_t>(dim) * sizeof(float));
      } else if (a.quantize) {
        encode_mxfp4_row(from, codes.data(), scales.data(), dim);
        decode_mxfp4_row(codes.data(), scales.data(), to, dim);
      } else {
        std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(float));
      }
    }
  }
}

void score_keys(const ScoreArgs& a) {
  static thread_local std::vector<float> scratch;
  const int64_t dim = a.keys.dim, padded = padded_heads(a.heads);
  scratch.resize(static_cast<size_t>(2 * kTile * dim));
  float *rows = scratch.data(), *tile = rows + kTile * dim;
  const auto* q = static_cast<const float*>(a.packed);
  for (int64_t begin = 0; begin < a.count; begin += kTile) {
    const int64_t end = std::min<int64_t>(begin + kTile, a.count);
    load_tile(a, begin, end, rows, tile);
    for (int64_t row = 0; row < a.rows; ++row)
      score_row(q + row * padded * dim, a.packed_weights + row * padded, padded, dim, tile,
                a.out + row * a.stride + begin, end - begin);
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
