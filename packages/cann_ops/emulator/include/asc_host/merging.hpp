// The register operations under their instruction names, which take the mode: generated code uses them where lanes
// that are off keep the destination.
#pragma once

#include "asc_host/arithmetic.hpp"
#include "asc_host/compare.hpp"
#include "asc_host/predicates.hpp"
#include "asc_host/reduce.hpp"

namespace asc_host {

/// Runs `f` on a result of its own; then merges, or replaces.
template <class M, class T, class F>
ASC_PLAIN inline void with_mode(VReg<T>& d, const vector_bool& m, F f) {
  VReg<T> result;
  f(result);
  if (M::value == MODE_MERGING) {
    merge_into(d, result, m);
  } else {
    d = result;
  }
}

}  // namespace asc_host

#define ASC_MODE_BINARY(name, call)                                                              \
  template <class T, class R, class M>                                                           \
  ASC_PLAIN inline void name(asc_host::VReg<T>& d, asc_host::VReg<T> a, R b, vector_bool m, M) { \
    asc_host::with_mode<M>(d, m, [&](asc_host::VReg<T>& r) ASC_INLINE { call(r, a, b, m); });    \
  }
ASC_MODE_BINARY(vadd, asc_add)
ASC_MODE_BINARY(vsub, asc_sub)
ASC_MODE_BINARY(vmul, asc_mul)
ASC_MODE_BINARY(vdiv, asc_div)
ASC_MODE_BINARY(vmax, asc_max)
ASC_MODE_BINARY(vmin, asc_min)
ASC_MODE_BINARY(vand, asc_and)
ASC_MODE_BINARY(vor, asc_or)
ASC_MODE_BINARY(vxor, asc_xor)
ASC_MODE_BINARY(vshl, asc_shiftleft)
ASC_MODE_BINARY(vshr, asc_shiftright)
ASC_MODE_BINARY(vabsdif, asc_abs_sub)
ASC_MODE_BINARY(vadds, asc_add_scalar)
ASC_MODE_BINARY(vmuls, asc_mul_scalar)
ASC_MODE_BINARY(vmaxs, asc_max_scalar)
ASC_MODE_BINARY(vmins, asc_min_scalar)
ASC_MODE_BINARY(vshls, asc_shiftleft_scalar)
ASC_MODE_BINARY(vshrs, asc_shiftright_scalar)
#undef ASC_MODE_BINARY

#define ASC_MODE_UNARY(name, call)                                                          \
  template <class T, class M>                                                               \
  ASC_PLAIN inline void name(asc_host::VReg<T>& d, asc_host::VReg<T> a, vector_bool m, M) { \
    asc_host::with_mode<M>(d, m, [&](asc_host::VReg<T>& r) ASC_INLINE { call(r, a, m); });  \
  }
ASC_MODE_UNARY(vexp, asc_exp)
ASC_MODE_UNARY(vln, asc_ln)
ASC_MODE_UNARY(vsqrt, asc_sqrt)
ASC_MODE_UNARY(vabs, asc_abs)
ASC_MODE_UNARY(vneg, asc_neg)
ASC_MODE_UNARY(vrelu, asc_relu)
ASC_MODE_UNARY(vnot, asc_not)
#undef ASC_MODE_UNARY

/// d + a * scalar in active lanes.
template <class T, class S, class M>
ASC_PLAIN inline void vaxpy(asc_host::VReg<T>& d, asc_host::VReg<T> a, S scalar, vector_bool m, M) {
  asc_host::VReg<T> old = d;
  asc_host::with_mode<M>(d, m, [&](asc_host::VReg<T>& r) ASC_INLINE {
    r = old;
    asc_axpy(r, a, scalar, m);
  });
}

template <class T, class S, class M>
ASC_PLAIN inline void vdup(asc_host::VReg<T>& d, S scalar, vector_bool m, M) {
  asc_host::with_mode<M>(d, m, [&](asc_host::VReg<T>& r) ASC_INLINE { asc_duplicate_scalar(r, scalar, m); });
}
template <class T, int V, class M>
ASC_PLAIN inline void vdup(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m, asc_host::Pos<V>, M) {
  asc_host::with_mode<M>(d, m, [&](asc_host::VReg<T>& r) ASC_INLINE {
    asc_host::broadcast_lane(r, s, V ? asc_host::VReg<T>::N - 1 : 0, m);
  });
}

// Reductions write lane 0, or lanes 0 and 1; the others keep the destination.
template <class D, class T, class M>
ASC_PLAIN inline void vcadd(asc_host::VReg<D>& d, asc_host::VReg<T> s, vector_bool m, M) {
  asc_host::with_mode<M>(d, asc_host::mask_of<sizeof(D)>(PAT_VL1),
                         [&](asc_host::VReg<D>& r) ASC_INLINE { asc_reduce_sum(r, s, m); });
}
template <class T, class M>
ASC_PLAIN inline void vcmax(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m, M) {
  asc_host::with_mode<M>(d, asc_host::mask_of<sizeof(T)>(PAT_VL2),
                         [&](asc_host::VReg<T>& r) ASC_INLINE { asc_reduce_max(r, s, m); });
}
template <class T, class M>
ASC_PLAIN inline void vcmin(asc_host::VReg<T>& d, asc_host::VReg<T> s, vector_bool m, M) {
  asc_host::with_mode<M>(d, asc_host::mask_of<sizeof(T)>(PAT_VL2),
                         [&](asc_host::VReg<T>& r) ASC_INLINE { asc_reduce_min(r, s, m); });
}
