// Running a kernel: global memory, cores as fibers, the order in which they run, and the end.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "asc_host/simt.hpp"
#include "state.hpp"

uint32_t block_idx = 0;
asc_index3 threadIdx, blockDim, blockIdx, gridDim;

namespace asc_host {

namespace {

constexpr size_t kCoreStack = 1u << 20;

uint8_t* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("host", "no address space for %zu bytes", bytes);
  return static_cast<uint8_t*>(p);
}

void open_pages(uint8_t* p, size_t bytes) {
  if (bytes && mprotect(p, bytes, PROT_READ | PROT_WRITE) != 0) fail("host", "no memory for %zu bytes", bytes);
}

/// Each tensor in the middle of a slot of address space of its own: an index that leaves it meets nothing else.
void place_tensors(Machine& m, AscArgument* arguments, int count, std::vector<void*>& values) {
  size_t tensors = 0;
  for (int i = 0; i < count; ++i) tensors += arguments[i].is_tensor != 0;
  m.gm_bytes = tensors * kTensorSlot;
  if (tensors) m.gm_base = reserve(m.gm_bytes);
  for (int i = 0; i < count; ++i) {
    AscArgument& a = arguments[i];
    if (!a.is_tensor) {
      std::memcpy(&values[size_t(i)], a.data, a.bytes);
      continue;
    }
    uint8_t* data = m.gm_base + m.tensors.size() * kTensorSlot + kTensorStart;
    open_pages(data, a.bytes);
    m.tensors.push_back(std::make_unique<Memory>(std::string("tensor ") + a.name, a.bytes, data, true));
    Memory& tensor = *m.tensors.back();
    if (a.undefined) {
      std::memset(data, 0xff, a.bytes);
    } else if (a.bytes) {
      std::memcpy(data, a.data, a.bytes);
      std::memset(tensor.defined, 0xff, a.bytes);
    }
    values[size_t(i)] = data;
  }
}

/// Two views of one host buffer are two tensors here: what the kernel writes through one must not be used through the
/// other.
void need_apart(Machine& m, const std::vector<AscArgument*>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (size_t j = 0; j < tensors.size(); ++j) {
      auto *a = static_cast<uint8_t*>(tensors[i]->data), *b = static_cast<uint8_t*>(tensors[j]->data);
      if (i == j || a + tensors[i]->bytes <= b || b + tensors[j]->bytes <= a) continue;
      uint8_t *first = std::max(a, b), *end = std::min(a + tensors[i]->bytes, b + tensors[j]->bytes);
      for (uint8_t* p = first; p < end; ++p) {
        bool used = m.tensors[j]->writer[p - b] || m.tensors[j]->readers[0][p - b];
        if (!used || !m.tensors[i]->writer[p - a]) continue;
        fail("value", "tensors %s and %s share byte %lld of the former, which the kernel writes", tensors[i]->name,
             tensors[j]->name, static_cast<long long>(p - a));
      }
    }
  }
}

/// Bytes that the kernel wrote go back; of a tensor that was undefined all do, so that what is missing shows.
void return_tensors(Machine& m, AscArgument* arguments, int count) {
  std::vector<AscArgument*> tensors;
  for (int i = 0; i < count; ++i) {
    if (arguments[i].is_tensor) tensors.push_back(&arguments[i]);
  }
  if (m.options->checked) need_apart(m, tensors);
  for (size_t t = 0; t < tensors.size(); ++t) {
    AscArgument& a = *tensors[t];
    Memory& tensor = *m.tensors[t];
    auto* to = static_cast<uint8_t*>(a.data);
    bool all = a.undefined || !m.options->checked;
    for (size_t i = 0; i < a.bytes; ++i) {
      if (all || tensor.writer[i]) to[i] = tensor.data[i];
    }
    if (a.defined && a.bytes) std::memcpy(a.defined, tensor.defined, a.bytes);
  }
}

