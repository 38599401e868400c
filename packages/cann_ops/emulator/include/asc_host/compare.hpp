// Comparisons, selection and broadcasts.
#pragma once

#include "asc_host/registers.hpp"

namespace asc_host {

template <class T, class F>
ASC_PLAIN inline void compare_lanes(vector_bool& d, const VReg<T>& a, const VReg<T>& b, const vector_bool& m, F f) {
  vector_bool r = vector_bool::none();
  for (int i = 0; i < VReg<T>::N; ++i) {
    if (active<T>(m, i)) r.set(i * int(sizeof(T)), f(wide_t<T>(a.v[i]), wide_t<T>(b.v[i])));
  }
  r.bad = ~result_shadow<T>(whole_lanes<sizeof(T)>(a.defined) & whole_lanes<sizeof(T)>(b.defined), m);
  d = r;
}

template <class T>
ASC_PLAIN inline VReg<T> filled(T x) {
  VReg<T> r = VReg<T>::zeros();
  for (int i = 0; i < VReg<T>::N; ++i) r.v[i] = x;
  return r;
}

/// Lane `from` of `s` in all active lanes.
template <class T>
ASC_PLAIN inline void broadcast_lane(VReg<T>& d, const VReg<T>& s, int from, const vector_bool& m) {
  VReg<T> all = filled(s.v[from]);
  if (!s.lane_defined(from)) all.defined = ByteBits::none();
  map_lanes(d, all, m, [](T x) ASC_INLINE { return x; });
}

}  // namespace asc_host

#define ASC_COMPARE(name, op)                                                                                 \
  template <class T>                                                                                          \
  ASC_PLAIN inline void asc_##name(vector_bool& d, asc_host::VReg<T> a, asc_host::VReg<T> b, vector_bool m) { \
    asc_host::compare_lanes(d, a, b, m, [](auto x, auto y) ASC_INLINE { return x op y; });                    \
  }                                                                                                           \
  template <class T, class S>                                                                                 \
  ASC_PLAIN inline void asc_##name##_scalar(vector_bool& d, asc_host::VReg<T> a, S scalar, vector_bool m) {   \
    asc_##name(d, a, asc_host::filled(static_cast<T>(scalar)), m);                                            \
  }
ASC_COMPARE(eq, ==)
ASC_COMPARE(ne, !=)
ASC_COMPARE(gt, >)
ASC_COMPARE(ge, >=)
ASC_COMPARE(lt, <)
ASC_COMPARE(le, <=)
#undef ASC_COMPARE

template <class T>
ASC_PLAIN inline void asc_select(asc_host::VReg<T>& d, asc_host::VReg<T> a, asc_host::VReg<T> b, vector_bool m) {
  asc_host::VReg<T> r = b;
  asc_host::merge_into(r, a, m);
  d = r;
}

template <class T, class S>
ASC_PLAIN inline void asc_duplicate_scalar(asc_host::VReg<T>& d, S scalar, vector_bool m) {
  asc_host::map_lanes(d, asc_host::filled(static_cast<T>(scalar)), m, [](T x) ASC_INLINE { return x; });
}
template <class T>
ASC_PLAIN inline void asc_duplicate(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::broadcast_lane(d, s, 0, m);
}
template <class T>
ASC_PLAIN inline void asc_duplicate_highest(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::broadcast_lane(d, s, asc_host::VReg<T>::N - 1, m);
}

template <class T, class S>
ASC_PLAIN inline void asc_arange(asc_host::VReg<T>& d, S first) {
  d = asc_host::VReg<T>::zeros();
  for (int i = 0; i < asc_host::VReg<T>::N; ++i) d.v[i] = static_cast<T>(first + static_cast<S>(i));
}
template <class T, class S>
ASC_PLAIN inline void asc_arange_descend(asc_host::VReg<T>& d, S first) {
  d = asc_host::VReg<T>::zeros();
  for (int i = 0; i < asc_host::VReg<T>::N; ++i) d.v[i] = static_cast<T>(first - static_cast<S>(i));
}
