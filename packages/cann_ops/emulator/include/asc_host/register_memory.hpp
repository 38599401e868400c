// Loads and stores between UB and registers, with their distributions.
#pragma once

#include "asc_host/registers.hpp"

namespace asc_host {

/// Reads `n` elements at `p` into `v` and says which are wholly defined.
template <class T>
ASC_PLAIN inline void read_elements(const T* p, int n, T* v, uint8_t* defined, size_t alignment, const char* what) {
  vector_begin(what);
  need_aligned(Space::kUb, p, alignment, what);
  uint8_t bytes[2 * kRegisterBytes];
  load(Space::kUb, p, n * sizeof(T), reinterpret_cast<uint8_t*>(v), bytes);
  for (int i = 0; i < n; ++i) {
    uint8_t all = 0xff;
    for (size_t k = 0; k < sizeof(T); ++k) all &= bytes[i * sizeof(T) + k];
    defined[i] = all == 0xff;
  }
}

/// A register whose lane i is element `index(i)` of `n` elements at `p`; a negative index gives zero.
template <class T, class F>
ASC_PLAIN inline void load_by(VReg<T>& d, const T* p, int n, size_t alignment, const char* what, F index) {
  T v[2 * VReg<T>::N];
  uint8_t defined[2 * VReg<T>::N];
  read_elements(p, n, v, defined, alignment, what);
  VReg<T> r = VReg<T>::zeros();
  for (int i = 0; i < VReg<T>::N; ++i) {
    int from = index(i);
    if (from < 0) continue;
    r.v[i] = v[from];
    r.set_lane_defined(i, defined[from]);
  }
  d = r;
}

/// Writes `n` values; lanes that are off are left alone. One store an unbroken run of lanes.
template <class T>
ASC_PLAIN inline void write_elements(T* p, const T* v, const bool* on, const bool* defined, int n) {
  for (int i = 0; i < n;) {
    if (!on[i]) {
      ++i;
      continue;
    }
    int first = i;
    uint8_t shadow[kRegisterBytes];
    for (; i < n && on[i]; ++i) std::memset(shadow + (i - first) * sizeof(T), defined[i] ? 0xff : 0, sizeof(T));
    store(Space::kUb, p + first, (i - first) * sizeof(T), reinterpret_cast<const uint8_t*>(v + first), shadow);
  }
}

/// Lanes i of `s` as `value(s.v[i])` at p[i].
template <class D, class T, class F>
ASC_PLAIN inline void store_by(D* p, const VReg<T>& s, const vector_bool& m, const char* what, F value) {
  vector_begin(what);
  need_aligned(Space::kUb, p, 32, what);
  D v[VReg<T>::N];
  bool on[VReg<T>::N], defined[VReg<T>::N];
  for (int i = 0; i < VReg<T>::N; ++i) {
    on[i] = active<T>(m, i);
    if (m.bad.get(i * int(sizeof(T)))) fail("undefined", "%s: the mask of lane %d comes from undefined data", what, i);
    v[i] = value(s.v[i]);
    defined[i] = s.lane_defined(i);
  }
  write_elements(p, v, on, defined, VReg<T>::N);
}

}  // namespace asc_host

#define ASC_LOAD(name, elements, alignment, index)                                                        \
  template <class T>                                                                                      \
  ASC_PLAIN inline void name(asc_host::VReg<T>& d, T* p, int offset = 0) {                                \
    constexpr int n [[maybe_unused]] = asc_host::VReg<T>::N;                                              \
    asc_host::load_by(d, p + offset, elements, alignment, #name, [](int i) ASC_INLINE { return index; }); \
  }                                                                                                       \
  template <class T>                                                                                      \
  ASC_PLAIN inline void name##_postupdate(asc_host::VReg<T>& d, T*& p, int step) {                        \
    name(d, p);                                                                                           \
    p += step;                                                                                            \
  }
/// All lanes in order.
ASC_LOAD(asc_loadalign, n, 32, i)
/// One element in all lanes.
ASC_LOAD(asc_loadalign_brc_elem, 1, sizeof(T), 0 * i)
/// Each element twice.
ASC_LOAD(asc_loadalign_upsample, n / 2, 32, i / 2)
/// Every second element.
ASC_LOAD(asc_loadalign_downsample, n, 32, 2 * i < n ? 2 * i : -1)
/// Elements on even lanes, zeros between.
ASC_LOAD(asc_loadalign_unpack, n / 2, 32, i % 2 ? -1 : i / 2)
/// Elements on every fourth lane.
ASC_LOAD(asc_loadalign_unpack4, n / 4, 32, i % 4 ? -1 : i / 4)
/// One block of 32 bytes eight times.
ASC_LOAD(asc_loadalign_brc_datablock, int(32 / sizeof(T)), 32, i % int(32 / sizeof(T)))
/// Eight elements, each over one block of 32 bytes.
ASC_LOAD(asc_loadalign_brc_elem2datablock, 8, (8 * sizeof(T) < 32 ? 8 * sizeof(T) : 32), i / int(32 / sizeof(T)))
#undef ASC_LOAD