/// The memories of a block: those of an earlier one that has ended, or new ones.
Block* take_block(Machine& m, int index) {
  std::unique_ptr<Block> b;
  bool cube = m.kernel->kind == CoreKind::kCube || m.kernel->blocks == 3;
  bool vector = m.kernel->kind == CoreKind::kVector || m.kernel->blocks == 3;
  int subs = !vector ? 0 : m.kernel->blocks == 3 ? 2 : 1;
  size_t first = size_t(index) * size_t(m.kernel->blocks) + (m.kernel->blocks == 3 ? 1 : 0);
  if (!m.free_blocks.empty()) {
    b = std::move(m.free_blocks.back());
    m.free_blocks.pop_back();
  } else {
    b = std::make_unique<Block>();
    for (int s = 0; s < subs; ++s) {
      b->ub[s] = std::make_unique<Memory>("UB", kUbBytes, m.cores[first + size_t(s)].ub, false);
    }
    if (cube) {
      b->l1 = std::make_unique<Memory>("L1", kL1Bytes, nullptr, false);
      b->l0a = std::make_unique<Memory>("L0A", kL0aBytes, nullptr, false);
      b->l0b = std::make_unique<Memory>("L0B", kL0bBytes, nullptr, false);
      b->l0c = std::make_unique<Memory>("L0C", kL0cBytes, nullptr, false);
      b->scale_a = std::make_unique<Memory>("scales of L0A", kScaleBytes, nullptr, false);
      b->scale_b = std::make_unique<Memory>("scales of L0B", kScaleBytes, nullptr, false);
    }
  }
  for (Memory* memory : {b->l1.get(), b->l0a.get(), b->l0b.get(), b->l0c.get(), b->scale_a.get(), b->scale_b.get()}) {
    if (memory) memory->reset();
  }
  for (int s = 0; s < subs; ++s) {
    b->ub[s]->data = m.cores[first + size_t(s)].ub;
    open_pages(b->ub[s]->data, kUbBytes);
    b->ub[s]->reset();
  }
  b->index = index;
  m.used_blocks.push_back(std::move(b));
  return m.used_blocks.back().get();
}

void give_block(Machine& m, int index) {
  for (auto it = m.used_blocks.begin(); it != m.used_blocks.end(); ++it) {
    if ((*it)->index != index) continue;
    for (auto& ub : (*it)->ub) {
      if (ub) madvise(ub->data, kUbBytes, MADV_DONTNEED);
    }
    m.free_blocks.push_back(std::move(*it));
    m.used_blocks.erase(it);
    return;
  }
}

void check_end(Core& core) {
  for (const auto& [key, flag] : core.flags) {
    if (!flag.set) continue;
    auto [from, to, id] = key;
    fail("flag", "at the end the flag (%s, %s, %d) is set and was not waited for", pipe_name(from), pipe_name(to), id);
  }
  for (const auto& [id, lock] : core.locks) {
    if (lock.holder >= 0) fail("flag", "at the end pipe %s holds lock %d", pipe_name(lock.holder), id);
  }
  if (core.atomic != Atomic::kNone) fail("value", "at the end asc_set_atomic_none is missing");
}

void core_main() {
  machine->kernel->run(machine->slots);
  Core& core = running();
  core.now = PIPE_S;
  check_end(core);
  core.done = true;
  machine->progress++;
  setcontext(&machine->main);
}

void enter(Machine& m, Core& core) {
  m.core = &core;
  block_idx = uint32_t(core.block);
  blockIdx = {block_idx, 0, 0};
  if (!core.started) {
    core.started = true;
    core.stack = std::make_unique<Stack>(kCoreStack);
    core.stack->use(core.context, core_main);
  }
  core.waits_for.clear();
  swapcontext(&m.main, &core.context);
  m.core = nullptr;
}

