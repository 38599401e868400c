// What the Python side calls: one entry for each kernel of a compiled source.
#pragma once

#include <cstdint>

#include "asc_host/machine.hpp"

extern "C" {

/// A tensor in global memory or a scalar of a kernel, in the order of its parameters.
struct AscArgument {
  const char* name;
  void* data;  // a tensor's bytes, copied in and out; a scalar's value
  uint64_t bytes;
  int32_t is_tensor;
  int32_t undefined;  // the kernel must write before it reads
  uint8_t* defined;   // if given: after the run 0xff for each defined byte of the tensor
};

/// A part of UB that is one buffer.
struct AscBuffer {
  const char* name;
  uint32_t first, bytes;
};

struct AscOptions {
  int32_t cores;      // blocks of the grid
  uint32_t ub_bytes;  // what the kernel may use of UB
  int32_t checked;    // clocks and undefined data; bounds and pairing of flags are always checked
  int32_t barrier_blocks_scalar;
  int32_t threads_read_undefined;  // SIMT threads may; the bytes are 0xff
  int32_t buffer_count;            // if not 0, all of UB that may be used
  const AscBuffer* buffers;
  uint64_t most_steps;       // instructions and accesses; a kernel that takes more is taken for one that does not end
  uint64_t copied_bytes[4];  // out: global memory read and written by copies, products, instructions
};

/// Returns 0, or 1 with "kind: text" in `message`.
int asc_host_run(int kernel, AscArgument* arguments, int count, AscOptions* options, char* message, uint64_t size);
}

namespace asc_host {

struct Kernel {
  const char* name;
  int blocks;  // 1 vector core, 1 cube core, or 3 cores of a mixed block
  CoreKind kind;
  void (*run)(void* const* slots);
};

/// Defined beside the compiled source.
extern const Kernel kKernels[];
extern const int kKernelCount;

/// Marks the body of a SIMD function as one region of the vector pipe.
struct SimdRegion {
  explicit SimdRegion(const char* name, int line = __builtin_LINE()) { begin_simd(name, line); }
  ~SimdRegion() { end_simd(); }
};

}  // namespace asc_host
