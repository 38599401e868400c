// Tensor memory and products of SM100 for sm100_threads.hpp. No proof of the layouts that the hardware uses: they are
// written here a second time, from the tables of kernel_core/cuda/tcgen05.cuh and the instruction set's.
#pragma once

#include "sm100_threads.hpp"

namespace kernel_core::tcgen05 {

// --- products, by the tables of tcgen05.cuh --------------------------------------------------------------------------

// 16-bit element (outer, k) of a swizzled operand
inline float operand(const uint8_t* shared, uint64_t d, bool mn, uint32_t outer, uint32_t k) {
  const auto field = [&](int shift) { return static_cast<uint32_t>(d >> shift & 0x3FFF) << 4; };
  uint32_t where = field(0);
  if (mn) {
    where += k / 8 * field(32) + k % 8 * 128 + outer / 64 * field(16) + outer % 64 * 2;
  } else {
    where += outer / 8 * field(32) + outer % 8 * 128 + 2 * k;
  }
  where ^= (where >> 7 & 7) << 4;
  uint16_t bits;
  std::memcpy(&bits, shared + where, 2);
  return cuda::bf16_float(bits);
}

// Lane and column that row m, column n of an accumulator have in CTA `rank`; -1: another CTA
struct Cell {
  int lane, column;
};
inline Cell cell(int ctas, uint32_t m_all, uint32_t n_all, uint32_t m, uint32_t n, uint32_t rank) {
  if (ctas == 2) {
    if (m / 64 != rank) return {-1, 0};
    return {static_cast<int>(m % 64 + 64 * (n / (n_all / 2))), static_cast<int>(n % (n_all / 2))};
  }
  if (m_all == 64) return {static_cast<int>(m / 16 * 32 + m % 16), static_cast<int>(n)};
  return {static_cast<int>(m), static_cast<int>(n)};
}

template <int kCtas>
void multiply_bf16(uint32_t to, uint64_t a, uint64_t b, uint32_t kind, bool accumulate) {
  require((kind & 0xFFF8007F & ~(31u << 24) & ~(63u << 17)) == 0x10 && (kind >> 7 & 0x3F) == 9, "kind of a product");
  require((a >> 61) == 2 && (b >> 61) == 2 && (a >> 46 & 7) == 1 && (b >> 46 & 7) == 1, "operands of a product");
  const uint32_t m_all = (kind >> 24 & 31) * 16, n_all = (kind >> 17 & 63) * 8;
  require(me->rank == 0 && m_all == (kCtas == 2 ? 128 : 64), "rows of a product");
  const bool a_mn = kind >> 15 & 1, b_mn = kind >> 16 & 1;
  group->tensor.add([=, cluster = group] {
    std::vector<float> left(m_all * 16), right(n_all * 16);
    for (uint32_t i = 0; i < m_all * 16; ++i) {
      const uint32_t m = i / 16, own = m_all / kCtas;
      left[i] = operand(cluster->ctas[m / own]->shared, a, a_mn, m % own, i % 16);
    }
    for (uint32_t i = 0; i < n_all * 16; ++i) {
      const uint32_t n = i / 16, own = n_all / kCtas;
      right[i] = operand(cluster->ctas[n / own]->shared, b, b_mn, n % own, i % 16);
    }
    for (uint32_t m = 0; m < m_all; ++m) {
      for (uint32_t n = 0; n < n_all; ++n) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += left[m * 16 + k] * right[n * 16 + k];
        for (uint32_t rank = 0; rank < kCtas; ++rank) {
          const Cell c = cell(kCtas, m_all, n_all, m, n, rank);
          if (c.lane < 0) continue;
          auto& word = cluster->ctas[rank]->tmem[(to >> 16) + c.lane][(to & 0xFFFF) + c.column];
          word = cuda::float_bits(accumulate ? cuda::bits_float(word) + sum : sum);
        }
      }
    }
  });
}

