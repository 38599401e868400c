// The cube core: L1 to L0 with its scales, products, and results from L0C to UB and global memory.
#pragma once

#include "asc_host/copies.hpp"

namespace asc_host {

template <class T>
constexpr Number number_of() {
  if constexpr (std::is_same_v<T, float>) return Number::kFloat;
  if constexpr (std::is_same_v<T, half>) return Number::kHalf;
  if constexpr (std::is_same_v<T, bfloat16_t>) return Number::kBfloat16;
  if constexpr (std::is_same_v<T, float8_e4m3_t>) return Number::kE4m3;
  if constexpr (std::is_same_v<T, float8_e5m2_t>) return Number::kE5m2;
  if constexpr (std::is_same_v<T, float4_e2m1x2_t>) return Number::kE2m1x2;
  static_assert(sizeof(T) == 0 || !std::is_integral_v<T>, "asc_mmad and asc_copy_l0c: integers are not emulated");
}

/// Fractals of 512 bytes: `m_steps` by `k_steps` of them from (m_start, k_start); columns of fractals are `l1_step` and
/// `l0_step` fractals apart.
struct Fractals {
  int m_start, k_start, m_steps, k_steps, l1_step, l0_step;
  bool transposed;  // rows of L1 become the 32-byte direction of L0
  int element;      // bytes
};
void copy_l1_to_l0(Space l0, uintptr_t to, uintptr_t l1, const Fractals& f, int line);
/// Blocks of 32 bytes of scales to the slots of an operand; `to` counts bytes of scales.
void copy_scales(Space scales, uint64_t to, uintptr_t l1, const Fractals& f, int line);

struct Product {
  int m, k, n, unit_flag;
  bool first;   // L0C is overwritten, not added to
  bool scaled;  // MX: one E8M0 for 32 values
  Number number;
};
void multiply(uintptr_t l0c, uintptr_t l0a, uintptr_t l0b, const Product& p, int line);

struct Result {
  int n, m;
  int64_t to_step, from_step;  // elements between rows of the target, rows of a column of fractals in L0C
  int unit_flag, quant, relu, dual, sub;
  Number number;
};
void copy_result_to_gm(void* gm, uintptr_t l0c, const Result& r, int line);
void copy_result_to_ub(void* ub, uintptr_t l0c, const Result& r, int line);

inline uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

}  // namespace asc_host

