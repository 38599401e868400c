// Reductions over a register, over blocks of 32 bytes and over pairs. Sums go pairwise, as a tree; the order on the
// device is not documented.
#pragma once

#include "asc_host/arithmetic.hpp"

namespace asc_host {

/// Lanes [first, first + n) of `s`: are all active ones defined?
template <class T>
ASC_PLAIN inline bool active_defined(const VReg<T>& s, const vector_bool& m, int first, int n) {
  if (s.defined.full() && m.bad.empty()) return true;
  for (int i = first; i < first + n; ++i) {
    if (m.bad.get(i * int(sizeof(T)))) return false;
    if (active<T>(m, i) && !s.lane_defined(i)) return false;
  }
  return true;
}

template <class D, class T>
ASC_PLAIN inline D tree_sum(const VReg<T>& s, const vector_bool& m, int first, int n) {
  D t[VReg<T>::N];
  for (int i = 0; i < n; ++i) t[i] = active<T>(m, first + i) ? static_cast<D>(s.v[first + i]) : D{};
  for (int k = n / 2; k; k /= 2) {
    for (int i = 0; i < k; ++i) t[i] = add<D>(t[2 * i], t[2 * i + 1]);
  }
  return t[0];
}

/// The best active lane of [first, first + n) and its index; of no active lane the neutral value and `first`.
template <bool Largest, class T>
ASC_PLAIN inline T best_lane(const VReg<T>& s, const vector_bool& m, int first, int n, int& index) {
  bool any = false;
  T best{};
  index = first;
  for (int i = first; i < first + n; ++i) {
    if (!active<T>(m, i)) continue;
    wide_t<T> x = s.v[i], y = best;
    if (!any || (Largest ? x > y : x < y)) {
      best = s.v[i];
      index = i;
    }
    any = true;
  }
  if (any) return best;
  if constexpr (kIsInt<T>) return Largest ? std::numeric_limits<T>::lowest() : std::numeric_limits<T>::max();
  if constexpr (kIsFloat<T>) return static_cast<T>(Largest ? -INFINITY : INFINITY);
}

template <bool Largest, class T>
ASC_PLAIN inline void reduce_best(VReg<T>& d, const VReg<T>& s, const vector_bool& m) {
  VReg<T> r = VReg<T>::zeros();
  int index = 0;
  r.v[0] = best_lane<Largest>(s, m, 0, VReg<T>::N, index);
  r.v[1] = from_bits<T>(static_cast<bits_t<T>>(index));
  bool known = active_defined(s, m, 0, VReg<T>::N);
  r.set_lane_defined(0, known);
  r.set_lane_defined(1, known);
  d = r;
}

template <bool Largest, class T>
ASC_PLAIN inline void reduce_best_blocks(VReg<T>& d, const VReg<T>& s, const vector_bool& m) {
  VReg<T> r = VReg<T>::zeros();
  constexpr int n = 32 / sizeof(T);
  for (int b = 0; b < 8; ++b) {
    int index = 0;
    r.v[b] = best_lane<Largest>(s, m, b * n, n, index);
    r.set_lane_defined(b, active_defined(s, m, b * n, n));
  }
  d = r;
}

}  // namespace asc_host

/// The sum in lane 0, zeros elsewhere; integers of 8 and 16 bits are summed in the next width.
template <class D, class T>
ASC_PLAIN inline void asc_reduce_sum(asc_host::VReg<D>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::VReg<D> r = asc_host::VReg<D>::zeros();
  r.v[0] = asc_host::tree_sum<D>(s, m, 0, asc_host::VReg<T>::N);
  r.set_lane_defined(0, asc_host::active_defined(s, m, 0, asc_host::VReg<T>::N));
  d = r;
}
/// The value in lane 0 and its index in lane 1; of equal ones the first.
template <class T>
ASC_PLAIN inline void asc_reduce_max(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::reduce_best<true>(d, s, m);
}
template <class T>
ASC_PLAIN inline void asc_reduce_min(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::reduce_best<false>(d, s, m);
}
/// Of the eight blocks of 32 bytes, in lanes 0 to 7.
template <class T>
ASC_PLAIN inline void asc_reduce_max_datablock(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::reduce_best_blocks<true>(d, s, m);
}
template <class T>
ASC_PLAIN inline void asc_reduce_min_datablock(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::reduce_best_blocks<false>(d, s, m);
}
template <class T>
ASC_PLAIN inline void asc_reduce_sum_datablock(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::VReg<T> r = asc_host::VReg<T>::zeros();
  constexpr int n = 32 / sizeof(T);
  for (int b = 0; b < 8; ++b) {
    r.v[b] = static_cast<T>(asc_host::tree_sum<asc_host::wide_t<T>>(s, m, b * n, n));
    r.set_lane_defined(b, asc_host::active_defined(s, m, b * n, n));
  }
  d = r;
}
/// Lanes 2i and 2i + 1 summed in lane i of the lower half.
template <class T>
ASC_PLAIN inline void asc_pair_reduce_sum(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m) {
  asc_host::VReg<T> r = asc_host::VReg<T>::zeros();
  for (int i = 0; i < asc_host::VReg<T>::N / 2; ++i) {
    r.v[i] = static_cast<T>(asc_host::tree_sum<asc_host::wide_t<T>>(s, m, 2 * i, 2));
    r.set_lane_defined(i, asc_host::active_defined(s, m, 2 * i, 2));
  }
  d = r;
}
