// The row kernels' control flow and arithmetic, one row after the other, for ctypes.
#include <cmath>
#include <vector>

#include "cuda/sm90/pair_math.cuh"
#include "cuda/sm90/row_math.cuh"
#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/ragged.cuh"

using namespace mla_fp4::cuda;

namespace {

// As the warp of kv_rows sums: each lane its consecutive values, then a butterfly.
float butterfly_sum(const float* x, int64_t d, int64_t values) {
  float lanes[32] = {}, next[32];
  for (int64_t i = 0; i < d; ++i) lanes[i / values] = std::fma(x[i], x[i], lanes[i / values]);
  for (int step = 16; step > 0; step /= 2) {
    for (int i = 0; i < 32; ++i) next[i] = lanes[i] + lanes[i ^ step];
    std::copy(next, next + 32, lanes);
  }
  return lanes[0];
}

}  // namespace

extern "C" {

void norm_rotate(const float* x, const float* weight, const float* rope, float* out, int64_t rows, int64_t d,
                 int64_t rope_dim, float eps) {
  for (int64_t r = 0; r < rows; ++r, x += d, out += d) {
    const float factor = norm_factor(butterfly_sum(x, d, d >= 512 ? 16 : d == 256 ? 8 : 4), d, eps);
    for (int64_t i = 0; i < d; ++i) out[i] = weight ? norm_value(x[i], factor, weight[i]) : x[i];
    for (int64_t i = 0; rope && i < rope_dim / 2; ++i) {
      const float* angles = rope + r * rope_dim;
      float* pair = out + d - rope_dim + 2 * i;
      rotate_pair(pair[0], pair[1], angles[i], angles[rope_dim / 2 + i]);
    }
  }
}

void store(const uint8_t* rows, const int64_t* slots, uint8_t* out, int64_t count, int64_t code_bytes,
           int64_t scale_bytes, int64_t rows_per_block) {
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < 0) continue;
    const RowPlace place = row_place(slots[i], code_bytes, scale_bytes, rows_per_block);
    const uint8_t* row = rows + i * (code_bytes + scale_bytes);
    std::memcpy(out + place.codes, row, static_cast<size_t>(code_bytes));
    std::memcpy(out + place.scales, row + code_bytes, static_cast<size_t>(scale_bytes));
  }
}

void ring_offsets(const int64_t* positions, const int64_t* rings, int64_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = ring_offset(positions[i], rings[i]);
}

// Both launches of compress, any order of rows within each.
void compress(const float* kv, const float* gate, float* tail, const int32_t* slot, const int32_t* cu,
              const int64_t* start, float* out, int64_t batch, int64_t rows, int64_t d, int64_t ring) {
  for (int64_t row = rows - 1; row >= 0; --row) {
    const BatchRow at = locate_row(cu, start, batch, row);
    if (at.request >= batch || !completes_pair(at.position)) continue;
    int64_t group = pair_in_request(at.position, start[at.request]);
    for (int64_t b = 0; b < at.request; ++b) group += request_pairs(cu, start, b);
    const float *gate0 = gate + (row - 1) * d, *kv0 = kv + (row - 1) * d;
    if (row == at.first) {
      gate0 = tail + ring_row(slot[at.request], at.position - 1, ring) * 2 * d;
      kv0 = gate0 + d;
    }
    for (int64_t i = 0; i < d; ++i)
      out[group * d + i] = pool_pair(gate0[i], gate[row * d + i], kv0[i], kv[row * d + i]);
  }
  for (int64_t row = rows - 1; row >= 0; --row) {
    const BatchRow at = locate_row(cu, start, batch, row);
    if (at.request >= batch || !ring_keeps(at.position, at.end, ring, 0)) continue;
    float* to = tail + ring_row(slot[at.request], at.position, ring) * 2 * d;
    std::memcpy(to, gate + row * d, static_cast<size_t>(d) * 4);
    std::memcpy(to + d, kv + row * d, static_cast<size_t>(d) * 4);
  }
}
}
