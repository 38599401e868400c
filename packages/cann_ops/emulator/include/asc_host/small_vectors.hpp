// Small vectors and scalar functions that SIMT code uses.
#pragma once

#include <cmath>

#include "asc_host/scalars.hpp"

template <class T>
struct asc_vec2 {
  T x, y;
};
template <class T>
struct asc_vec3 {
  T x, y, z;
};
template <class T>
struct asc_vec4 {
  T x, y, z, w;
};

#define ASC_VECTORS(type, name)                                               \
  using name##2 = asc_vec2<type>;                                             \
  using name##3 = asc_vec3<type>;                                             \
  using name##4 = asc_vec4<type>;                                             \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
ASC_VECTORS(float, float)
ASC_VECTORS(int, int)
ASC_VECTORS(unsigned int, uint)
ASC_VECTORS(unsigned short, ushort)
ASC_VECTORS(long long, longlong)
ASC_VECTORS(unsigned long long, ulonglong)
#undef ASC_VECTORS

#define ASC_VECTOR_OP(op)                                                                       \
  template <class T>                                                                            \
  inline asc_vec2<T> operator op(asc_vec2<T> a, asc_vec2<T> b) {                                \
    return {static_cast<T>(a.x op b.x), static_cast<T>(a.y op b.y)};                            \
  }                                                                                             \
  template <class T>                                                                            \
  inline asc_vec4<T> operator op(asc_vec4<T> a, asc_vec4<T> b) {                                \
    return {static_cast<T>(a.x op b.x), static_cast<T>(a.y op b.y), static_cast<T>(a.z op b.z), \
            static_cast<T>(a.w op b.w)};                                                        \
  }
ASC_VECTOR_OP(+)
ASC_VECTOR_OP(-)
ASC_VECTOR_OP(*)
ASC_VECTOR_OP(/)
#undef ASC_VECTOR_OP

struct half2 {
  half x, y;
};
struct bfloat16x2_t {
  bfloat16_t x, y;
};
struct float8_e4m3x2_t {
  uint16_t bits;
};
struct float8_e5m2x2_t {
  uint16_t bits;
};
using __asc_fp8x2_storage_t = uint16_t;
enum { __ASC_NOSAT, __ASC_SATFINITE };
enum { __ASC_E4M3, __ASC_E5M2 };

inline uint16_t __asc_cvt_float2_to_fp8x2(float2 v, int saturation, int kind) {
  bool s = saturation == __ASC_SATFINITE;
  uint8_t x = kind == __ASC_E4M3 ? asc_host::e4m3_bits(v.x, s) : asc_host::e5m2_bits(v.x, s);
  uint8_t y = kind == __ASC_E4M3 ? asc_host::e4m3_bits(v.y, s) : asc_host::e5m2_bits(v.y, s);
  return static_cast<uint16_t>(x | (y << 8));
}
inline float2 __e4m3x22float2(float8_e4m3x2_t v) {
  return {asc_host::e4m3_value(v.bits & 255), asc_host::e4m3_value(v.bits >> 8)};
}
inline float2 __e5m2x22float2(float8_e5m2x2_t v) {
  return {asc_host::e5m2_value(v.bits & 255), asc_host::e5m2_value(v.bits >> 8)};
}
inline float2 __half22float2(half2 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
inline float2 __bfloat1622float2(bfloat16x2_t v) { return {v.x, v.y}; }
inline half2 __float22half2_rn(float2 v) { return {static_cast<half>(v.x), static_cast<half>(v.y)}; }
inline bfloat16x2_t __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }

template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) > static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}

inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
#define ASC_HALF_FUNCTION(name) \
  inline half h##name(half x) { return static_cast<half>(std::name(static_cast<float>(x))); }
ASC_HALF_FUNCTION(sqrt)
ASC_HALF_FUNCTION(exp)
ASC_HALF_FUNCTION(exp2)
ASC_HALF_FUNCTION(log)
ASC_HALF_FUNCTION(log2)
ASC_HALF_FUNCTION(log10)
ASC_HALF_FUNCTION(tanh)
ASC_HALF_FUNCTION(sin)
ASC_HALF_FUNCTION(cos)
ASC_HALF_FUNCTION(floor)
ASC_HALF_FUNCTION(ceil)
ASC_HALF_FUNCTION(fabs)
ASC_HALF_FUNCTION(round)
ASC_HALF_FUNCTION(trunc)
#undef ASC_HALF_FUNCTION
inline half hrsqrt(half x) { return static_cast<half>(1.f / std::sqrt(static_cast<float>(x))); }
