// The emulated machine: cores with their pipes, clocks, flags and on-chip memories.
#pragma once

#include <cstddef>
#include <cstdint>

// The emulator's own accesses are not the kernel's: only generated code is instrumented.
#define ASC_PLAIN __attribute__((no_sanitize("thread")))
#define ASC_INLINE __attribute__((always_inline))

enum pipe_t : int { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };

namespace asc_host {

constexpr int kPipes = 7;
constexpr uint32_t kUbBytes = 256u << 10;  // physical; a launch may allow less of it
constexpr uint32_t kL1Bytes = 512u << 10;
constexpr uint32_t kL0aBytes = 64u << 10;
constexpr uint32_t kL0bBytes = 64u << 10;
constexpr uint32_t kL0cBytes = 256u << 10;
constexpr uint32_t kScaleBytes = kL0aBytes / 16;  // one pair of E8M0 per 32 bytes of data

/// Memories that a copy names; UB is the one of the running core.
enum class Space : int { kUb, kL1, kL0a, kL0b, kL0c, kScaleA, kScaleB, kGm };

enum class CoreKind : int { kCube, kVector };

/// Where in the generated source an instruction stands; line 0 is unknown.
struct Site {
  const char* what;
  int line;
};

/// Stops the run. `kind` is one of the words that the Python side turns into an exception type.
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

CoreKind core_kind();
int sub_block();

/// Address 0 of the running core's unified buffer.
uint8_t* ub_base();

// One instruction on a pipe of the running core: begin, then its accesses, then (implicitly) the next begin.
void begin(pipe_t pipe, const char* what, int line);

/// Reads of the current instruction. `out` receives the bytes (undefined bytes read as 0xff); `defined`, if given,
/// receives 0xff or 0 a byte. `where` is an offset for on-chip memories and a host address for GM and UB.
void load(Space space, const void* where, size_t bytes, uint8_t* out, uint8_t* defined);

/// Writes of the current instruction; `defined` may be null (all defined).
void store(Space space, const void* where, size_t bytes, const uint8_t* in, const uint8_t* defined);

/// The same for UB of AIV `sub` of this block, by offset (the fixpipe writes it from the cube core).
void store_ub_of(int sub, size_t offset, size_t bytes, const uint8_t* in, const uint8_t* defined);

/// A misaligned vector or DMA address is an error on this hardware.
void need_aligned(Space space, const void* where, size_t alignment, const char* what);

// Vector functions: a region begins with each call of a SIMD or SIMT function.
void begin_simd(const char* name, int line);
void end_simd();
void vector_begin(const char* what);  // one load or store of a SIMD function
void memory_barrier(bool store_to_load);

}  // namespace asc_host
