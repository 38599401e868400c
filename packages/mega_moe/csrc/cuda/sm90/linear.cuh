// Few rows of activations times FP8 weights: weights stream through registers, so that bytes bind.
//
// A warp has 32 rows of the matrix and a slice of the columns. Lane 4 g + c copies columns 16 c to 16 c + 15 of rows
// g, g + 8, g + 16, g + 24 of each chunk of 64 columns to its own place in shared memory, some chunks ahead, and is the
// only one to read them: no barrier stands between memory and the product. Those 16 bytes are the lane's operands of
// four products, since a product does not mind how the columns are numbered; activations are read in the same order.
// CTAs of a cluster share the columns, and their sums are added in the order of ranks.
#pragma once

#include "cuda/sm90/linear_decode.cuh"
#include "cuda/sm90/linear_plan.cuh"
#include "cuda/sm90/linear_ptx.cuh"
#include "cuda/sm90/route_unroll.cuh"
#include "kernel_core/cuda/ptx.cuh"

namespace mega_moe::cuda {

namespace ptx = kernel_core::ptx;

// The CTA's columns of the tokens held as bfloat16 terms: [term][token][columns], zeros where there is no token. A warp
// takes 128 columns of a token at a time, and asks for some of them before it uses the first.
template <typename Config>
__device__ __forceinline__ void load_x(const LinearParams& a, int terms, int64_t group, int64_t first, int held,
                                       const LinearSlice& slice, int64_t stride, uint8_t* to) {
  constexpr int batch = Config::tiles == 1 ? 4 : 8;
  const int thread = linear_thread(), warp = thread / 32, lane = thread % 32;
  const int width = static_cast<int>(slice.end - slice.begin) * Config::chunk;
  const int runs = (width + 127) / 128;
  for (int at = warp; at < held * runs; at += Config::warps * batch) {
    float4 v[batch];
    MEGA_MOE_UNROLL
    for (int i = 0; i < batch; ++i) {
      const int piece = at + i * Config::warps, token = piece / runs, k = piece % runs * 128 + 4 * lane;
      v[i] = {0, 0, 0, 0};
      if (piece < held * runs && k < width && first + token < a.tokens)
        v[i] = *reinterpret_cast<const float4*>(a.x + ((first + token) * a.groups + group) * a.columns +
                                                slice.begin * Config::chunk + k);
    }
    MEGA_MOE_UNROLL
    for (int i = 0; i < batch; ++i) {
      const int piece = at + i * Config::warps, token = piece / runs, k = piece % runs * 128 + 4 * lane;
      if (piece >= held * runs || k >= width) continue;
      uint8_t* place = to + token * stride + 2 * k;
      if (terms == 1) {
        *reinterpret_cast<uint2*>(place) = {pack_bf16(v[i].x, v[i].y), pack_bf16(v[i].z, v[i].w)};
        continue;
      }
      uint32_t t[4][3];
      split_bf16(v[i].x, t[0]);
      split_bf16(v[i].y, t[1]);
      split_bf16(v[i].z, t[2]);
      split_bf16(v[i].w, t[3]);
      MEGA_MOE_UNROLL
      for (int j = 0; j < 3; ++j) {
        if (j >= terms) break;
        const uint2 pairs = {t[0][j] | t[1][j] << 16, t[2][j] | t[3][j] << 16};
        *reinterpret_cast<uint2*>(place + j * held * stride) = pairs;
      }
    }
  }
}

// Four rows of a lane's 16 bytes to the operands of four steps of 16 columns and two tiles of 16 rows.
__device__ __forceinline__ void decode_weights(const uint32_t (&codes)[4][4], uint32_t byte,
                                               uint32_t (&operand)[4][2][4]) {
  const Mxfp8Scale scale = mxfp8_scale(byte);
  uint32_t nan = 0;
  MEGA_MOE_UNROLL
  for (int r = 0; r < 4; ++r) {
    MEGA_MOE_UNROLL
    for (int s = 0; s < 4; ++s) {
      uint32_t pairs[2];
      e4m3x4_small(codes[r][s], pairs);
      nan |= e4m3_nan_bits(codes[r][s]);
      // Row g + 8 r: tile r / 2, its lower or upper half r % 2.
      operand[s][r / 2][r % 2] = mul_bf16x2(mul_bf16x2(pairs[0], scale.first), scale.second);
      operand[s][r / 2][r % 2 + 2] = mul_bf16x2(mul_bf16x2(pairs[1], scale.first), scale.second);
    }
  }
  if (nan == 0) return;
  MEGA_MOE_UNROLL
  for (int r = 0; r < 4; ++r) {
    MEGA_MOE_UNROLL
    for (int s = 0; s < 4; ++s) {
      uint32_t pairs[2] = {operand[s][r / 2][r % 2], operand[s][r / 2][r % 2 + 2]};
      put_e4m3_nans(codes[r][s], pairs);
      operand[s][r / 2][r % 2] = pairs[0], operand[s][r / 2][r % 2 + 2] = pairs[1];
    }
  }
}

// One chunk of 64 columns. term_stride: bytes from a term of x to the next one.
template <typename Config>
__device__ __forceinline__ void multiply_chunk(const uint32_t (&operand)[4][2][4], uint32_t x, int64_t stride,
                                               int64_t term_stride, int terms, float (&sum)[2][Config::tiles][4]) {
  for (int term = terms - 1; term >= 0; --term) {  // the small ones first
    MEGA_MOE_UNROLL
    for (int n = 0; n < Config::tiles; ++n) {
      const uint32_t at = x + static_cast<uint32_t>(term * term_stride + n * 8 * stride);
      const uint4 low = ptx::load_shared_16(at), high = ptx::load_shared_16(at + 16);
      const uint32_t b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      MEGA_MOE_UNROLL
      for (int s = 0; s < 4; ++s) {
        product_bf16(sum[0][n], operand[s][0], b[2 * s], b[2 * s + 1]);
        product_bf16(sum[1][n], operand[s][1], b[2 * s], b[2 * s + 1]);
      }
    }
  }
}

template <typename Config>
__device__ __forceinline__ void linear_block(const LinearParams& a, const LinearShape& shape, int64_t block,
                                             int64_t tile, int rank, uint8_t* shared) {
  const int thread = linear_thread(), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, c = lane % 4;
  const LinearShared at = linear_shared(a.tokens, a.columns, shape);
  const LinearSlice slice = linear_slice(a.columns, shape.cluster, rank);
  const int64_t stride = linear_x_stride(a.columns, shape.cluster);
  const int64_t blocks_a_group = (a.rows + Config::rows - 1) / Config::rows;
  const int64_t group = block / blocks_a_group;
  const int64_t first = block % blocks_a_group * Config::rows + warp * Config::tile_rows;  // in the group

  // Rows beyond the last are read as the last, and dropped.
  const uint8_t* row[4];
  MEGA_MOE_UNROLL
  for (int r = 0; r < 4; ++r) {
    const int64_t in_group = min(first + g + 8 * r, a.rows - 1);
    row[r] = a.weight + (group * a.rows + in_group) * a.columns + 16 * c;
  }
  const uint32_t ring = ptx::shared_address(shared + at.ring) +
                        static_cast<uint32_t>(warp * Config::stages * Config::stage_bytes + lane * 16);
  int into = 0, from = 0;  // stages of the ring
  const auto fetch = [&](int64_t chunk) {
    if (chunk < slice.end) {
      MEGA_MOE_UNROLL
      for (int r = 0; r < 4; ++r)
        linear_fetch(ring + static_cast<uint32_t>(into * Config::stage_bytes + r * 512),
                     row[r] + chunk * Config::chunk);
    }
    into = into + 1 == Config::stages ? 0 : into + 1;
    ptx::cp_async_commit();
  };
  MEGA_MOE_UNROLL
  for (int i = 0; i < Config::stages - 1; ++i) fetch(slice.begin + i);

  uint8_t* scales = shared + at.scales + warp * linear_most_chunks(a.columns, shape.cluster) * 2;
  const int64_t scale_row = (group * a.rows + min(first, a.rows - 1)) / 32;
  const uint8_t* from_scales = a.scale + scale_row * (a.columns / 32) + slice.begin * 2;
  const int64_t scale_count = (slice.end - slice.begin) * 2;
  const uint8_t own_scale = lane < scale_count ? from_scales[lane] : 0;  // on its way together with x
  const int held = linear_held(Config::tokens, a.tokens);
  load_x<Config>(a, shape.terms, group, tile * Config::tokens, held, slice, stride, shared + at.x);
  if (lane < scale_count) scales[lane] = own_scale;
  for (int64_t i = lane + 32; i < scale_count; i += 32) scales[i] = from_scales[i];
  __syncthreads();

  float sum[2][Config::tiles][4] = {};
  const uint32_t x = ptx::shared_address(shared + at.x) + static_cast<uint32_t>(min(g, held - 1) * stride + 32 * c);
  for (int64_t chunk = slice.begin; chunk < slice.end; ++chunk) {
    ptx::cp_async_wait<Config::stages - 2>();
    const int64_t local = chunk - slice.begin;
    uint32_t codes[4][4];
    MEGA_MOE_UNROLL
    for (int r = 0; r < 4; ++r) {
      const uint4 v = ptx::load_shared_16(ring + static_cast<uint32_t>(from * Config::stage_bytes + r * 512));
      codes[r][0] = v.x, codes[r][1] = v.y, codes[r][2] = v.z, codes[r][3] = v.w;
    }
    from = from + 1 == Config::stages ? 0 : from + 1;
    fetch(chunk + Config::stages - 1);
    uint32_t operand[4][2][4];
    decode_weights(codes, scales[local * 2 + c / 2], operand);
    multiply_chunk<Config>(operand, x + static_cast<uint32_t>(local * 128), stride, held * stride, shape.terms, sum);
  }

  __syncthreads();  // x was read
  auto* sums = reinterpret_cast<float*>(shared + at.x);
  constexpr int sum_stride = Config::rows + 4;
  MEGA_MOE_UNROLL
  for (int m = 0; m < 2; ++m) MEGA_MOE_UNROLL
  for (int n = 0; n < Config::tiles; ++n) MEGA_MOE_UNROLL
  for (int i = 0; i < 4; ++i)
    sums[(n * 8 + 2 * c + i % 2) * sum_stride + warp * Config::tile_rows + m * 16 + g + i / 2 * 8] = sum[m][n][i];
  linear_cluster_arrive();
  linear_cluster_wait();
  // Each CTA adds up and writes its share of the rows.
  const int share = Config::rows / shape.cluster;
  const int64_t row0 = block % blocks_a_group * Config::rows + rank * share;
  for (int i = thread; i < share * Config::tokens; i += Config::threads) {
    const int in_tile = i / share, r = i % share;
    const int64_t token = tile * Config::tokens + in_tile;
    if (token >= a.tokens || row0 + r >= a.rows) continue;
    const uint32_t at_sum = ptx::shared_address(sums + in_tile * sum_stride + rank * share + r);
    float part[8];
    MEGA_MOE_UNROLL
    for (int other = 0; other < 8; ++other)
      if (other < shape.cluster) part[other] = linear_of_rank(at_sum, static_cast<uint32_t>(other));
    float total = part[0];
    MEGA_MOE_UNROLL
    for (int other = 1; other < 8; ++other)
      if (other < shape.cluster) total = add_rn(total, part[other]);
    a.out[(token * a.groups + group) * a.rows + row0 + r] = total;
  }
  linear_cluster_arrive();  // no CTA leaves while another reads its sums
  linear_cluster_wait();
}

}  // namespace mega_moe::cuda