void set_up_cores(Machine& m) {
  int per_block = m.kernel->blocks, grid = m.options->cores;
  m.cores.resize(size_t(grid * per_block));
  m.ub_bytes = m.cores.size() * kUbSlot;
  m.ub_base = reserve(m.ub_bytes + 2 * kUbGuard) + kUbGuard;
  Clock zero(m.cores.size() * kPipes, 0);
  for (size_t i = 0; i < m.cores.size(); ++i) {
    Core& core = m.cores[i];
    core.index = int(i);
    core.block = int(i) / per_block;
    int place = int(i) % per_block;
    core.kind = per_block == 3 ? (place == 0 ? CoreKind::kCube : CoreKind::kVector) : m.kernel->kind;
    core.sub = place == 2 ? 1 : 0;
    core.ub = m.ub_base + i * kUbSlot + kUbStart;
    for (Actor& actor : core.pipes) actor.clock = zero;
    Actor& scalar = core.pipes[PIPE_S];
    scalar.issued = 1;
    scalar.sites.push_back({"scalar code", 0});
    scalar.clock[actor_of(core, PIPE_S)] = 1;
  }
  gridDim = {uint32_t(grid), 1, 1};
}

/// Cores of one block in turn until it ends or waits for another block; then the next block.
void run_blocks(Machine& m) {
  int per_block = m.kernel->blocks;
  size_t left = m.cores.size();
  while (left && m.error.empty()) {
    uint64_t before = m.progress;
    for (int b = 0; b < m.options->cores && m.error.empty(); ++b) {
      uint64_t last = 0;
      do {
        last = m.progress;
        for (int k = 0; k < per_block && m.error.empty(); ++k) {
          Core& core = m.cores[size_t(b * per_block + k)];
          if (core.done) continue;
          if (!m.cores[size_t(b * per_block)].memories) {
            Block* block = take_block(m, b);
            for (int j = 0; j < per_block; ++j) m.cores[size_t(b * per_block + j)].memories = block;
          }
          enter(m, core);
          if (!core.done) continue;
          --left;
          core.stack.reset();
          bool all = true;
          for (int j = 0; j < per_block; ++j) all &= m.cores[size_t(b * per_block + j)].done;
          if (!all) continue;
          for (int j = 0; j < per_block; ++j) m.cores[size_t(b * per_block + j)].memories = nullptr;
          give_block(m, b);
        }
      } while (m.progress != last && m.error.empty());
    }
    if (left && m.progress == before && m.error.empty()) {
      std::string text = "deadlock: every core that is left waits.";
      int shown = 0;
      for (const Core& core : m.cores) {
        if (core.done || shown++ == 6) continue;
        text += " Block " + std::to_string(core.block) +
                (core.kind == CoreKind::kCube ? ", cube core: " : ", vector ") +
                (core.kind == CoreKind::kCube ? "" : std::to_string(core.sub) + ": ") + core.waits_for + ".";
      }
      m.error = text;
    }
  }
}

}  // namespace

void block_core(const std::string& why) {
  Core& core = running();
  core.waits_for = why;
  swapcontext(&core.context, &machine->main);
}

}  // namespace asc_host

extern "C" __attribute__((visibility("default"))) int asc_host_run(int kernel, AscArgument* arguments, int count,
                                                                   AscOptions* options, char* message, uint64_t size) {
  using namespace asc_host;
  Machine m;
  std::vector<void*> values(size_t(count) + 1, nullptr);
  machine = &m;
  m.options = options;
  try {
    m.kernel = &kKernels[kernel];
    place_tensors(m, arguments, count, values);
    m.slots = values.data();
    set_up_cores(m);
    {
      FaultGuard guard;
      run_blocks(m);
    }
    if (m.error.empty()) check_cross_flags();
    if (m.error.empty()) return_tensors(m, arguments, count);
  } catch (const Stopped&) {
  }
  release_stacks();
  if (m.gm_base) munmap(m.gm_base, m.gm_bytes);
  if (m.ub_base) munmap(m.ub_base - kUbGuard, m.ub_bytes + 2 * kUbGuard);
  machine = nullptr;
  std::snprintf(message, size, "%s", m.error.c_str());
  return m.error.empty() ? 0 : 1;
}
