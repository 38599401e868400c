// State of a run. One thread runs everything: cores and SIMT threads are fibers that are switched where they wait.
#pragma once

#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "asc_host/copies.hpp"
#include "asc_host/launch.hpp"

namespace asc_host {

/// A vector clock: for each pipe of each core the number of its instructions that are known to be complete.
using Clock = std::vector<uint32_t>;
void join(Clock& into, const Clock& from);

/// An instruction as (pipe, number), in one word; 0 is none. The top bit marks an atomic access.
using Epoch = uint64_t;
constexpr Epoch kAtomicBit = 1ull << 63;
inline Epoch make_epoch(uint32_t actor, uint32_t number) { return (uint64_t(actor) << 32) | number; }
inline uint32_t epoch_actor(Epoch e) { return uint32_t((e & ~kAtomicBit) >> 32); }
inline uint32_t epoch_number(Epoch e) { return uint32_t(e); }

constexpr uint8_t kDoubtful = 0x80;

/// Bytes with their shadows; all is zero where nothing was written. Readers: one slot for each of three groups of
/// pipes.
struct Memory {
  Memory(std::string name, size_t bytes, uint8_t* data, bool global);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void reset();  // poison, nothing defined, nobody was here

  std::string name;
  size_t bytes;
  uint8_t* data;
  bool global;
  uint8_t* defined;   // 0xff, 0, or kDoubtful: undefined because of an access that nothing orders
  Epoch* writer;      // last write
  Epoch* readers[3];  // last reads; global memory uses the first only
  uint64_t* threads;  // phase, writing and reading SIMT thread, see access.cpp
  uint8_t* reserved_;
  size_t reserved_bytes_;
  std::map<size_t, Clock> shared;  // global memory: reads by unordered pipes, of whole pages
};

/// Memory for the stack of a fiber; below it lies a page that nobody may touch.
class Stack {
 public:
  explicit Stack(size_t bytes);
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  void use(ucontext_t& context, void (*entry)());

 private:
  size_t bytes_, guard_;
  uint8_t* base_;
};

/// While it lives, a fault of the host's memory ends the run like any other error.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

 private:
  std::unique_ptr<uint8_t[]> stack_;
  stack_t before_stack_{};
  struct sigaction before_segv_{}, before_bus_{};
};

/// A pipe of a core.
struct Actor {
  Clock clock;              // what is complete when its next instruction starts
  uint32_t issued = 0;      // number of its last instruction
  std::vector<Site> sites;  // of instructions 1, 2, ...
};

struct Flag {
  bool set = false;
  Clock clock;
};
struct Lock {
  int holder = -1;
  Clock clock;
};

struct Block {
  int index = 0;
  std::unique_ptr<Memory> ub[2], l1, l0a, l0b, l0c, scale_a, scale_b;
};

struct Core {
  int index = 0;  // among all cores
  int block = 0;
  CoreKind kind = CoreKind::kVector;
  int sub = 0;
  Block* memories = nullptr;
  uint8_t* ub = nullptr;  // host address of UB offset 0
  Actor pipes[kPipes];
  std::map<std::tuple<int, int, int>, Flag> flags;
  std::map<int, Lock> locks;
  Clock unit_full, unit_free;  // unit flag between M and FIX
  uint64_t pad_value = 0;
  int row_step = 1, block_step = 1;
  Atomic atomic = Atomic::kNone;
  Number atomic_number = Number::kFloat;
  pipe_t now = PIPE_S;  // pipe of the current instruction
  bool in_simd = false, in_simt = false;
  bool doubtful = false;  // the vector function loaded bytes whose value depends on a race
  uint32_t phase = 0;     // of accesses within a vector function

  ucontext_t context{};
  std::unique_ptr<Stack> stack;
  bool started = false, done = false;
  std::string waits_for;                             // what a blocked core waits for
  std::map<std::pair<int, int>, uint64_t> barriers;  // (scope, id): how often it waited
};

/// A flag between cores: the clocks with which it was set.
struct CrossFlag {
  std::deque<Clock> arrivals;
};

struct Thread {
  ucontext_t context{};
  enum class State { kReady, kWarp, kBlock, kDone } state = State::kReady;
  uint64_t value = 0;
};

struct Machine {
  AscOptions* options = nullptr;
  const Kernel* kernel = nullptr;
  std::vector<Core> cores;
  std::vector<std::unique_ptr<Block>> free_blocks;
  std::vector<std::unique_ptr<Block>> used_blocks;
  std::vector<std::unique_ptr<Memory>> tensors;
  uint8_t* gm_base = nullptr;
  size_t gm_bytes = 0;
  uint8_t* ub_base = nullptr;
  size_t ub_bytes = 0;
  std::map<std::tuple<int, int, int>, CrossFlag> cross;  // scope, target, id
  uint32_t next_phase = 1;
  Core* core = nullptr;  // running
  ucontext_t main{};
  uint64_t steps = 0;     // instructions and accesses
  uint64_t progress = 0;  // grows whenever a core did something that another may wait for
  std::string error, doubt;
  void* const* slots = nullptr;
};

/// Thrown by `fail` where no core runs.
struct Stopped {};

extern Machine* machine;
inline Core& running() { return *machine->core; }

constexpr size_t kTensorSlot = 1ull << 33;   // address space for one tensor
constexpr size_t kTensorStart = 1ull << 32;  // its first byte, so that any 32-bit index from it stays in the slot
constexpr size_t kUbGuard = 1ull << 33;      // address space on both sides of all unified buffers
constexpr size_t kUbSlot = 4u << 20;
constexpr size_t kUbStart = 1u << 20;

// access.cpp
Memory* memory_at(const void* p, int64_t& offset, bool& near);
void check_read(Memory& m, int64_t offset, size_t bytes, const char* what);
void check_write(Memory& m, int64_t offset, size_t bytes, const char* what, bool atomic = false);
Memory& memory_of(Space space);
void count_step();
/// An error if bytes that depend on a race reach a result.
void need_no_doubt(const uint8_t* defined, size_t bytes);
std::string describe(uint32_t actor);
Site site_of(Epoch e);
void copy_in(Memory& m, int64_t offset, size_t bytes, uint8_t* out, uint8_t* defined);
void copy_out(Memory& m, int64_t offset, size_t bytes, const uint8_t* in, const uint8_t* defined);

// pipes.cpp
uint32_t actor_of(const Core& core, int pipe);
const char* pipe_name(int pipe);

// cross_core.cpp
void check_cross_flags();

// cores.cpp
void block_core(const std::string& why);

// simt.cpp
int current_thread();
void release_stacks();

}  // namespace asc_host
