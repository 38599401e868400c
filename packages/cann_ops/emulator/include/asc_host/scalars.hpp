// Number formats of the device on the host: half, bfloat16, FP8, FP4 and E8M0, with their conversions from float.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "asc_host/machine.hpp"

typedef _Float16 half;

namespace asc_host {

enum class Rounding { kEven, kAway, kFloor, kCeil, kZero, kOdd };

/// `value` to an integer by `mode`; halves go to even for kEven and away from zero for kAway.
ASC_PLAIN inline float to_integer(float value, Rounding mode) {
  switch (mode) {
    case Rounding::kEven:
      return std::nearbyint(value);
    case Rounding::kAway:
      return std::round(value);
    case Rounding::kFloor:
      return std::floor(value);
    case Rounding::kCeil:
      return std::ceil(value);
    default:
      return std::trunc(value);
  }
}

/// bfloat16 bits of `f`; kOdd is not defined for this target.
ASC_PLAIN inline uint16_t bfloat16_bits(float f, Rounding mode = Rounding::kEven) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  bool negative = u >> 31;
  uint32_t up = 0;
  switch (mode) {
    case Rounding::kEven:
      up = 0x7fffu + ((u >> 16) & 1);
      break;
    case Rounding::kAway:
      up = 0x8000u;
      break;
    case Rounding::kFloor:
      up = negative ? 0xffffu : 0;
      break;
    case Rounding::kCeil:
      up = negative ? 0 : 0xffffu;
      break;
    default:
      break;
  }
  if ((u & 0x7fffffffu) == 0x7f800000u) up = 0;
  return static_cast<uint16_t>((u + up) >> 16);
}

/// A float with `exponent_bits` and `mantissa_bits`, to nearest even; magnitudes above `largest` give `over`.
ASC_PLAIN inline uint8_t small_float_bits(float f, int exponent_bits, int mantissa_bits, float largest, uint8_t over) {
  int bias = (1 << (exponent_bits - 1)) - 1;
  uint8_t sign = std::signbit(f) ? static_cast<uint8_t>(1u << (exponent_bits + mantissa_bits)) : 0;
  float a = std::fabs(f);
  int e = 0;
  std::frexp(a, &e);
  e = (a == 0.f) ? 1 - bias : e - 1;
  if (e < 1 - bias) e = 1 - bias;
  float steps = std::nearbyint(std::ldexp(a, mantissa_bits - e));  // in units of 2^(e - mantissa_bits)
  if (std::ldexp(steps, e - mantissa_bits) > largest) return sign | over;
  int m = static_cast<int>(steps);
  int one = 1 << mantissa_bits;
  if (m == 2 * one) {
    m = one;
    ++e;
  }
  if (m < one) return static_cast<uint8_t>(sign | m);
  return static_cast<uint8_t>(sign | ((e + bias) << mantissa_bits) | (m - one));
}

/// E4M3: no infinity. Beyond 448: 448 where `saturate`, else NaN.
ASC_PLAIN inline uint8_t e4m3_bits(float f, bool saturate = true) {
  if (std::isnan(f)) return 0x7f;
  return small_float_bits(f, 4, 3, 448.f, saturate ? 0x7e : 0x7f);
}

ASC_PLAIN inline float e4m3_value(uint8_t b) {
  int e = (b >> 3) & 15, m = b & 7;
  float v = (e == 15 && m == 7) ? NAN : e == 0 ? std::ldexp(float(m), -9) : std::ldexp(1.f + m / 8.f, e - 7);
  return (b & 0x80) ? -v : v;
}

/// E5M2. Beyond 57344: 57344 where `saturate` (infinity too), else infinity.
ASC_PLAIN inline uint8_t e5m2_bits(float f, bool saturate = true) {
  if (std::isnan(f)) return 0x7e;
  return small_float_bits(f, 5, 2, 57344.f, saturate ? 0x7b : 0x7c);
}

ASC_PLAIN inline float e5m2_value(uint8_t b) {
  return static_cast<float>(std::bit_cast<half>(static_cast<uint16_t>(b << 8)));
}

/// E2M1: always saturates at 6. There is no NaN; what the device makes of one is unknown, here it is 0.
ASC_PLAIN inline uint8_t e2m1_bits(float f) { return std::isnan(f) ? 0 : small_float_bits(f, 2, 1, 6.f, 7); }

ASC_PLAIN inline float e2m1_value(uint8_t n) {
  constexpr float kValues[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  float v = kValues[n & 7];
  return (n & 8) ? -v : v;
}

/// E8M0: 2^(b - 127); 255 is NaN.
ASC_PLAIN inline float e8m0_value(uint8_t b) { return b == 255 ? NAN : std::ldexp(1.f, int(b) - 127); }

}  // namespace asc_host

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  ASC_PLAIN bfloat16_t(float f) : bits(asc_host::bfloat16_bits(f)) {}
  ASC_PLAIN operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

struct float8_e4m3_t {
  uint8_t bits;
  float8_e4m3_t() = default;
  ASC_PLAIN float8_e4m3_t(float f) : bits(asc_host::e4m3_bits(f)) {}
  ASC_PLAIN operator float() const { return asc_host::e4m3_value(bits); }
};

struct float8_e5m2_t {
  uint8_t bits;
  float8_e5m2_t() = default;
  ASC_PLAIN float8_e5m2_t(float f) : bits(asc_host::e5m2_bits(f)) {}
  ASC_PLAIN operator float() const { return asc_host::e5m2_value(bits); }
};

struct float8_e8m0_t {
  uint8_t bits;
  ASC_PLAIN operator float() const { return asc_host::e8m0_value(bits); }
};
typedef float8_e8m0_t fp8_e8m0_t;

/// Two E2M1 values, the first in the low half.
struct float4_e2m1x2_t {
  uint8_t bits;
};
struct float4_e1m2x2_t {
  uint8_t bits;
};

namespace asc_host {

template <size_t Bytes>
struct BitsOf;
template <>
struct BitsOf<1> {
  using type = uint8_t;
};
template <>
struct BitsOf<2> {
  using type = uint16_t;
};
template <>
struct BitsOf<4> {
  using type = uint32_t;
};
template <>
struct BitsOf<8> {
  using type = uint64_t;
};
template <class T>
using bits_t = typename BitsOf<sizeof(T)>::type;

template <class T>
constexpr bool kIsFloat = std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>;
template <class T>
constexpr bool kIsInt = std::is_integral_v<T>;

/// The type in which one operation on T is done and then rounded to T once.
template <class T>
using wide_t = std::conditional_t<kIsFloat<T>, float, T>;

template <class T>
ASC_PLAIN inline bits_t<T> to_bits(T x) {
  return std::bit_cast<bits_t<T>>(x);
}
template <class T>
ASC_PLAIN inline T from_bits(bits_t<T> x) {
  return std::bit_cast<T>(x);
}

}  // namespace asc_host