inline void multiply_mxf4(uint32_t to, uint64_t a, uint64_t b, uint32_t kind, uint32_t a_scales, uint32_t b_scales,
                          bool accumulate) {
  static const float kValues[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  require((kind & 0x0780004F) == 0x00800000 >> 0 && (kind >> 7 & 0x1F) == 9 && (kind >> 27 & 3) == 1,
          "kind of a product");
  require((a >> 61) == 4 && (b >> 61) == 4, "operands of a product");
  const uint32_t n_all = (kind >> 17 & 63) * 8, a_half = kind >> 29 & 3, b_half = kind >> 4 & 3;
  require(n_all % 16 == 0 && n_all <= 256, "columns of a product");
  group->tensor.add([=, cta = me] {
    const auto element = [&](uint64_t d, uint32_t row, uint32_t k) {
      const auto field = [&](int shift) { return static_cast<uint32_t>(d >> shift & 0x3FFF) << 4; };
      uint32_t where = field(0) + row / 8 * field(32) + row % 8 * 64 + k / 2;
      where ^= (where >> 7 & 3) << 4;
      return kValues[cta->shared[where] >> (4 * (k % 2)) & 15];
    };
    const auto scale = [&](uint32_t column, uint32_t row, uint32_t half, uint32_t group_of) {
      const uint32_t quarter = row % 4;  // the same in each
      return cuda::ue8m0_float(cta->tmem[row % 32 + 32 * quarter][column + row / 32] >> (8 * (half + group_of)) & 0xFF);
    };
    std::vector<double> left(128 * 64), right(n_all * 64);
    for (uint32_t i = 0; i < 128 * 64; ++i) {
      left[i] = static_cast<double>(element(a, i / 64, i % 64)) * scale(a_scales, i / 64, a_half, i % 64 / 32);
    }
    for (uint32_t i = 0; i < n_all * 64; ++i) {
      right[i] = static_cast<double>(element(b, i / 64, i % 64)) * scale(b_scales, i / 64, b_half, i % 64 / 32);
    }
    for (uint32_t m = 0; m < 128; ++m) {
      for (uint32_t n = 0; n < n_all; ++n) {
        auto& word = cta->tmem[(to >> 16) + m][(to & 0xFFFF) + n];
        double sum = accumulate ? cuda::bits_float(word) : 0.0;
        for (int k = 0; k < 64; ++k) sum += left[m * 64 + k] * right[n * 64 + k];
        word = cuda::float_bits(static_cast<float>(sum));
      }
    }
  });
}

inline void copy_scales(uint32_t to, uint64_t from) {
  require(from >> 61 == 0 && (from >> 46 & 7) == 1, "scales in shared memory");
  group->tensor.add([=, cta = me] {
    const uint32_t start = static_cast<uint32_t>(from & 0x3FFF) << 4,
                   stride = static_cast<uint32_t>(from >> 32 & 0x3FFF) << 4;
    for (uint32_t lane = 0; lane < 128; ++lane) {
      std::memcpy(&cta->tmem[lane][to & 0xFFFF], cta->shared + start + lane % 32 / 8 * stride + lane % 8 * 16, 16);
    }
  });
}

template <int kCtas>
void commit(uint32_t barrier) {
  group->tensor.add([=, cta = me, cluster = group] {
    for (int rank = 0; rank < kCtas; ++rank) {
      change(kCtas == 1 ? cta : cluster->ctas[static_cast<size_t>(rank)].get(), barrier, 1, 0);
    }
  });
}

template <int kCtas>
void allocate(uint32_t where, uint32_t columns) {
  require(columns == 512, "all of tensor memory");
  const uint32_t base = 0;
  std::memcpy(at(where), &base, 4);
}
template <int kCtas>
void deallocate(uint32_t, uint32_t) {}
inline void fence_before() {}
inline void fence_after() {}
inline void wait_load() {}
inline void wait_store() {}
template <int kCount>
void pin(float (&)[kCount]) {}

inline uint32_t own_lane(uint32_t address) {
  require(address >> 16 == threadIdx.x / 32 % 4 * 32, "lanes of another warp");
  return (address >> 16) + threadIdx.x % 32;
}
template <int kCount>
void load(float (&v)[kCount], uint32_t from) {
  std::memcpy(v, &me->tmem[own_lane(from)][from & 0xFFFF], sizeof(v));
}
template <int kCount>
void store(uint32_t to, const float (&v)[kCount]) {
  std::memcpy(&me->tmem[own_lane(to)][to & 0xFFFF], v, sizeof(v));
}

}  // namespace kernel_core::tcgen05
