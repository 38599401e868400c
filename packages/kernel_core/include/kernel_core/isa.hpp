// Which instruction set a kernel runs with, chosen at run time.
//
// A kernel source is compiled once for each level inside `namespace KERNEL_CORE_ISA`, so that two copies of one
// inline function never meet in the linker. `Variants` holds the copies and picks the best that the CPU has.
#pragma once

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#define KERNEL_CORE_X86 1
#else
#define KERNEL_CORE_X86 0
#endif

namespace kernel_core {

enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2, amx = 3 };

inline const char* isa_name(Isa isa) {
  static const char* const names[] = {"scalar", "avx2", "avx512", "amx"};
  return names[static_cast<int>(isa)];
}

// The kernel hands out tile registers only to a process that asks for them (Linux 5.16 and later).
inline bool request_amx() {
#if KERNEL_CORE_X86 && defined(__linux__)
  constexpr long kReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kReqXcompPerm, kTileData) == 0;
#else
  return false;
#endif
}

#if KERNEL_CORE_X86
inline bool cpu_has_amx_bf16() {
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  const bool cpu = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
  return cpu && __builtin_cpu_supports("avx512bf16") && request_amx();
}
#endif

inline Isa detect_isa() {
#if KERNEL_CORE_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && cpu_has_amx_bf16()) return Isa::amx;
  if (avx512) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::scalar;
}

namespace detail {
inline std::atomic<int>& isa_slot() {
  static std::atomic<int> slot{static_cast<int>(detect_isa())};
  return slot;
}
}  // namespace detail

inline Isa active_isa() { return static_cast<Isa>(detail::isa_slot().load(std::memory_order_relaxed)); }

// For tests and benchmarks: use at most this level. Asking for more than the CPU has is an error.
inline void limit_isa(const std::string& name) {
  const Isa best = detect_isa();
  for (int i = 0; i <= static_cast<int>(best); ++i) {
    if (name == isa_name(static_cast<Isa>(i))) {
      detail::isa_slot().store(i);
      return;
    }
  }
  if (name == "best") {
    detail::isa_slot().store(static_cast<int>(best));
    return;
  }
  throw std::invalid_argument("isa '" + name + "' is not available here; the best of this CPU is '" + isa_name(best) +
                              "'");
}

// The compiled copies of one function. A missing copy (nullptr) falls back to the level below it.
template <typename Fn>
struct Variants {
  Fn scalar;
  Fn avx2 = nullptr;
  Fn avx512 = nullptr;
  Fn amx = nullptr;

  Fn pick() const {
    const Isa isa = active_isa();
    if (isa >= Isa::amx && amx) return amx;
    if (isa >= Isa::avx512 && avx512) return avx512;
    if (isa >= Isa::avx2 && avx2) return avx2;
    return scalar;
  }
};

}  // namespace kernel_core

// Declares `ret name args` in the namespace of each level: KERNEL_CORE_DECLARE(void, add, (float*, int));
#if KERNEL_CORE_X86
#define KERNEL_CORE_DECLARE(ret, name, args) \
  namespace scalar {                         \
  ret name args;                             \
  }                                          \
  namespace avx2 {                           \
  ret name args;                             \
  }                                          \
  namespace avx512 {                         \
  ret name args;                             \
  }
#define KERNEL_CORE_PICK(name) \
  (::kernel_core::Variants<decltype(&scalar::name)>{&scalar::name, &avx2::name, &avx512::name}.pick())
#else
#define KERNEL_CORE_DECLARE(ret, name, args) \
  namespace scalar {                         \
  ret name args;                             \
  }
#define KERNEL_CORE_PICK(name) (&scalar::name)
#endif
