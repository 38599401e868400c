// Generated code is compiled with -fsanitize=thread: the compiler calls these before each access through a pointer.
// They replace the sanitizer's library. Host locals are none of our business.
#include <cstring>

#include "state.hpp"

namespace asc_host {

namespace {

constexpr uintptr_t kLowAddresses = 1u << 20;  // numbers that stand for L1 and L0

void touch(void* p, size_t bytes, bool writes) {
  if (!machine || !machine->core) return;
  int64_t offset = 0;
  bool near = false;
  Memory* m = memory_at(p, offset, near);
  if (!near && reinterpret_cast<uintptr_t>(p) >= kLowAddresses) return;
  count_step();
  Core& core = running();
  bool vector = core.in_simt || core.in_simd;
  core.now = vector ? PIPE_V : PIPE_S;
  const char* what = core.in_simt ? "a SIMT thread" : vector ? "SIMD code" : "scalar code";
  if (!near) fail("bounds", "%s uses address %zu, which is no global memory and no UB", what, size_t(p));
  if (!m || (!m->global && m != core.memories->ub[core.sub].get())) {
    fail("bounds", "%s uses byte %lld from its unified buffer on, which is outside or of another core", what,
         static_cast<long long>(static_cast<uint8_t*>(p) - core.ub));
  }
  if (core.in_simd) fail("value", "a SIMD function accesses %s without a register load or store", m->name.c_str());
  if (writes) {
    check_write(*m, offset, bytes, what);
    if (!machine->options->checked) return;
    std::memset(m->defined + offset, 0xff, bytes);
    return;
  }
  check_read(*m, offset, bytes, what);
  if (!machine->options->checked || (core.in_simt && machine->options->threads_read_undefined)) return;
  for (size_t i = 0; i < bytes; ++i) {
    if (m->defined[offset + int64_t(i)] != 0xff) {
      need_no_doubt(m->defined + offset + int64_t(i), 1);
      fail("undefined", "%s reads %s byte %lld, which nothing has written", what, m->name.c_str(),
           static_cast<long long>(offset + int64_t(i)));
    }
  }
}

}  // namespace

}  // namespace asc_host

#define ASC_HOOK(bytes)                                                            \
  void __tsan_read##bytes(void* p) { asc_host::touch(p, bytes, false); }           \
  void __tsan_write##bytes(void* p) { asc_host::touch(p, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* p) { asc_host::touch(p, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* p) { asc_host::touch(p, bytes, true); } \
  void __tsan_volatile_read##bytes(void* p) { asc_host::touch(p, bytes, false); }  \
  void __tsan_volatile_write##bytes(void* p) { asc_host::touch(p, bytes, true); }

extern "C" {
ASC_HOOK(1)
ASC_HOOK(2)
ASC_HOOK(4)
ASC_HOOK(8)
ASC_HOOK(16)
void __tsan_read_range(void* p, unsigned long n) { asc_host::touch(p, n, false); }
void __tsan_write_range(void* p, unsigned long n) { asc_host::touch(p, n, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
