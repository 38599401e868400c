// Vector registers of 256 bytes and predicates of 256 bits, each with a shadow that says which part is defined.
#pragma once

#include "asc_host/tags.hpp"

namespace asc_host {

constexpr int kRegisterBytes = 256;

/// One bit for each byte of a register.
struct ByteBits {
  uint64_t w[4];

  ASC_PLAIN static ByteBits all() { return {{~0ull, ~0ull, ~0ull, ~0ull}}; }
  ASC_PLAIN static ByteBits none() { return {{0, 0, 0, 0}}; }
  ASC_PLAIN bool full() const { return (w[0] & w[1] & w[2] & w[3]) == ~0ull; }
  ASC_PLAIN bool empty() const { return (w[0] | w[1] | w[2] | w[3]) == 0; }
  ASC_PLAIN bool get(int i) const { return (w[i >> 6] >> (i & 63)) & 1; }
  ASC_PLAIN void set(int i, bool on) {
    uint64_t bit = 1ull << (i & 63);
    w[i >> 6] = on ? w[i >> 6] | bit : w[i >> 6] & ~bit;
  }
  ASC_PLAIN ByteBits operator&(const ByteBits& o) const {
    return {{w[0] & o.w[0], w[1] & o.w[1], w[2] & o.w[2], w[3] & o.w[3]}};
  }
  ASC_PLAIN ByteBits operator|(const ByteBits& o) const {
    return {{w[0] | o.w[0], w[1] | o.w[1], w[2] | o.w[2], w[3] | o.w[3]}};
  }
  ASC_PLAIN ByteBits operator~() const { return {{~w[0], ~w[1], ~w[2], ~w[3]}}; }
};

/// The first bit of each lane of `bytes` bytes.
template <int Bytes>
constexpr uint64_t kLaneBits = Bytes == 1   ? ~0ull
                               : Bytes == 2 ? 0x5555555555555555ull
                               : Bytes == 4 ? 0x1111111111111111ull
                                            : 0x0101010101010101ull;

/// The first bit of a lane on all bits of the lane.
template <int Bytes>
ASC_PLAIN inline ByteBits spread(const ByteBits& b) {
  ByteBits r;
  for (int k = 0; k < 4; ++k) {
    uint64_t x = b.w[k] & kLaneBits<Bytes>;
    for (int s = 1; s < Bytes; s *= 2) x |= x << s;
    r.w[k] = x;
  }
  return r;
}

/// Lanes whose bits are all set, as whole lanes.
template <int Bytes>
ASC_PLAIN inline ByteBits whole_lanes(const ByteBits& b) {
  ByteBits r = b;
  for (int k = 0; k < 4; ++k) {
    for (int s = 1; s < Bytes; s *= 2) r.w[k] &= r.w[k] >> s;
  }
  return spread<Bytes>(r);
}

/// A register of elements T. A default one holds poison and nothing of it is defined. All have one layout, since
/// generated code looks at a register through pointers to another register type.
template <class T>
struct VReg {
  static constexpr int N = kRegisterBytes / sizeof(T);
  using element = T;
  T v[N];
  ByteBits defined;

  ASC_PLAIN VReg() {
    std::memset(static_cast<void*>(v), 0xff, kRegisterBytes);
    defined = ByteBits::none();
  }
  ASC_PLAIN static VReg zeros() {
    VReg r;
    std::memset(static_cast<void*>(r.v), 0, kRegisterBytes);
    r.defined = ByteBits::all();
    return r;
  }
  ASC_PLAIN bool lane_defined(int i) const {
    for (int k = 0; k < int(sizeof(T)); ++k) {
      if (!defined.get(i * int(sizeof(T)) + k)) return false;
    }
    return true;
  }
  ASC_PLAIN void set_lane_defined(int i, bool on) {
    for (int k = 0; k < int(sizeof(T)); ++k) defined.set(i * int(sizeof(T)) + k, on);
  }
};

}  // namespace asc_host

/// A predicate: lane i of elements of n bytes looks at bit i * n. `bad` marks bits that came from undefined data.
struct vector_bool {
  asc_host::ByteBits bits;
  asc_host::ByteBits bad;

