// Lane-wise arithmetic. Results are IEEE and rounded once; the device approximates exp, ln, div and sqrt and flushes
// subnormals, which is not modelled.
#pragma once

#include "asc_host/registers.hpp"

namespace asc_host {

template <class T>
ASC_PLAIN ASC_INLINE inline T add(T a, T b) {
  if constexpr (kIsFloat<T>) return static_cast<T>(wide_t<T>(a) + wide_t<T>(b));
  if constexpr (kIsInt<T>) return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
template <class T>
ASC_PLAIN ASC_INLINE inline T sub(T a, T b) {
  if constexpr (kIsFloat<T>) return static_cast<T>(wide_t<T>(a) - wide_t<T>(b));
  if constexpr (kIsInt<T>) return static_cast<T>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
template <class T>
ASC_PLAIN ASC_INLINE inline T mul(T a, T b) {
  if constexpr (kIsFloat<T>) return static_cast<T>(wide_t<T>(a) * wide_t<T>(b));
  if constexpr (kIsInt<T>) return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <class T>
ASC_PLAIN ASC_INLINE inline T div(T a, T b) {
  if constexpr (kIsFloat<T>) return static_cast<T>(wide_t<T>(a) / wide_t<T>(b));
  if constexpr (kIsInt<T>) {
    if (b == 0) fail("value", "asc_div: an integer lane is divided by zero");
    if constexpr (std::is_signed_v<T>) {
      if (b == T(-1)) return sub<T>(0, a);
    }
    return static_cast<T>(a / b);
  }
}
/// NaN in, NaN out.
template <class T>
ASC_PLAIN ASC_INLINE inline T larger(T a, T b) {
  wide_t<T> x = a, y = b;
  return (x > y || x != x) ? a : b;
}
template <class T>
ASC_PLAIN ASC_INLINE inline T smaller(T a, T b) {
  wide_t<T> x = a, y = b;
  return (x < y || x != x) ? a : b;
}
template <class T>
ASC_PLAIN ASC_INLINE inline T difference(T a, T b) {
  return wide_t<T>(a) > wide_t<T>(b) ? sub<T>(a, b) : sub<T>(b, a);
}
/// a * b + c rounded once.
template <class T>
ASC_PLAIN ASC_INLINE inline T multiply_add(T a, T b, T c) {
  if constexpr (std::is_same_v<T, float>) {
    return std::fma(a, b, c);
  } else if constexpr (kIsFloat<T>) {
    return static_cast<T>(std::fma(wide_t<T>(a), wide_t<T>(b), wide_t<T>(c)));
  } else {
    return add<T>(mul<T>(a, b), c);
  }
}
template <class T, class S>
ASC_PLAIN ASC_INLINE inline T shift_left(T a, S count) {
  int64_t n = static_cast<int64_t>(count);
  if (n < 0) fail("value", "asc_shiftleft: got a shift of %lld, allowed are 0 and more", static_cast<long long>(n));
  return n >= int64_t(8 * sizeof(T)) ? T(0) : static_cast<T>(static_cast<uint64_t>(a) << n);
}
template <class T, class S>
ASC_PLAIN ASC_INLINE inline T shift_right(T a, S count) {
  int64_t n = static_cast<int64_t>(count);
  if (n < 0) fail("value", "asc_shiftright: got a shift of %lld, allowed are 0 and more", static_cast<long long>(n));
  int64_t most = int64_t(8 * sizeof(T)) - 1;
  if (n > most) return std::is_signed_v<T> ? static_cast<T>(a >> most) : T(0);
  return static_cast<T>(a >> n);
}
template <class T>
ASC_PLAIN ASC_INLINE inline T negative(T a) {
  if constexpr (kIsFloat<T>) return static_cast<T>(-wide_t<T>(a));
  if constexpr (kIsInt<T>) return sub<T>(0, a);
}
template <class T>
ASC_PLAIN ASC_INLINE inline T magnitude(T a) {
  if constexpr (kIsFloat<T>) return static_cast<T>(std::fabs(wide_t<T>(a)));
  if constexpr (kIsInt<T>) return a < T(0) ? sub<T>(0, a) : a;
}

}  // namespace asc_host

// Two registers, and a register with a scalar of its type.
#define ASC_BINARY(name, expression)                                                                          \
  template <class T>                                                                                          \
  ASC_PLAIN inline void name(asc_host::VReg<T>& d, asc_host::VReg<T> a, asc_host::VReg<T> b, vector_bool m) { \
    asc_host::map_lanes(d, a, b, m, [](T x, T y) ASC_INLINE { return expression; });                          \
  }
ASC_BINARY(asc_add, asc_host::add<T>(x, y))
ASC_BINARY(asc_sub, asc_host::sub<T>(x, y))
ASC_BINARY(asc_mul, asc_host::mul<T>(x, y))
ASC_BINARY(asc_div, asc_host::div<T>(x, y))
ASC_BINARY(asc_max, asc_host::larger<T>(x, y))
ASC_BINARY(asc_min, asc_host::smaller<T>(x, y))
ASC_BINARY(asc_abs_sub, asc_host::difference<T>(x, y))
ASC_BINARY(asc_and, asc_host::from_bits<T>(asc_host::to_bits(x) & asc_host::to_bits(y)))
ASC_BINARY(asc_or, asc_host::from_bits<T>(asc_host::to_bits(x) | asc_host::to_bits(y)))
ASC_BINARY(asc_xor, asc_host::from_bits<T>(asc_host::to_bits(x) ^ asc_host::to_bits(y)))
ASC_BINARY(asc_exp_sub, static_cast<T>(std::exp(float(x) - float(y))))
ASC_BINARY(asc_prelu, asc_host::wide_t<T>(x) > 0 ? x : asc_host::mul<T>(x, y))
#undef ASC_BINARY

#define ASC_SCALAR(name, expression)                                                               \
  template <class T, class S>                                                                      \
  ASC_PLAIN inline void name(asc_host::VReg<T>& d, asc_host::VReg<T> a, S scalar, vector_bool m) { \
    T y = static_cast<T>(scalar);                                                                  \
    asc_host::map_lanes(d, a, m, [y](T x) ASC_INLINE { return expression; });                      \
  }
ASC_SCALAR(asc_add_scalar, asc_host::add<T>(x, y))
ASC_SCALAR(asc_mul_scalar, asc_host::mul<T>(x, y))
ASC_SCALAR(asc_max_scalar, asc_host::larger<T>(x, y))
ASC_SCALAR(asc_min_scalar, asc_host::smaller<T>(x, y))
ASC_SCALAR(asc_leakyrelu, asc_host::wide_t<T>(x) > 0 ? x : asc_host::mul<T>(x, y))
#undef ASC_SCALAR

#define ASC_UNARY(name, expression)                                                      \
  template <class T>                                                                     \
  ASC_PLAIN inline void name(asc_host::VReg<T>& d, asc_host::VReg<T> a, vector_bool m) { \
    asc_host::map_lanes(d, a, m, [](T x) ASC_INLINE { return expression; });             \
  }
ASC_UNARY(asc_abs, asc_host::magnitude<T>(x))
ASC_UNARY(asc_neg, asc_host::negative<T>(x))
ASC_UNARY(asc_relu, asc_host::wide_t<T>(x) > 0 ? x : T(0))
ASC_UNARY(asc_exp, static_cast<T>(std::exp(float(x))))
ASC_UNARY(asc_ln, static_cast<T>(std::log(float(x))))
ASC_UNARY(asc_sqrt, static_cast<T>(std::sqrt(float(x))))
ASC_UNARY(asc_not, asc_host::from_bits<T>(static_cast<asc_host::bits_t<T>>(~asc_host::to_bits(x))))
#undef ASC_UNARY

template <class T, class S>
ASC_PLAIN inline void asc_shiftleft(asc_host::VReg<T>& d, asc_host::VReg<T> a, asc_host::VReg<S> n, vector_bool m) {
  asc_host::map_lanes(d, a, n, m, [](T x, S y) ASC_INLINE { return asc_host::shift_left(x, y); });
}
template <class T, class S>
ASC_PLAIN inline void asc_shiftright(asc_host::VReg<T>& d, asc_host::VReg<T> a, asc_host::VReg<S> n, vector_bool m) {
  asc_host::map_lanes(d, a, n, m, [](T x, S y) ASC_INLINE { return asc_host::shift_right(x, y); });
}
template <class T, class S>
ASC_PLAIN inline void asc_shiftleft_scalar(asc_host::VReg<T>& d, asc_host::VReg<T> a, S n, vector_bool m) {
  asc_host::map_lanes(d, a, m, [n](T x) ASC_INLINE { return asc_host::shift_left(x, n); });
}
template <class T, class S>
ASC_PLAIN inline void asc_shiftright_scalar(asc_host::VReg<T>& d, asc_host::VReg<T> a, S n, vector_bool m) {
  asc_host::map_lanes(d, a, m, [n](T x) ASC_INLINE { return asc_host::shift_right(x, n); });
}

namespace asc_host {

/// d = f(d, a, b) in active lanes; the others are zero or stay.
template <class T, class F>
ASC_PLAIN inline void update_lanes(VReg<T>& d, const VReg<T>& a, const VReg<T>& b, const vector_bool& m, bool merge,
                                   F f) {
  VReg<T> r;
  for (int i = 0; i < VReg<T>::N; ++i) r.v[i] = active<T>(m, i) ? f(d.v[i], a.v[i], b.v[i]) : T{};
  constexpr int kBytes = sizeof(T);
  r.defined = result_shadow<T>(
      whole_lanes<kBytes>(a.defined) & whole_lanes<kBytes>(b.defined) & whole_lanes<kBytes>(d.defined), m);
  if (merge) {
    merge_into(d, r, m);
  } else {
    d = r;
  }
}

}  // namespace asc_host

/// d + a * b
template <class T, class M>
ASC_PLAIN inline void vmula(asc_host::VReg<T>& d, asc_host::VReg<T> a, asc_host::VReg<T> b, vector_bool m, M) {
  asc_host::update_lanes(d, a, b, m, M::value == MODE_MERGING,
                         [](T z, T x, T y) ASC_INLINE { return asc_host::multiply_add<T>(x, y, z); });
}
/// d * a + b
template <class T, class M>
ASC_PLAIN inline void vmadd(asc_host::VReg<T>& d, asc_host::VReg<T> a, asc_host::VReg<T> b, vector_bool m, M) {
  asc_host::update_lanes(d, a, b, m, M::value == MODE_MERGING,
                         [](T z, T x, T y) ASC_INLINE { return asc_host::multiply_add<T>(z, x, y); });
}
template <class T>
ASC_PLAIN inline void asc_madd(asc_host::VReg<T>& d, asc_host::VReg<T> a, asc_host::VReg<T> b, vector_bool m) {
  vmadd(d, a, b, m, MODE_ZEROING);
}
/// d + a * scalar
template <class T, class S>
ASC_PLAIN inline void asc_axpy(asc_host::VReg<T>& d, asc_host::VReg<T> a, S scalar, vector_bool m) {
  T s = static_cast<T>(scalar);
  asc_host::update_lanes(d, a, a, m, false, [s](T z, T x, T) ASC_INLINE { return asc_host::multiply_add<T>(x, s, z); });
}

ASC_PLAIN inline void asc_mull(vector_u32& low, vector_u32& high, vector_u32 a, vector_u32 b, vector_bool m) {
  asc_host::map_lanes(low, a, b, m, [](uint32_t x, uint32_t y) ASC_INLINE { return x * y; });
  asc_host::map_lanes(high, a, b, m,
                      [](uint32_t x, uint32_t y) ASC_INLINE { return static_cast<uint32_t>((uint64_t(x) * y) >> 32); });
}
