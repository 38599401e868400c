// Flags, locks and barriers between the pipes of a core and between cores.
#pragma once

#include "asc_host/tags.hpp"

namespace asc_host {

void notify(pipe_t from, pipe_t to, int id, int line);
void wait(pipe_t from, pipe_t to, int id, int line);
void lock(pipe_t pipe, int id, int line);
void unlock(pipe_t pipe, int id, int line);
void pipe_barrier(pipe_t pipe, int line);

/// inter: all cores of one kind; block: the cores of a block; subblock: its two vector cores; intra: from one core of a
/// block to another, where a cube core numbers the flags of its second vector core from 16.
enum class Scope { kInter, kBlock, kSubblock, kIntra };
void arrive(Scope scope, pipe_t pipe, int id, int line);
void await(Scope scope, pipe_t pipe, int id, int line);

}  // namespace asc_host

inline void asc_init() {}
inline void asc_sync_notify(pipe_t from, pipe_t to, event_t id, int line = __builtin_LINE()) {
  asc_host::notify(from, to, id, line);
}
inline void asc_sync_wait(pipe_t from, pipe_t to, event_t id, int line = __builtin_LINE()) {
  asc_host::wait(from, to, id, line);
}
inline void asc_sync_pipe(pipe_t pipe, int line = __builtin_LINE()) { asc_host::pipe_barrier(pipe, line); }
inline void asc_sync(int line = __builtin_LINE()) { asc_host::pipe_barrier(PIPE_ALL, line); }
inline void asc_lock(pipe_t pipe, int id, asc_lock_mode mode = ASC_LOCK_BLOCK, int line = __builtin_LINE()) {
  if (mode != ASC_LOCK_BLOCK) asc_host::fail("unsupported", "asc_lock: only ASC_LOCK_BLOCK is emulated");
  asc_host::lock(pipe, id, line);
}
inline void asc_unlock(pipe_t pipe, int id, asc_lock_mode mode = ASC_LOCK_BLOCK, int line = __builtin_LINE()) {
  if (mode != ASC_LOCK_BLOCK) asc_host::fail("unsupported", "asc_unlock: only ASC_LOCK_BLOCK is emulated");
  asc_host::unlock(pipe, id, line);
}

#define ASC_CORES(name, scope)                                                             \
  inline void asc_sync_##name##_arrive(pipe_t pipe, int id, int line = __builtin_LINE()) { \
    asc_host::arrive(asc_host::Scope::scope, pipe, id, line);                              \
  }                                                                                        \
  inline void asc_sync_##name##_wait(pipe_t pipe, int id, int line = __builtin_LINE()) {   \
    asc_host::await(asc_host::Scope::scope, pipe, id, line);                               \
  }
ASC_CORES(inter, kInter)
ASC_CORES(block, kBlock)
ASC_CORES(subblock, kSubblock)
ASC_CORES(intra, kIntra)
#undef ASC_CORES

/// Within a SIMD function a load does not see an earlier store without this.
inline void asc_mem_bar(asc_membar kind) { asc_host::memory_barrier(kind == VST_VLD || kind == VV_ALL); }
