// Conversions between element types. A wider result takes every second or fourth source lane, `Part` says which; a
// narrower result fills every second or fourth lane, and the others are zero. The mask is read at the wider lanes.
#pragma once

#include "asc_host/registers.hpp"

namespace asc_host {

template <class X>
struct IsRound : std::false_type {};
template <Rounding R>
struct IsRound<Round<R>> : std::true_type {};
template <class X>
struct IsSaturate : std::false_type {};
template <bool B>
struct IsSaturate<Saturate<B>> : std::true_type {};
template <class X>
struct IsPart : std::false_type {};
template <int V>
struct IsPart<Part<V>> : std::true_type {};
template <class X>
struct IsMode : std::false_type {};
template <int V>
struct IsMode<std::integral_constant<int, V>> : std::true_type {};

/// What the trailing controls of a conversion say, in whatever order they come.
template <class... C>
struct Controls {
  template <template <class> class Is, class Default>
  struct Pick {
    template <class X, class... Rest>
    static auto find() {
      if constexpr (Is<X>::value) {
        return X{};
      } else if constexpr (sizeof...(Rest) > 0) {
        return find<Rest...>();
      } else {
        return Default{};
      }
    }
    using type = decltype(find<C...>());
  };
  static constexpr Rounding kRounding = Pick<IsRound, Round<Rounding::kEven>>::type::value;
  static constexpr bool kSaturate = Pick<IsSaturate, Saturate<true>>::type::value;
  static constexpr int kPart = Pick<IsPart, Part<0>>::type::value;
  static constexpr bool kMerge = Pick<IsMode, std::integral_constant<int, 0>>::type::value == 1;
};

template <class T>
constexpr bool kIsFp8 = std::is_same_v<T, float8_e4m3_t> || std::is_same_v<T, float8_e5m2_t>;

/// An integer of another width: the nearest it can hold where `saturate`, else its low bits.
template <class D, class S>
ASC_PLAIN inline D convert_integer(S x, bool saturate) {
  if (saturate) {
    __int128 w = x;
    if (w > __int128(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
    if (w < __int128(std::numeric_limits<D>::lowest())) return std::numeric_limits<D>::lowest();
  }
  return static_cast<D>(x);
}

template <class D>
ASC_PLAIN inline D float_to_integer(float x, Rounding mode, bool saturate) {
  if (std::isnan(x)) return D{0};
  double r = to_integer(x, mode);
  double low = static_cast<double>(std::numeric_limits<D>::lowest()), end = -2.0 * (low / 2);
  if constexpr (!std::is_signed_v<D>) end = std::ldexp(1.0, 8 * sizeof(D));
  if (r >= end) return saturate ? std::numeric_limits<D>::max() : static_cast<D>(static_cast<__int128>(r));
  if (r < low) return saturate ? std::numeric_limits<D>::lowest() : static_cast<D>(static_cast<__int128>(r));
  return static_cast<D>(r);
}

template <class D, class S, class C>
ASC_PLAIN inline D convert_value(S x) {
  if constexpr (std::is_same_v<D, S>) {
    return x;
  } else if constexpr (kIsInt<D> && kIsInt<S>) {
    return convert_integer<D>(x, C::kSaturate);
  } else if constexpr (kIsInt<D>) {
    static_assert(C::kRounding != Rounding::kOdd, "vcvt: ROUND_O to an integer is not emulated");
    return float_to_integer<D>(static_cast<float>(x), C::kRounding, C::kSaturate);
  } else if constexpr (std::is_same_v<D, bfloat16_t>) {
    static_assert(C::kRounding != Rounding::kOdd, "vcvt: ROUND_O to bfloat16 is not emulated");
    return std::bit_cast<bfloat16_t>(bfloat16_bits(static_cast<float>(x), C::kRounding));
  } else if constexpr (std::is_same_v<D, float>) {
    return static_cast<float>(x);
  } else {
    static_assert(C::kRounding == Rounding::kEven, "vcvt: to this type only ROUND_R is emulated");
    if constexpr (std::is_same_v<D, float8_e4m3_t>) {
      return std::bit_cast<D>(e4m3_bits(static_cast<float>(x), C::kSaturate));
    } else if constexpr (std::is_same_v<D, float8_e5m2_t>) {
      return std::bit_cast<D>(e5m2_bits(static_cast<float>(x), C::kSaturate));
    } else {
      static_assert(std::is_same_v<D, half>, "vcvt: this pair of types is not emulated");
      return static_cast<half>(x);
    }
  }
}

}  // namespace asc_host

template <class D, class S, class... C>
ASC_PLAIN inline void vcvt(asc_host::VReg<D>& d, asc_host::VReg<S> s, vector_bool m, C...) {
  using namespace asc_host;
  using Given = Controls<C...>;
  constexpr bool kToFp4 = std::is_same_v<D, float4_e2m1x2_t>, kFromFp4 = std::is_same_v<S, float4_e2m1x2_t>;
  VReg<D> r = Given::kMerge ? d : VReg<D>::zeros();
  if constexpr (kToFp4) {  // two bfloat16 lanes in byte `Part` of each 32-bit lane
    static_assert(std::is_same_v<S, bfloat16_t>, "vcvt: FP4 comes from bfloat16");
    static_assert(Given::kRounding == Rounding::kEven, "vcvt: to FP4 only ROUND_R is emulated");
    for (int i = 0; i < 64; ++i) {
      if (!active<S>(m, 2 * i)) continue;
      int at = 4 * i + Given::kPart;
      r.v[at].bits = static_cast<uint8_t>(e2m1_bits(s.v[2 * i]) | (e2m1_bits(s.v[2 * i + 1]) << 4));
      r.set_lane_defined(at, s.lane_defined(2 * i) && s.lane_defined(2 * i + 1) && !m.bad.get(4 * i));
    }
  } else if constexpr (kFromFp4) {
    static_assert(std::is_same_v<D, bfloat16_t>, "vcvt: FP4 goes to bfloat16");
    for (int i = 0; i < VReg<D>::N; ++i) {
      if (!active<D>(m, i)) continue;
      int from = 4 * (i / 2) + Given::kPart;
      uint8_t byte = s.v[from].bits;
      r.v[i] = bfloat16_t(e2m1_value((i & 1) ? byte >> 4 : byte & 15));
      r.set_lane_defined(i, s.lane_defined(from) && !m.bad.get(2 * i));
    }
  } else {
    constexpr int kWide = sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S);
    constexpr int kTo = sizeof(D) < sizeof(S) ? sizeof(S) / sizeof(D) : 1;
    constexpr int kFrom = sizeof(D) > sizeof(S) ? sizeof(D) / sizeof(S) : 1;
    static_assert(Given::kPart < (kTo > kFrom ? kTo : kFrom), "vcvt: there is no such part");
    for (int i = 0; i < kRegisterBytes / kWide; ++i) {
      if (!m.get(i * kWide)) continue;
      int to = i * kTo + (kTo > 1 ? Given::kPart : 0), from = i * kFrom + (kFrom > 1 ? Given::kPart : 0);
      r.v[to] = convert_value<D, S, Given>(s.v[from]);
      r.set_lane_defined(to, s.lane_defined(from) && !m.bad.get(i * kWide));
    }
  }
  d = r;
}
