// Making predicates and computing with them.
#pragma once

#include "asc_host/registers.hpp"

namespace asc_host {

template <int Bytes>
ASC_PLAIN inline vector_bool mask_of(int pattern) {
  vector_bool m = vector_bool::none();
  constexpr int n = kRegisterBytes / Bytes;
  for (int i = 0; i < n; ++i) {
    bool on = false;
    switch (pattern) {
      case PAT_ALL:
        on = true;
        break;
      case PAT_ALLF:
        break;
      case PAT_H:
        on = i < n / 2;
        break;
      case PAT_Q:
        on = i < n / 4;
        break;
      case PAT_M3:
        on = i % 3 == 0;
        break;
      case PAT_M4:
        on = i % 4 == 0;
        break;
      default:
        on = i < pattern;
    }
    m.set(i * Bytes, on);
  }
  return m;
}

/// The first `count` lanes; `count` falls by what they cover.
template <int Bytes>
ASC_PLAIN inline vector_bool next_mask(uint32_t& count) {
  vector_bool m = vector_bool::none();
  constexpr uint32_t n = kRegisterBytes / Bytes;
  for (uint32_t i = 0; i < n; ++i) m.set(int(i) * Bytes, i < count);
  count = count > n ? count - n : 0;
  return m;
}

template <class F>
ASC_PLAIN inline vector_bool words(const vector_bool& a, const vector_bool& b, const vector_bool& m, F f) {
  vector_bool r;
  for (int k = 0; k < 4; ++k) r.bits.w[k] = f(a.bits.w[k], b.bits.w[k], m.bits.w[k]);
  r.bad = a.bad | b.bad | m.bad;
  return r;
}

template <int Bytes>
ASC_PLAIN inline void interleave(vector_bool& d0, vector_bool& d1, const vector_bool& a, const vector_bool& b) {
  vector_bool r0 = vector_bool::none(), r1 = vector_bool::none();
  constexpr int n = kRegisterBytes / Bytes;
  for (int i = 0; i < n; ++i) {
    const vector_bool& from = (i & 1) ? b : a;
    int low = (i / 2) * Bytes, high = (n / 2 + i / 2) * Bytes;
    r0.bits.set(i * Bytes, from.bits.get(low));
    r0.bad.set(i * Bytes, from.bad.get(low));
    r1.bits.set(i * Bytes, from.bits.get(high));
    r1.bad.set(i * Bytes, from.bad.get(high));
  }
  d0 = r0;
  d1 = r1;
}

template <int Bytes>
ASC_PLAIN inline void deinterleave(vector_bool& d0, vector_bool& d1, const vector_bool& a, const vector_bool& b) {
  vector_bool r[2] = {vector_bool::none(), vector_bool::none()};
  constexpr int n = kRegisterBytes / Bytes;
  for (int j = 0; j < 2 * n; ++j) {
    const vector_bool& from = j < n ? a : b;
    int at = (j % n) * Bytes;
    r[j & 1].bits.set(j / 2 * Bytes, from.bits.get(at));
    r[j & 1].bad.set(j / 2 * Bytes, from.bad.get(at));
  }
  d0 = r[0];
  d1 = r[1];
}

/// Bit i of `s`, times `from_step` and from `from`, to bit i times `to_step` from `to`, for 128 bits.
ASC_PLAIN inline vector_bool move_bits(const vector_bool& s, int from, int from_step, int to, int to_step) {
  vector_bool r = vector_bool::none();
  for (int i = 0; i < 128; ++i) {
    r.bits.set(to + i * to_step, s.bits.get(from + i * from_step));
    r.bad.set(to + i * to_step, s.bad.get(from + i * from_step));
  }
  return r;
}

}  // namespace asc_host

ASC_PLAIN inline vector_bool asc_create_mask_b8(asc_mask_pattern p) { return asc_host::mask_of<1>(p); }
ASC_PLAIN inline vector_bool asc_create_mask_b16(asc_mask_pattern p) { return asc_host::mask_of<2>(p); }
ASC_PLAIN inline vector_bool asc_create_mask_b32(asc_mask_pattern p) { return asc_host::mask_of<4>(p); }
ASC_PLAIN inline vector_bool asc_update_mask_b8(uint32_t& count) { return asc_host::next_mask<1>(count); }
ASC_PLAIN inline vector_bool asc_update_mask_b16(uint32_t& count) { return asc_host::next_mask<2>(count); }
ASC_PLAIN inline vector_bool asc_update_mask_b32(uint32_t& count) { return asc_host::next_mask<4>(count); }

ASC_PLAIN inline void asc_and(vector_bool& d, vector_bool a, vector_bool b, vector_bool m) {
  d = asc_host::words(a, b, m, [](uint64_t x, uint64_t y, uint64_t k) { return x & y & k; });
}
ASC_PLAIN inline void asc_or(vector_bool& d, vector_bool a, vector_bool b, vector_bool m) {
  d = asc_host::words(a, b, m, [](uint64_t x, uint64_t y, uint64_t k) { return (x | y) & k; });
}
ASC_PLAIN inline void asc_xor(vector_bool& d, vector_bool a, vector_bool b, vector_bool m) {
  d = asc_host::words(a, b, m, [](uint64_t x, uint64_t y, uint64_t k) { return (x ^ y) & k; });
}
ASC_PLAIN inline void asc_select(vector_bool& d, vector_bool a, vector_bool b, vector_bool m) {
  d = asc_host::words(a, b, m, [](uint64_t x, uint64_t y, uint64_t k) { return (x & k) | (y & ~k); });
}
ASC_PLAIN inline void asc_not(vector_bool& d, vector_bool a, vector_bool m) {
  d = asc_host::words(a, a, m, [](uint64_t x, uint64_t, uint64_t k) { return ~x & k; });
}

ASC_PLAIN inline void asc_pack_to_low(vector_bool& d, vector_bool s) { d = asc_host::move_bits(s, 0, 2, 0, 1); }
ASC_PLAIN inline void asc_pack_to_high(vector_bool& d, vector_bool s) { d = asc_host::move_bits(s, 0, 2, 128, 1); }
ASC_PLAIN inline void asc_unpack_lower(vector_bool& d, vector_bool s) { d = asc_host::move_bits(s, 0, 1, 0, 2); }
ASC_PLAIN inline void asc_unpack_upper(vector_bool& d, vector_bool s) { d = asc_host::move_bits(s, 128, 1, 0, 2); }

#define ASC_INTERLEAVE(width, bytes)                                                                          \
  ASC_PLAIN inline void asc_intlv_##width(vector_bool& d0, vector_bool& d1, vector_bool a, vector_bool b) {   \
    asc_host::interleave<bytes>(d0, d1, a, b);                                                                \
  }                                                                                                           \
  ASC_PLAIN inline void asc_deintlv_##width(vector_bool& d0, vector_bool& d1, vector_bool a, vector_bool b) { \
    asc_host::deinterleave<bytes>(d0, d1, a, b);                                                              \
  }
ASC_INTERLEAVE(b8, 1)
ASC_INTERLEAVE(b16, 2)
ASC_INTERLEAVE(b32, 4)
#undef ASC_INTERLEAVE