/// 512 bytes: even elements and odd ones.
template <class T>
ASC_PLAIN inline void asc_loadalign_deintlv(asc_host::VReg<T>& a, asc_host::VReg<T>& b, T* p, int offset = 0) {
  constexpr int n = asc_host::VReg<T>::N;
  T v[2 * n];
  uint8_t defined[2 * n];
  asc_host::read_elements(p + offset, 2 * n, v, defined, 32, "asc_loadalign_deintlv");
  asc_host::VReg<T> r[2];
  for (int j = 0; j < 2 * n; ++j) {
    r[j & 1].v[j / 2] = v[j];
    r[j & 1].set_lane_defined(j / 2, defined[j]);
  }
  a = r[0];
  b = r[1];
}
ASC_PLAIN inline int asc_update_addr_reg_b8(int offset) { return offset; }
ASC_PLAIN inline int asc_update_addr_reg_b16(int offset) { return offset; }
ASC_PLAIN inline int asc_update_addr_reg_b32(int offset) { return offset; }

template <class T>
ASC_PLAIN inline void asc_storealign(T* p, asc_host::VReg<T> s, int offset, vector_bool m) {
  asc_host::store_by(p + offset, s, m, "asc_storealign", [](T x) ASC_INLINE { return x; });
}
/// Lane 0 only; the address needs its own alignment.
template <class T>
ASC_PLAIN inline void asc_storealign_1st(T* p, asc_host::VReg<T> s, int offset) {
  asc_host::vector_begin("asc_storealign_1st");
  asc_host::need_aligned(asc_host::Space::kUb, p + offset, sizeof(T), "asc_storealign_1st");
  bool on = true, defined = s.lane_defined(0);
  asc_host::write_elements(p + offset, s.v, &on, &defined, 1);
}
/// The low half of each lane, side by side.
template <class T>
ASC_PLAIN inline void asc_storealign_pack(T* p, asc_host::VReg<T> s, int offset, vector_bool m) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "asc_storealign_pack: lanes of 16 and 32 bits");
  using Half = std::conditional_t<sizeof(T) == 4, uint16_t, uint8_t>;
  asc_host::store_by(reinterpret_cast<Half*>(p + offset), s, m, "asc_storealign_pack",
                     [](T x) ASC_INLINE { return static_cast<Half>(asc_host::to_bits(x)); });
}
/// The low byte of each 32-bit lane, side by side.
template <class T>
ASC_PLAIN inline void asc_storealign_pack_quarter(T* p, asc_host::VReg<T> s, int offset, vector_bool m) {
  static_assert(sizeof(T) == 4, "asc_storealign_pack_quarter: lanes of 32 bits");
  asc_host::store_by(reinterpret_cast<uint8_t*>(p + offset), s, m, "asc_storealign_pack_quarter",
                     [](T x) ASC_INLINE { return static_cast<uint8_t>(asc_host::to_bits(x)); });
}
/// Block k of 32 bytes at block k * step.
template <class T>
ASC_PLAIN inline void asc_storealign(T* p, asc_host::VReg<T> s, uint16_t step, uint16_t, vector_bool m) {
  asc_host::vector_begin("asc_storealign by blocks");
  asc_host::need_aligned(asc_host::Space::kUb, p, 32, "asc_storealign by blocks");
  constexpr int n = 32 / sizeof(T);
  for (int k = 0; k < 8; ++k) {
    bool on[n], defined[n];
    for (int i = 0; i < n; ++i) {
      on[i] = asc_host::active<T>(m, k * n + i);
      defined[i] = s.lane_defined(k * n + i);
    }
    asc_host::write_elements(p + size_t(k) * step * n, s.v + k * n, on, defined, n);
  }
}
template <class T>
ASC_PLAIN inline void asc_storealign_postupdate(T*& p, asc_host::VReg<T> s, uint16_t step, uint16_t after,
                                                vector_bool m) {
  asc_storealign(p, s, step, after, m);
  p += size_t(after) * (32 / sizeof(T));
}
template <class T>
ASC_PLAIN inline void asc_storealign_intlv(T*, asc_host::VReg<T>, int, vector_bool) {
  static_assert(sizeof(T) == 0, "asc_storealign_intlv is not emulated");
}
