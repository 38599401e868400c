// Cache rows: one warp a row. A lane holds consecutive channels, of 512 the 16 of one main group, so that a group's
// scale needs few shuffles, codes leave as 8 or 16 bytes a lane, and a row is read and written once.
#include "cuda/kv_rows.hpp"

#include <type_traits>

#include "cuda/sm90/row_math.cuh"
#include "kernel_core/cuda/ragged.cuh"
#include "kernel_core/cuda/warp.cuh"

namespace mla_fp4::cuda {
namespace {

struct Float32Row {};  // no quantisation

template <typename Row_, typename In_, int D_>
struct RowConfig {
  using Row = Row_;
  using In = In_;
  static constexpr int d = D_;
  static constexpr int values = D_ >= 512 ? 16 : D_ == 256 ? 8 : 4;  // a lane holds
  static constexpr int lanes = D_ / values;                          // that hold some
  static constexpr int warps = 4;                                    // of a block, each with its own row
};

// Bytes of codes to memory in the widest units that the row's alignment allows.
template <int Bytes, int Align>
__device__ __forceinline__ void store_codes(uint8_t* p, const uint32_t* words) {
  if constexpr (Bytes == 16 && Align % 16 == 0) {
    *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (Bytes == 8 && Align % 8 == 0) {
    *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
  } else if constexpr (Bytes % 4 == 0 && Align % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Bytes / 4; ++i) reinterpret_cast<uint32_t*>(p)[i] = words[i];
  } else if constexpr (Bytes % 2 == 0 && Align % 2 == 0) {
#pragma unroll
    for (int i = 0; i < Bytes / 2; ++i)
      reinterpret_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  } else {
#pragma unroll
    for (int i = 0; i < Bytes; ++i) p[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

template <typename Config>
__device__ __forceinline__ void write_row(const float (&x)[Config::values], const KvRowsParams& p, int64_t slot,
                                          int lane) {
  using Row = typename Config::Row;
  constexpr int n = Config::values;
  if constexpr (std::is_same_v<Row, Float32Row>) {
    if (lane < Config::lanes) store_values(reinterpret_cast<float*>(p.out) + slot * Config::d + lane * n, x);
  } else {
    constexpr int lanes_a_group = Row::group / n;
    constexpr int code_bytes = Config::d * Row::code_bits / 8, scale_bytes = Config::d / Row::group;
    constexpr int mine = n * Row::code_bits / 8;
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) amax = max(amax, magnitude_bits(x[i]));
    const GroupScale scale = group_scale(Row{}, lanes_max<lanes_a_group>(amax));
    uint32_t words[(mine + 3) / 4] = {};
#pragma unroll
    for (int i = 0; i < n; ++i) {
      constexpr int per_word = 32 / Row::code_bits;
      words[i / per_word] |= encode_scaled<Row>(x[i], scale) << (i % per_word * Row::code_bits);
    }
    if (lane >= Config::lanes) return;
    const RowPlace place = row_place(slot, code_bytes, scale_bytes, p.rows_per_block);
    store_codes<mine, code_bytes + scale_bytes>(p.out + place.codes + lane * mine, words);
    if (lane % lanes_a_group == 0) p.out[place.scales + lane / lanes_a_group] = static_cast<uint8_t>(scale.byte);
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::warps * 32) kv_rows_kernel(KvRowsParams p) {
  constexpr int n = Config::values;
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Config::warps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int64_t slot = p.slots ? p.slots[row] : row;
  if (slot < 0 || slot >= p.capacity) return;  // the whole warp

  const bool holds = lane < Config::lanes;
  float x[n] = {};
  if (holds) load_values(static_cast<const typename Config::In*>(p.x) + row * Config::d + lane * n, x);
  if (p.weight) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) sum = __fmaf_rn(x[i], x[i], sum);
    const float factor = norm_factor(warp_sum(sum), Config::d, p.eps);
    if (holds) {
      float weight[n];
      load_values(p.weight + lane * n, weight);
#pragma unroll
      for (int i = 0; i < n; ++i) x[i] = norm_value(x[i], factor, weight[i]);
    }
  }
  if (p.round_bf16) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = round_bf16(x[i]);
  }
  if (p.rope && holds) {
    const int at = lane * n - (Config::d - static_cast<int>(p.rope_dim));
    if (at >= 0) {
      const float* angles = p.rope + row * p.rope_dim + at / 2;
      float cosine[n / 2], sine[n / 2];
      load_values(angles, cosine);
      load_values(angles + p.rope_dim / 2, sine);
#pragma unroll
      for (int i = 0; i < n / 2; ++i) {
        rotate_pair(x[2 * i], x[2 * i + 1], cosine[i], sine[i]);
        if (p.round_bf16) x[2 * i] = round_bf16(x[2 * i]), x[2 * i + 1] = round_bf16(x[2 * i + 1]);
      }
    }
  }
  write_row<Config>(x, p, slot, lane);
}

template <typename Config>
cudaError_t launch(const KvRowsParams& p, cudaStream_t stream) {
  const int64_t blocks = (p.rows + Config::warps - 1) / Config::warps;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  kv_rows_kernel<Config><<<static_cast<unsigned>(blocks), Config::warps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename Row, typename In>
cudaError_t by_width(const KvRowsParams& p, cudaStream_t stream) {
  switch (p.d) {
    case 32:
      return launch<RowConfig<Row, In, 32>>(p, stream);
    case 64:
      return launch<RowConfig<Row, In, 64>>(p, stream);
    case 128:
      return launch<RowConfig<Row, In, 128>>(p, stream);
    case 256:
      return launch<RowConfig<Row, In, 256>>(p, stream);
    case 512:
      return launch<RowConfig<Row, In, 512>>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename In>
cudaError_t by_format(const KvRowsParams& p, cudaStream_t stream) {
  switch (p.format) {
    case RowFormat::main:
      return by_width<MainRow, In>(p, stream);
    case RowFormat::window:
      return by_width<WindowRow, In>(p, stream);
    case RowFormat::index:
      return by_width<IndexRow, In>(p, stream);
    case RowFormat::float32:
      return by_width<Float32Row, In>(p, stream);
  }
  return cudaErrorInvalidValue;
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

cudaError_t kv_rows(const KvRowsParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.capacity < 0 || p.capacity > kMaxSlots || p.rows_per_block < 0) return cudaErrorInvalidValue;
  if (p.rows_per_block && p.format != RowFormat::index) return cudaErrorInvalidValue;
  if (p.rows_per_block > kMaxSlots || (p.rows_per_block && p.capacity % p.rows_per_block)) return cudaErrorInvalidValue;
  if (p.rope && (p.rope_dim <= 0 || p.rope_dim % 16 || p.rope_dim > p.d)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  if (!p.x || !p.out || (!p.slots && p.capacity < p.rows)) return cudaErrorInvalidValue;
  if (!aligned(p.x) || !aligned(p.out) || !aligned(p.weight) || !aligned(p.rope)) return cudaErrorInvalidValue;
  return p.in == Dtype::bfloat16 ? by_format<__nv_bfloat16>(p, stream) : by_format<float>(p, stream);
}

}  // namespace mla_fp4::cuda