  ASC_PLAIN vector_bool() : bits(asc_host::ByteBits::none()), bad(asc_host::ByteBits::all()) {}
  ASC_PLAIN static vector_bool none() {
    vector_bool m;
    m.bad = asc_host::ByteBits::none();
    return m;
  }
  ASC_PLAIN bool get(int bit) const { return bits.get(bit); }
  ASC_PLAIN void set(int bit, bool on) { bits.set(bit, on); }
};

using vector_f32 = asc_host::VReg<float>;
using vector_float = vector_f32;
using vector_f16 = asc_host::VReg<half>;
using vector_half = vector_f16;
using vector_bf16 = asc_host::VReg<bfloat16_t>;
using vector_f8e4m3 = asc_host::VReg<float8_e4m3_t>;
using vector_f8e5m2 = asc_host::VReg<float8_e5m2_t>;
using vector_f8e8m0 = asc_host::VReg<float8_e8m0_t>;
using vector_f4e2m1x2 = asc_host::VReg<float4_e2m1x2_t>;
using vector_f4e1m2x2 = asc_host::VReg<float4_e1m2x2_t>;
using vector_u8 = asc_host::VReg<uint8_t>;
using vector_u16 = asc_host::VReg<uint16_t>;
using vector_uint16_t = vector_u16;
using vector_u32 = asc_host::VReg<uint32_t>;
using vector_uint32_t = vector_u32;
using vector_u64 = asc_host::VReg<uint64_t>;
using vector_s8 = asc_host::VReg<int8_t>;
using vector_s16 = asc_host::VReg<int16_t>;
using vector_s32 = asc_host::VReg<int32_t>;
using vector_s64 = asc_host::VReg<int64_t>;

namespace asc_host {

/// Is lane i of elements T active?
template <class T>
ASC_PLAIN inline bool active(const vector_bool& m, int i) {
  return m.bits.get(i * int(sizeof(T)));
}

/// The shadow of a lane-wise result: lanes with undefined inputs or an undefined predicate are undefined, lanes that
/// are off hold zero.
template <class T>
ASC_PLAIN inline ByteBits result_shadow(const ByteBits& inputs, const vector_bool& m) {
  if (inputs.full() && m.bad.empty()) return ByteBits::all();
  constexpr int kBytes = sizeof(T);
  ByteBits on = spread<kBytes>(m.bits), bad = spread<kBytes>(m.bad);
  return (whole_lanes<kBytes>(inputs) | ~on) & ~bad;
}

/// `d = f(a)` in active lanes, zero elsewhere.
template <class D, class A, class F>
ASC_PLAIN inline void map_lanes(VReg<D>& d, const VReg<A>& a, const vector_bool& m, F f) {
  static_assert(sizeof(D) == sizeof(A), "a lane-wise operation keeps the width of a lane");
  VReg<D> r;
  for (int i = 0; i < VReg<D>::N; ++i) r.v[i] = active<D>(m, i) ? static_cast<D>(f(a.v[i])) : D{};
  r.defined = result_shadow<D>(a.defined, m);
  d = r;
}

template <class D, class A, class B, class F>
ASC_PLAIN inline void map_lanes(VReg<D>& d, const VReg<A>& a, const VReg<B>& b, const vector_bool& m, F f) {
  static_assert(sizeof(D) == sizeof(A) && sizeof(D) == sizeof(B), "a lane-wise operation keeps the width of a lane");
  VReg<D> r;
  for (int i = 0; i < VReg<D>::N; ++i) r.v[i] = active<D>(m, i) ? static_cast<D>(f(a.v[i], b.v[i])) : D{};
  r.defined = result_shadow<D>(whole_lanes<sizeof(D)>(a.defined) & whole_lanes<sizeof(D)>(b.defined), m);
  d = r;
}

/// Inactive lanes keep what `d` had.
template <class T>
ASC_PLAIN inline void merge_into(VReg<T>& d, const VReg<T>& result, const vector_bool& m) {
  VReg<T> old = d;
  for (int i = 0; i < VReg<T>::N; ++i) d.v[i] = active<T>(m, i) ? result.v[i] : old.v[i];
  ByteBits on = spread<sizeof(T)>(m.bits), bad = spread<sizeof(T)>(m.bad);
  d.defined = ((result.defined & on) | (old.defined & ~on)) & ~bad;
}

}  // namespace asc_host
