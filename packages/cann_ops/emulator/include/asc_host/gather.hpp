// Gathering from UB and scattering to it by index, and predicates in UB.
#pragma once

#include "asc_host/predicates.hpp"
#include "asc_host/register_memory.hpp"

namespace asc_host {

template <class I>
ASC_PLAIN inline uint64_t index_of(const VReg<I>& x, int lane, const char* what) {
  if (!x.lane_defined(lane)) fail("undefined", "%s: the index of lane %d comes from undefined data", what, lane);
  return static_cast<std::make_unsigned_t<I>>(x.v[lane]);
}

template <class T, class S, class I>
ASC_PLAIN inline void gather_elements(VReg<T>& d, const S* base, const VReg<I>& x, const vector_bool& m) {
  vector_begin("asc_gather");
  VReg<T> r = VReg<T>::zeros();
  for (int i = 0; i < VReg<T>::N && i < VReg<I>::N; ++i) {
    if (!active<T>(m, i)) continue;
    S value;
    uint8_t defined[sizeof(S)];
    load(Space::kUb, base + index_of(x, i, "asc_gather"), sizeof(S), reinterpret_cast<uint8_t*>(&value), defined);
    r.v[i] = static_cast<T>(value);
    uint8_t all = 0xff;
    for (uint8_t one : defined) all &= one;
    r.set_lane_defined(i, all == 0xff);
  }
  d = r;
}

/// 32 bytes of a predicate at `p`; undefined bytes make bad bits.
ASC_PLAIN inline void read_predicate(const uint32_t* p, int bytes, vector_bool& m, const char* what) {
  vector_begin(what);
  need_aligned(Space::kUb, p, bytes, what);
  uint8_t v[32], defined[32];
  load(Space::kUb, p, bytes, v, defined);
  m = vector_bool::none();
  for (int i = 0; i < 8 * bytes; ++i) {
    m.bits.set(i, (v[i / 8] >> (i % 8)) & 1);
    m.bad.set(i, defined[i / 8] != 0xff);
  }
}

ASC_PLAIN inline void write_predicate(uint32_t* p, int bytes, const vector_bool& m, const char* what) {
  vector_begin(what);
  need_aligned(Space::kUb, p, bytes, what);
  uint8_t v[32] = {}, defined[32];
  std::memset(defined, 0xff, sizeof(defined));
  for (int i = 0; i < 8 * bytes; ++i) {
    v[i / 8] |= static_cast<uint8_t>(m.bits.get(i) << (i % 8));
    if (m.bad.get(i)) defined[i / 8] = 0;
  }
  store(Space::kUb, p, bytes, v, defined);
}

}  // namespace asc_host

template <class T, class I>
ASC_PLAIN inline void asc_gather(asc_host::VReg<T>& d, T* base, asc_host::VReg<I> x, vector_bool m) {
  static_assert(sizeof(T) == sizeof(I), "asc_gather: indices are as wide as the elements");
  asc_host::gather_elements(d, base, x, m);
}
/// Bytes widen to 16 bits.
template <class I>
ASC_PLAIN inline void asc_gather(vector_u16& d, uint8_t* base, asc_host::VReg<I> x, vector_bool m) {
  asc_host::gather_elements(d, base, x, m);
}
template <class I>
ASC_PLAIN inline void asc_gather(vector_s16& d, int8_t* base, asc_host::VReg<I> x, vector_bool m) {
  asc_host::gather_elements(d, base, x, m);
}

/// Of two lanes with one index the later one is kept here; the device does not say which.
template <class T, class I>
ASC_PLAIN inline void asc_scatter(T* base, asc_host::VReg<T> s, asc_host::VReg<I> x, vector_bool m) {
  asc_host::vector_begin("asc_scatter");
  for (int i = 0; i < asc_host::VReg<T>::N && i < asc_host::VReg<I>::N; ++i) {
    if (!asc_host::active<T>(m, i)) continue;
    bool on = true, defined = s.lane_defined(i);
    asc_host::write_elements(base + asc_host::index_of(x, i, "asc_scatter"), s.v + i, &on, &defined, 1);
  }
}

/// Eight blocks of 32 bytes at byte offsets x[0..7].
template <class T>
ASC_PLAIN inline void asc_gather_datablock(asc_host::VReg<T>& d, T* base, vector_u32 x, vector_bool m) {
  constexpr int n = 32 / sizeof(T);
  asc_host::VReg<T> r = asc_host::VReg<T>::zeros();
  asc_host::vector_begin("asc_gather_datablock");
  for (int k = 0; k < 8; ++k) {
    if (!asc_host::active<T>(m, k * n)) continue;
    auto* p = reinterpret_cast<uint8_t*>(base) + asc_host::index_of(x, k, "asc_gather_datablock");
    asc_host::need_aligned(asc_host::Space::kUb, p, 32, "asc_gather_datablock");
    uint8_t defined[32];
    asc_host::load(asc_host::Space::kUb, p, 32, reinterpret_cast<uint8_t*>(r.v + k * n), defined);
    for (int b = 0; b < 32; ++b) r.defined.set(32 * k + b, defined[b] == 0xff);
  }
  d = r;
}
template <class T>
ASC_PLAIN inline void asc_gather_datablock(asc_host::VReg<T>& d, T* base, vector_u32 x) {
  asc_gather_datablock(d, base, x, asc_host::mask_of<sizeof(T)>(PAT_ALL));
}

ASC_PLAIN inline void asc_loadalign(vector_bool& d, uint32_t* p, int offset) {
  asc_host::read_predicate(p + offset, 32, d, "asc_loadalign of a predicate");
}
/// Each of 128 bits twice.
ASC_PLAIN inline void asc_loadalign_upsample(vector_bool& d, uint32_t* p, int offset) {
  vector_bool half;
  asc_host::read_predicate(p + offset, 16, half, "asc_loadalign_upsample of a predicate");
  vector_bool even = asc_host::move_bits(half, 0, 1, 0, 2), odd = asc_host::move_bits(half, 0, 1, 1, 2);
  d.bits = even.bits | odd.bits;
  d.bad = even.bad | odd.bad;
}
/// Every second of 512 bits.
ASC_PLAIN inline void asc_loadalign_downsample(vector_bool& d, uint32_t* p, int offset) {
  vector_bool low, high;
  asc_host::read_predicate(p + offset, 32, low, "asc_loadalign_downsample of a predicate");
  asc_host::read_predicate(p + offset + 8, 32, high, "asc_loadalign_downsample of a predicate");
  vector_bool a = asc_host::move_bits(low, 0, 2, 0, 1), b = asc_host::move_bits(high, 0, 2, 128, 1);
  d.bits = a.bits | b.bits;
  d.bad = a.bad | b.bad;
}
ASC_PLAIN inline void asc_storealign(uint32_t* p, vector_bool m, int offset) {
  asc_host::write_predicate(p + offset, 32, m, "asc_storealign of a predicate");
}
/// Every second bit.
ASC_PLAIN inline void asc_storealign_pack(uint32_t* p, vector_bool m, int offset) {
  asc_host::write_predicate(p + offset, 16, asc_host::move_bits(m, 0, 2, 0, 1), "asc_storealign_pack of a predicate");
}