#define ASC_L1_TO_L0(name, space)                                                                                 \
  template <class T>                                                                                              \
  inline void name(T* l0, T* l1, int ms, int ks, int mn, int kn, int from, int to, int line = __builtin_LINE()) { \
    asc_host::copy_l1_to_l0(asc_host::Space::space, asc_host::address(l0), asc_host::address(l1),                 \
                            {ms, ks, mn, kn, from, to, false, sizeof(T)}, line);                                  \
  }                                                                                                               \
  template <class T>                                                                                              \
  inline void name##_transpose(T* l0, T* l1, int ms, int ks, int mn, int kn, int from, int to,                    \
                               int line = __builtin_LINE()) {                                                     \
    static_assert(!std::is_same_v<T, float4_e2m1x2_t>, #name "_transpose: FP4 is not emulated");                  \
    asc_host::copy_l1_to_l0(asc_host::Space::space, asc_host::address(l0), asc_host::address(l1),                 \
                            {ms, ks, mn, kn, from, to, true, sizeof(T)}, line);                                   \
  }
ASC_L1_TO_L0(asc_copy_l12l0a, kL0a)
ASC_L1_TO_L0(asc_copy_l12l0b, kL0b)
#undef ASC_L1_TO_L0

inline void asc_copy_l12l0a_mx(uint64_t to, fp8_e8m0_t* l1, int ms, int ks, int mn, int kn, int from, int step,
                               int line = __builtin_LINE()) {
  asc_host::copy_scales(asc_host::Space::kScaleA, to, asc_host::address(l1), {ms, ks, mn, kn, from, step, false, 1},
                        line);
}
inline void asc_copy_l12l0b_mx(uint64_t to, fp8_e8m0_t* l1, int ms, int ks, int mn, int kn, int from, int step,
                               int line = __builtin_LINE()) {
  asc_host::copy_scales(asc_host::Space::kScaleB, to, asc_host::address(l1), {ms, ks, mn, kn, from, step, false, 1},
                        line);
}

template <class A, class T>
inline void asc_mmad(A* c, T* a, T* b, int m, int k, int n, int unit_flag, bool, bool, bool first,
                     int line = __builtin_LINE()) {
  static_assert(std::is_same_v<A, float>, "asc_mmad: only float accumulators are emulated");
  static_assert(!std::is_same_v<T, float4_e2m1x2_t>, "asc_mmad: FP4 needs scales, see asc_mmad_mx");
  asc_host::multiply(asc_host::address(c), asc_host::address(a), asc_host::address(b),
                     {m, k, n, unit_flag, first, false, asc_host::number_of<T>()}, line);
}
template <class A, class T>
inline void asc_mmad_mx(A* c, T* a, T* b, int m, int k, int n, int unit_flag, bool, bool, bool first,
                        int line = __builtin_LINE()) {
  static_assert(std::is_same_v<A, float>, "asc_mmad_mx: only float accumulators are emulated");
  asc_host::multiply(asc_host::address(c), asc_host::address(a), asc_host::address(b),
                     {m, k, n, unit_flag, first, true, asc_host::number_of<T>()}, line);
}

inline void asc_set_l0c_copy_nz_para(int matrices, int, int) {
  if (matrices != 1) asc_host::fail("unsupported", "asc_set_l0c_copy_nz_para: only one matrix a copy is emulated");
}
inline void asc_set_mmad_direction_m() {}
inline void asc_set_mmad_direction_n() {}
inline void asc_disable_hf32() {}
inline void asc_enable_hf32() { asc_host::fail("unsupported", "asc_enable_hf32: HF32 products are not emulated"); }
inline void asc_set_hf32_round_mode(asc_hf32_round_mode) {}

template <class D, class A>
inline void asc_copy_l0c2gm(D* gm, A* l0c, int n, int m, int64_t to_step, int64_t from_step, asc_store_l2_cache_mode,
                            asc_unit_flag_mode unit_flag, asc_quant_mode quant, asc_relu_pre_mode relu,
                            int channel_split, int to_rows, int, int, int line = __builtin_LINE()) {
  static_assert(std::is_same_v<A, float>, "asc_copy_l0c2gm: only float accumulators are emulated");
  if (!to_rows || channel_split) asc_host::fail("unsupported", "asc_copy_l0c2gm: only plain rows are emulated");
  asc_host::copy_result_to_gm(
      gm, asc_host::address(l0c),
      {n, m, to_step, from_step, int(unit_flag), int(quant), int(relu), 0, 0, asc_host::number_of<D>()}, line);
}
template <class D, class A>
inline void asc_copy_l0c2ub(D* ub, A* l0c, int n, int m, int64_t to_step, int64_t from_step, int sub,
                            asc_dual_dst_mode dual, asc_unit_flag_mode unit_flag, asc_quant_mode quant,
                            asc_relu_pre_mode relu, int channel_split, int to_rows, int, int,
                            int line = __builtin_LINE()) {
  static_assert(std::is_same_v<A, float>, "asc_copy_l0c2ub: only float accumulators are emulated");
  if (!to_rows || channel_split) asc_host::fail("unsupported", "asc_copy_l0c2ub: only plain rows are emulated");
  asc_host::copy_result_to_ub(
      ub, asc_host::address(l0c),
      {n, m, to_step, from_step, int(unit_flag), int(quant), int(relu), int(dual), sub, asc_host::number_of<D>()},
      line);
}
