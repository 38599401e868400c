// Moving lanes within registers: interleaving, packing, selection by index, squeezing, histograms.
#pragma once

#include "asc_host/registers.hpp"

namespace asc_host {

/// Copies lane `from` of `s` with its shadow into lane `to` of `d`.
template <class T>
ASC_PLAIN inline void move_lane(VReg<T>& d, int to, const VReg<T>& s, int from) {
  d.v[to] = s.v[from];
  d.set_lane_defined(to, s.lane_defined(from));
}

template <class D, class S>
ASC_PLAIN inline void narrow_lanes(VReg<D>& d, const VReg<S>& s, int first) {
  static_assert(sizeof(S) == 2 * sizeof(D), "asc_pack: the result is half as wide as the source");
  VReg<D> r = VReg<D>::zeros();
  for (int i = 0; i < VReg<S>::N; ++i) {
    r.v[first + i] = from_bits<D>(static_cast<bits_t<D>>(to_bits(s.v[i])));
    r.set_lane_defined(first + i, s.lane_defined(i));
  }
  d = r;
}

template <class D, class S>
ASC_PLAIN inline void widen_lanes(VReg<D>& d, const VReg<S>& s, int first) {
  static_assert(sizeof(D) == 2 * sizeof(S), "asc_unpack: the result is twice as wide as the source");
  VReg<D> r;
  for (int i = 0; i < VReg<D>::N; ++i) {
    r.v[i] = static_cast<D>(s.v[first + i]);
    r.set_lane_defined(i, s.lane_defined(first + i));
  }
  d = r;
}

}  // namespace asc_host

template <class T>
ASC_PLAIN inline void asc_intlv(asc_host::VReg<T>& d0, asc_host::VReg<T>& d1, asc_host::VReg<T> a,
                                asc_host::VReg<T> b) {
  constexpr int half = asc_host::VReg<T>::N / 2;
  asc_host::VReg<T> r0, r1;
  for (int i = 0; i < half; ++i) {
    asc_host::move_lane(r0, 2 * i, a, i);
    asc_host::move_lane(r0, 2 * i + 1, b, i);
    asc_host::move_lane(r1, 2 * i, a, half + i);
    asc_host::move_lane(r1, 2 * i + 1, b, half + i);
  }
  d0 = r0;
  d1 = r1;
}

template <class T>
ASC_PLAIN inline void asc_deintlv(asc_host::VReg<T>& d0, asc_host::VReg<T>& d1, asc_host::VReg<T> a,
                                  asc_host::VReg<T> b) {
  constexpr int n = asc_host::VReg<T>::N;
  asc_host::VReg<T> r[2];
  for (int j = 0; j < 2 * n; ++j) asc_host::move_lane(r[j & 1], j / 2, j < n ? a : b, j % n);
  d0 = r[0];
  d1 = r[1];
}

/// Lane i is lane x[i] of `s`; an index beyond the register is an error here, the device's answer is unknown.
template <class T, class I>
ASC_PLAIN inline void asc_gather(asc_host::VReg<T>& d, asc_host::VReg<T> s, asc_host::VReg<I> x) {
  static_assert(sizeof(T) == sizeof(I), "asc_gather: indices are as wide as the elements");
  asc_host::VReg<T> r;
  for (int i = 0; i < asc_host::VReg<T>::N; ++i) {
    if (!x.lane_defined(i)) continue;
    auto index = static_cast<std::make_unsigned_t<I>>(x.v[i]);
    if (index >= unsigned(asc_host::VReg<T>::N)) {
      asc_host::fail("bounds", "asc_gather: lane %d asks for lane %llu of a register of %d", i,
                     static_cast<unsigned long long>(index), asc_host::VReg<T>::N);
    }
    asc_host::move_lane(r, i, s, int(index));
  }
  d = r;
}

/// Active lanes move to the front, zeros follow.
template <class T>
ASC_PLAIN inline void asc_squeeze(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::VReg<T> r = asc_host::VReg<T>::zeros();
  int n = 0;
  for (int i = 0; i < asc_host::VReg<T>::N; ++i) {
    if (asc_host::active<T>(m, i)) asc_host::move_lane(r, n++, s, i);
  }
  if (!m.bad.empty()) r.defined = asc_host::ByteBits::none();
  d = r;
}

/// Lane i counts the active lanes before it.
template <class T>
ASC_PLAIN inline void asc_unsqueeze(asc_host::VReg<T>& d, vector_bool m) {
  int n = 0;
  for (int i = 0; i < asc_host::VReg<T>::N; ++i) {
    d.v[i] = static_cast<T>(n);
    n += asc_host::active<T>(m, i);
  }
  d.defined = m.bad.empty() ? asc_host::ByteBits::all() : asc_host::ByteBits::none();
}

template <class D, class S>
ASC_PLAIN inline void asc_pack_to_low(asc_host::VReg<D>& d, asc_host::VReg<S> s) {
  asc_host::narrow_lanes(d, s, 0);
}
template <class D, class S>
ASC_PLAIN inline void asc_pack_to_high(asc_host::VReg<D>& d, asc_host::VReg<S> s) {
  asc_host::narrow_lanes(d, s, asc_host::VReg<S>::N);
}
template <class D, class S>
ASC_PLAIN inline void asc_unpack_lower(asc_host::VReg<D>& d, asc_host::VReg<S> s) {
  asc_host::widen_lanes(d, s, 0);
}
template <class D, class S>
ASC_PLAIN inline void asc_unpack_upper(asc_host::VReg<D>& d, asc_host::VReg<S> s) {
  asc_host::widen_lanes(d, s, asc_host::VReg<D>::N);
}

namespace asc_host {

/// Adds the counts of byte values 128 * bin .. 128 * bin + 127 to `d`; `running` counts smaller values too.
ASC_PLAIN inline void histogram(vector_u16& d, const vector_u8& s, const vector_bool& m, int bin, bool running) {
  int counts[256] = {};
  bool known = m.bad.empty();
  for (int i = 0; i < 256; ++i) {
    if (!m.get(i)) continue;
    known &= s.defined.get(i);
    counts[s.v[i]]++;
  }
  int sum = 0;
  for (int i = 0; i < 256; ++i) {
    sum += counts[i];
    if (i / 128 == bin) d.v[i % 128] = static_cast<uint16_t>(d.v[i % 128] + (running ? sum : counts[i]));
  }
  if (!known) d.defined = ByteBits::none();
}

}  // namespace asc_host

ASC_PLAIN inline void asc_frequency_histogram_bin0(vector_u16& d, vector_u8 s, vector_bool m) {
  asc_host::histogram(d, s, m, 0, false);
}
ASC_PLAIN inline void asc_frequency_histogram_bin1(vector_u16& d, vector_u8 s, vector_bool m) {
  asc_host::histogram(d, s, m, 1, false);
}
ASC_PLAIN inline void asc_cumulative_histogram_bin0(vector_u16& d, vector_u8 s, vector_bool m) {
  asc_host::histogram(d, s, m, 0, true);
}
ASC_PLAIN inline void asc_cumulative_histogram_bin1(vector_u16& d, vector_u8 s, vector_bool m) {
  asc_host::histogram(d, s, m, 1, true);
}
