// Asserts and prints of device code on the host.
#pragma once

#include <cstdio>

#include "c_api/asc_simd.h"

inline void device_assert(bool holds) {
  if (!holds) asc_host::fail("assert", "a device assert does not hold");
}
inline void device_assert_with_msg(bool holds, const char* text) {
  if (!holds) asc_host::fail("assert", "%s", text);
}
inline void device_assert_fail_with_msg(const char* text) { asc_host::fail("assert", "%s", text); }
template <class T>
inline void debug_print_var(const char* text, T value) {
  std::printf("%s %g\n", text, static_cast<double>(value));
}
template <class T>
inline void debug_print_buffer_value(const char* text, const char* buffer, int index, T value) {
  std::printf("%s %s[%d] %g\n", text, buffer, index, static_cast<double>(value));
}
inline void debug_print_msg(const char* text) { std::printf("%s\n", text); }
