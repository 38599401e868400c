// The SM100 expert kernels' own code on host threads, one CTA or pair after the other. The emulation is that of
// mla_fp4's tests; products of kind::mxf8f6f4 and copies of padded codes are written here, from the instruction set's
// tables.
#include "sm100_tensor.hpp"

static Index gridDim{0};

inline uint32_t emulated_max(uint32_t value) {
  me->lanes[threadIdx.x] = value;
  __syncwarp();
  uint32_t top = 0;
  for (unsigned i = 0; i < 32; ++i) top = max(top, static_cast<uint32_t>(me->lanes[threadIdx.x / 32 * 32 + i]));
  __syncwarp();
  return top;
}

namespace mega_moe::sm100 {

namespace ptx = kernel_core::ptx;
namespace cuda = kernel_core::cuda;
using mla_fp4::sm100::cluster_sync;
using mla_fp4::sm100::load_shared_4;
using mla_fp4::sm100::rank_in_pair;
using mla_fp4::sm100::shared_base;
using mla_fp4::sm100::store_shared_4;
using mla_fp4::sm100::wait;

inline uint32_t warp_max(uint32_t v) { return emulated_max(v); }
inline uint32_t e4m3_pair(float low, float high) { return cuda::encode_e4m3(low) | cuda::encode_e4m3(high) << 8; }
template <int kCtas>
void arrive_first(uint32_t barrier) {
  change(group->ctas[0].get(), barrier, 1, 0);
}

// 128 rows of 128 bytes
inline void copy_values(uint32_t to, const CUtensorMap& map, int k, int row, uint32_t barrier) {
  require(to % 1024 == 0 && k % 128 == 0 && k + 128 <= map.row_bytes, "a copy of values");
  require(row >= 0 && row % 128 == 0 && row + 128 <= map.rows, "rows of a copy");
  group->copies.add([=, &map, cta = me] {
    for (int i = 0; i < 128 * 8; ++i) {
      const int r = i / 8, piece = i % 8;
      std::memcpy(cta->shared + to + r * 128 + (piece ^ r % 8) * 16,
                  map.base + int64_t{row + r} * map.row_bytes + k + piece * 16, 16);
    }
    change(cta, barrier, 0, -128 * 128);
  });
}

// 128 rows of 128 codes: 16 of them in the first eight of 16 bytes, whose number in the row's 128 bytes is xor-ed with
// the row's among eight. Padding is poison.
inline void copy_codes(uint32_t to, const CUtensorMap& map, int k, int row, uint32_t barrier) {
  require(to % 1024 == 0 && k % 128 == 0 && k / 2 + 64 <= map.row_bytes, "a copy of codes");
  require(row >= 0 && row % 128 == 0 && row + 128 <= map.rows, "rows of a copy");
  group->copies.add([=, &map, cta = me] {
    for (int r = 0; r < 128; ++r) {
      const uint8_t* from = map.base + int64_t{row + r} * map.row_bytes + k / 2;
      for (int piece = 0; piece < 8; ++piece) {
        uint8_t* at = cta->shared + to + r * 128 + (piece ^ r % 8) * 16;
        std::memcpy(at, from + piece * 8, 8);
        std::memset(at + 8, 0xEE, 8);
      }
    }
    change(cta, barrier, 0, -128 * 64);
  });
}

template <int kCtas>
void copy_scales(uint32_t to, uint64_t from) {
  require(from >> 61 == 0 && (from >> 46 & 7) == 1 && to % 4 == 0, "scales in shared memory");
  group->tensor.add([=, cta = me, cluster = group] {
    const uint32_t start = static_cast<uint32_t>(from & 0x3FFF) << 4,
                   stride = static_cast<uint32_t>(from >> 32 & 0x3FFF) << 4;
    for (int rank = 0; rank < kCtas; ++rank) {
      Cta* of = kCtas == 1 ? cta : cluster->ctas[static_cast<size_t>(rank)].get();
      for (uint32_t lane = 0; lane < 128; ++lane) {
        std::memcpy(&of->tmem[lane][to & 0xFFFF], of->shared + start + lane % 32 / 8 * stride + lane % 8 * 16, 16);
      }
    }
  });
}

template <int kCtas>
void multiply_mx(uint32_t to, uint64_t a, uint64_t b, uint32_t kind, uint32_t a_scales, uint32_t b_scales,
                 bool accumulate) {
  static const double kValues[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  require((kind & 15) == 0 && (kind >> 6 & 1) == 0 && (kind >> 7 & 7) % 5 == 0 && (kind >> 10 & 127) == 0 &&
              (kind >> 23 & 15) == 1 && (kind >> 27 & 3) == kCtas && kind >> 31 == 0,
          "kind of a product");
  require((a >> 61) == 2 && (b >> 61) == 2 && (a >> 46 & 7) == 1 && (b >> 46 & 7) == 1, "operands of a product");
  const uint32_t n_all = (kind >> 17 & 63) * 8, a_byte = kind >> 29 & 3, b_byte = kind >> 4 & 3;
  const bool packed = (kind >> 7 & 7) == 5;
  require(n_all > 0 && n_all <= 256 && n_all % (16 * kCtas) == 0, "columns of a product");
  group->tensor.add([=, cta = me, cluster = group] {
    const auto in = [&](uint32_t rank) { return kCtas == 1 ? cta : cluster->ctas[rank].get(); };
    const auto place = [](uint64_t d, uint32_t row, uint32_t byte) {
      const auto field = [&](int shift) { return static_cast<uint32_t>(d >> shift & 0x3FFF) << 4; };
      const uint32_t where = field(0) + row / 8 * field(32) + row % 8 * 128 + byte;
      return where ^ (where >> 7 & 7) << 4;
    };
    const auto scale = [](const Cta* of, uint32_t column, uint32_t row, uint32_t byte) {
      const uint32_t quarter = row % 4;  // the same in each
      return cuda::ue8m0_float(of->tmem[row % 32 + 32 * quarter][column + row / 32] >> (8 * byte) & 0xFF);
    };
    for (uint32_t rank = 0; rank < kCtas; ++rank) {
      Cta* of = in(rank);  // has these rows of M, and scales of all columns
      std::vector<double> left(128 * 32), right(n_all * 32);
      for (uint32_t i = 0; i < 128 * 32; ++i) {
        const uint32_t row = i / 32, k = i % 32;
        const uint8_t byte = of->shared[place(a, row, packed ? k / 16 * 16 + k % 16 / 2 : k)];
        const double value = packed ? kValues[byte >> (4 * (k % 2)) & 15] : static_cast<double>(cuda::e4m3_float(byte));
        left[i] = value * scale(of, a_scales, row, a_byte);
      }
      for (uint32_t i = 0; i < n_all * 32; ++i) {
        const uint32_t n = i / 32, own = n_all / kCtas;
        const uint8_t code = in(n / own)->shared[place(b, n % own, i % 32)];
        right[i] = static_cast<double>(cuda::e4m3_float(code)) * scale(of, b_scales, n, b_byte);
      }
      for (uint32_t m = 0; m < 128; ++m) {
        for (uint32_t n = 0; n < n_all; ++n) {
          auto& word = of->tmem[(to >> 16) + m][(to & 0xFFFF) + n];
          double sum = accumulate ? cuda::bits_float(word) : 0.0;
          for (int k = 0; k < 32; ++k) sum += left[m * 32 + k] * right[n * 32 + k];
          word = cuda::float_bits(static_cast<float>(sum));
        }
      }
    }
  });
}

}  // namespace mega_moe::sm100

#include "cuda/sm100/expert_kernel_sm100.cuh"

using namespace mega_moe::sm100;

namespace {

template <typename C, bool kSecond>
void product(const ExpertsParams& p, const CUtensorMap& map, const CUtensorMap& shared, unsigned groups) {
  gridDim.x = groups * C::kCtas;
  for (unsigned i = 0; i < gridDim.x; i += C::kCtas) {
    run_group(C::kCtas, C::kThreads, i, [&] { experts_sm100_kernel<C, kSecond>(p, map, shared); });
  }
}

template <typename C>
void run(const ExpertsParams& p, unsigned groups) {
  const CUtensorMap first = {p.w13, int64_t{p.experts} * 2 * p.inter, p.d / 2},
                    second = {p.w2, int64_t{p.experts} * p.d, p.inter / 2},
                    shared_first = {p.shared13, int64_t{2} * p.inter, p.d}, shared_second = {p.shared2, p.d, p.inter};
  const int64_t tiles = most_tiles(p.tokens, p.slots, p.experts, p.shared13 != nullptr, C::kTokens);
  for (unsigned i = 0; i < tiles * kGatherParts; ++i) {
    run_group(1, kGatherThreads, i, [&] { gather_experts_sm100<C::kTokens>(p); });
  }
  product<C, false>(p, first, shared_first, groups);
  product<C, true>(p, second, shared_second, groups);
  for (unsigned i = 0; i * kCombineThreads * 4 < static_cast<unsigned>(p.tokens * p.d); ++i) {
    run_group(1, kCombineThreads, i, [&] { combine_experts_sm100(p); });
  }
}

}  // namespace

extern "C" {

// `pointers`: x, ids, weights, offsets, rows, w13, w2, scale13, scale2, out, images, hidden, parts, shared13, shared2;
// `numbers`: x_is_float, tokens, slots, d, inter, experts, out_is_float, tile, ctas, groups
void run_experts(void* const* pointers, const int64_t* numbers, float limit) {
  ExpertsParams p{};
  p.x = pointers[0], p.out = pointers[9], p.limit = limit;
  p.ids = static_cast<int32_t*>(pointers[1]), p.weights = static_cast<float*>(pointers[2]);
  p.offsets = static_cast<int32_t*>(pointers[3]), p.rows = static_cast<int32_t*>(pointers[4]);
  p.w13 = static_cast<uint8_t*>(pointers[5]), p.w2 = static_cast<uint8_t*>(pointers[6]);
  p.scale13 = static_cast<uint8_t*>(pointers[7]), p.scale2 = static_cast<uint8_t*>(pointers[8]);
  p.images = static_cast<uint8_t*>(pointers[10]), p.hidden = static_cast<uint8_t*>(pointers[11]);
  p.parts = static_cast<float*>(pointers[12]);
  p.shared13 = static_cast<uint8_t*>(pointers[13]), p.shared2 = static_cast<uint8_t*>(pointers[14]);
  const auto number = [&](int i) { return static_cast<int>(numbers[i]); };
  p.x_is_float = number(0), p.tokens = number(1), p.slots = number(2), p.d = number(3), p.inter = number(4);
  p.experts = number(5), p.out_is_float = number(6);
  const unsigned groups = static_cast<unsigned>(numbers[9]);
  switch (numbers[7] * 10 + numbers[8]) {
    case 161:
      return run<ExpertConfig<16, 1, 6>>(p, groups);
    case 641:
      return run<ExpertConfig<64, 1, 5>>(p, groups);
    case 642:
      return run<ExpertConfig<64, 2, 5>>(p, groups);
    default:
      return run<ExpertConfig<96, 2, 5>>(p, groups);
  }
}

int64_t tiles_at_most(int64_t tokens, int64_t slots, int64_t experts, int shared, int64_t tile) {
  return most_tiles(tokens, slots, experts, shared != 0, tile);
}
uint32_t mx_kind(int e2m1, uint32_t m, uint32_t n, uint32_t byte) {
  return mx_product(e2m1 ? Weight::e2m1 : Weight::e4m3, m, n, byte);
}
uint32_t place_of_code(uint32_t row, uint32_t k) { return swizzle128(row, padded_byte(k)); }
uint32_t place_of_value(uint32_t row, uint32_t k) { return swizzle128(row, k); }
uint32_t place_of_scale(uint32_t row, uint32_t part) { return scale_place(row, part); }
int columns_of(int ctas, int rows) { return ctas == 1 ? product_columns<1>(rows) : product_columns<2>(rows); }
int row_of(int second, int inter, int d, int expert, int block, int product) {
  return weight_row(second != 0, inter, d, expert, block, product);
}
void scale_of(uint32_t amax, uint32_t* byte, uint32_t* inverse, uint32_t* divided) {
  const auto whole = kernel_core::cuda::group_scale(kernel_core::cuda::WindowRow{}, amax);
  *byte = activation_scale(amax), *inverse = kernel_core::cuda::float_bits(inverse_scale(*byte));
  *divided = kernel_core::cuda::float_bits(whole.inverse);
}
// expert, block, tile, rows, first of every item
void all_work(const int32_t* offsets, int experts, int blocks, int tokens, int32_t* out) {
  std::vector<int> before(1, 0);
  for (int e = 0; e < experts; ++e) {
    before.push_back(before.back() + (offsets[e + 1] - offsets[e] + tokens - 1) / tokens);
  }
  for (int item = 0; item < before.back() * blocks; ++item) {
    const Work w =
        find_work([&](int e) { return before[static_cast<size_t>(e)]; }, offsets, experts, blocks, tokens, item);
    for (int value : {w.expert, w.block, w.tile, w.rows, w.first}) *out++ = value;
  }
}
}
