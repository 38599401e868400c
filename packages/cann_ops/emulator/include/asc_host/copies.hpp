// Copies between global memory, UB and L1, as the engines MTE2 and MTE3 do them.
#pragma once

#include "asc_host/tags.hpp"

namespace asc_host {

/// Lengths and distances in bytes; distances from start to start. Each burst begins on 32 bytes of UB and fills up to
/// 32 bytes: with the pad value where `use_pad_value`, else with bytes that count as undefined.
struct UbBursts {
  int64_t count, bytes, gm_step, ub_step;
  int left, right, element;  // padding, in elements of `element` bytes
  bool use_pad_value;
};
void copy_gm_to_ub(void* ub, const void* gm, const UbBursts& bursts, int line);
void copy_ub_to_gm(void* gm, const void* ub, const UbBursts& bursts, int line);
void set_pad_value(uint64_t bits);

enum class Atomic { kNone, kAdd, kMax, kMin };
enum class Number { kFloat, kHalf, kBfloat16, kInt8, kInt16, kInt32, kE4m3, kE5m2, kE2m1x2 };
/// Stores of MTE3 and the fixpipe to global memory combine with what is there.
void set_atomic(Atomic op, Number number);

/// `rows` rows of `columns` elements to fractals of 16 rows by 32 bytes: the next 32 bytes of a row lie `block_step`
/// blocks of 32 bytes on. `transposed`: the columns are what is contiguous in L1 rows, the source has them apart.
struct ToFractals {
  int64_t rows, columns, step;  // `step` bytes between rows of the source
  int element;
  bool transposed;
};
void set_fractal_steps(int row_step, int block_step);
void copy_gm_to_l1(uintptr_t l1, const void* gm, const ToFractals& shape, int line);
void copy_ub_to_l1(uintptr_t l1, const void* ub, int count, int blocks, int ub_gap, int l1_gap, int line);
void fill_l1(uintptr_t l1, uint32_t word, int word_bytes, uint64_t repeat, uint64_t blocks, uint64_t gap, int line);

}  // namespace asc_host

struct asc_fill_l1_config {
  uint64_t repeat = 1, blk_num = 1, dst_gap = 0;
};

template <class T>
inline void asc_copy_gm2ub_align(T* ub, T* gm, int64_t count, int64_t bytes, int left, int right, bool use_pad_value,
                                 asc_load_l2_cache_mode, int64_t gm_step, int64_t ub_step,
                                 int line = __builtin_LINE()) {
  asc_host::copy_gm_to_ub(ub, gm, {count, bytes, gm_step, ub_step, left, right, int(sizeof(T)), use_pad_value}, line);
}
template <class T>
inline void asc_copy_ub2gm_align(T* gm, T* ub, int64_t count, int64_t bytes, asc_store_l2_cache_mode, int64_t gm_step,
                                 int64_t ub_step, int line = __builtin_LINE()) {
  asc_host::copy_ub_to_gm(gm, ub, {count, bytes, gm_step, ub_step, 0, 0, int(sizeof(T)), false}, line);
}
template <class T>
inline void asc_set_copy_pad_val(T value) {
  static_assert(sizeof(T) <= 4, "asc_set_copy_pad_val: values of 8, 16 and 32 bits");
  asc_host::set_pad_value(asc_host::to_bits(value));
}

#define ASC_ATOMICS(suffix, number)                                         \
  inline void asc_set_atomic_add_##suffix() {                               \
    asc_host::set_atomic(asc_host::Atomic::kAdd, asc_host::Number::number); \
  }                                                                         \
  inline void asc_set_atomic_max_##suffix() {                               \
    asc_host::set_atomic(asc_host::Atomic::kMax, asc_host::Number::number); \
  }                                                                         \
  inline void asc_set_atomic_min_##suffix() { asc_host::set_atomic(asc_host::Atomic::kMin, asc_host::Number::number); }
ASC_ATOMICS(float, kFloat)
ASC_ATOMICS(float16, kHalf)
ASC_ATOMICS(bfloat, kBfloat16)
ASC_ATOMICS(int8, kInt8)
ASC_ATOMICS(int16, kInt16)
ASC_ATOMICS(int32, kInt32)
#undef ASC_ATOMICS
inline void asc_set_atomic_none() { asc_host::set_atomic(asc_host::Atomic::kNone, asc_host::Number::kFloat); }

inline void asc_set_gm2l1_nz_para(int matrices, int row_step, int block_step, int) {
  if (matrices != 1) asc_host::fail("unsupported", "asc_set_gm2l1_nz_para: only one matrix a copy is emulated");
  asc_host::set_fractal_steps(row_step, block_step);
}
template <class T>
inline void asc_copy_gm2l1_nd2nz(T* l1, T* gm, int64_t step, asc_load_l2_cache_mode, int64_t rows, int64_t columns,
                                 int64_t, bool, int line = __builtin_LINE()) {
  asc_host::copy_gm_to_l1(reinterpret_cast<uintptr_t>(l1), gm, {rows, columns, step, int(sizeof(T)), false}, line);
}
template <class T>
inline void asc_copy_gm2l1_dn2nz(T* l1, T* gm, int64_t step, asc_load_l2_cache_mode, int64_t rows, int64_t columns,
                                 int64_t, bool, int line = __builtin_LINE()) {
  asc_host::copy_gm_to_l1(reinterpret_cast<uintptr_t>(l1), gm, {rows, columns, step, int(sizeof(T)), true}, line);
}
inline void asc_copy_ub2l1(void* l1, void* ub, int count, int blocks, int ub_gap, int l1_gap,
                           int line = __builtin_LINE()) {
  asc_host::copy_ub_to_l1(reinterpret_cast<uintptr_t>(l1), ub, count, blocks, ub_gap, l1_gap, line);
}
template <class T>
inline void asc_fill_l1(T* l1, uint32_t word, asc_fill_l1_config c, int line = __builtin_LINE()) {
  asc_host::fill_l1(reinterpret_cast<uintptr_t>(l1), word, sizeof(T), c.repeat, c.blk_num, c.dst_gap, line);
}

/// Scalar accesses of global memory that bypass the data cache; the compiler's hooks see them as plain ones.
template <class T>
inline T asc_load_dev(T* p) {
  return *p;
}
template <class T>
inline void asc_store_dev(T* p, T value) {
  *p = value;
}
