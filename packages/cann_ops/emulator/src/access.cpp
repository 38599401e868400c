// Every access is checked: bounds, the order that flags and barriers give (vector clocks, so a missing wait shows
// whatever order the emulator runs in), and within a vector function the order of its stores, loads and threads.
#include "state.hpp"

#include <algorithm>
#include <cstring>

namespace asc_host {

namespace {

constexpr Epoch kShared = ~0ull;  // of readers of global memory: several, see Memory::shared
constexpr size_t kPage = 4096;
constexpr uint16_t kManyThreads = 0xffff, kAtomicThread = 0xfffe, kSimdStore = 0xfffd;

bool ordered(Epoch e, const Clock& clock) { return epoch_number(e) <= clock[epoch_actor(e)]; }

int reader_slot(const Memory& m, pipe_t pipe) {
  if (m.global) return 0;
  switch (pipe) {
    case PIPE_V:
    case PIPE_M:
    case PIPE_MTE1:
      return 1;
    case PIPE_MTE3:
    case PIPE_FIX:
      return 2;
    default:
      return 0;
  }
}

std::string race_text(const Memory& m, int64_t offset, const char* what, bool writes, Epoch other, bool other_writes) {
  Core& core = running();
  uint32_t me = actor_of(core, core.now);
  Site site = site_of(other & ~kAtomicBit);
  std::string line = site.line > 0 ? ", line " + std::to_string(site.line) : "";
  const char* cause =
      epoch_actor(other) == me ? "no barrier of the pipe stands between them" : "no flag or barrier orders them";
  return m.name + " byte " + std::to_string(offset) + ": the " + (writes ? "write" : "read") + " by " + describe(me) +
         " (" + what + ") comes after a " + (other_writes ? "write" : "read") + " by " + describe(epoch_actor(other)) +
         " (" + site.what + line + "), and " + cause;
}

[[noreturn]] void race(const Memory& m, int64_t offset, const char* what, bool writes, Epoch other, bool other_writes) {
  fail("race", "%s", race_text(m, offset, what, writes, other, other_writes).c_str());
}

/// Named buffers of UB: an access stays within the one in which it begins. Only a register load may reach further.
void check_buffers(int64_t offset, size_t bytes, const char* what, bool writes, bool may_reach_over) {
  const AscOptions& options = *machine->options;
  if (options.buffer_count == 0) return;
  for (int i = 0; i < options.buffer_count; ++i) {
    const AscBuffer& buffer = options.buffers[i];
    int64_t at = offset - buffer.first;
    if (at < 0 || at >= buffer.bytes) continue;
    if (!may_reach_over && at + int64_t(bytes) > buffer.bytes) {
      fail("bounds", "%s %s bytes [%lld, %lld) of buffer %s in UB, allowed is [0, %u)", what,
           writes ? "writes" : "reads", static_cast<long long>(at), static_cast<long long>(at + int64_t(bytes)),
           buffer.name, buffer.bytes);
    }
    return;
  }
  fail("bounds", "%s %s UB bytes [%lld, %lld), where no buffer begins", what, writes ? "writes" : "reads",
       static_cast<long long>(offset), static_cast<long long>(offset + int64_t(bytes)));
}

void check_bounds(const Memory& m, int64_t offset, size_t bytes, const char* what, bool writes, bool may_reach_over) {
  size_t limit = m.bytes;
  bool ub = &m == running().memories->ub[0].get() || &m == running().memories->ub[1].get();
  if (ub) limit = machine->options->ub_bytes;
  if (offset < 0 || uint64_t(offset) + bytes > limit) {
    fail("bounds", "%s %s %s bytes [%lld, %lld), allowed is [0, %zu)", what, writes ? "writes" : "reads",
         m.name.c_str(), static_cast<long long>(offset), static_cast<long long>(offset + int64_t(bytes)), limit);
  }
  if (ub) check_buffers(offset, bytes, what, writes, may_reach_over);
}

/// A register load may reach over the end of a row into bytes that are being written; what it gets there is marked and
/// counts only if it is used. So such a load goes on, with a note of the bytes.
struct Doubt {
  std::vector<uint8_t> bytes;  // 1: unordered
  std::string text;            // of the first
};

template <class Text>
void doubt_at(Doubt& doubt, size_t i, size_t bytes, Text text) {
  if (doubt.bytes.empty()) {
    doubt.bytes.assign(bytes, 0);
    doubt.text = text();
  }
  doubt.bytes[i] = 1;
}

/// Loads behind stores of one SIMD function.
void check_simd(Memory& m, int64_t offset, size_t bytes, const char* what, bool writes, Doubt* doubt) {
  Core& core = running();
  for (size_t i = 0; i < bytes; ++i) {
    uint64_t& mark = m.threads[offset + int64_t(i)];
    if (writes) {
      mark = (uint64_t(core.phase) << 32) | (uint64_t(kSimdStore) << 16);
    } else if (uint32_t(mark >> 32) == core.phase && uint16_t(mark >> 16) == kSimdStore && doubt) {
      doubt_at(*doubt, i, bytes, [&] {
        return m.name + " byte " + std::to_string(offset + int64_t(i)) + ": " + what +
               " loads what the same SIMD function stored; asc_mem_bar(VST_VLD) is missing";
      });
    }
  }
}

/// Accesses of the threads of one SIMT function.
void check_threads(Memory& m, int64_t offset, size_t bytes, bool writes, bool atomic) {
  Core& core = running();
  uint16_t me = atomic ? kAtomicThread : static_cast<uint16_t>(current_thread() + 1);
  for (size_t i = 0; i < bytes; ++i) {
    uint64_t& mark = m.threads[offset + int64_t(i)];
    if (uint32_t(mark >> 32) != core.phase) mark = uint64_t(core.phase) << 32;
    auto writer = static_cast<uint16_t>(mark >> 16), reader = static_cast<uint16_t>(mark);
    bool clash = (writer && writer != me) || (writes && reader && reader != me);
    if (clash) {
      uint16_t other = writer && writer != me ? writer : reader;
      std::string who = other == kManyThreads    ? "several threads"
                        : other == kAtomicThread ? "atomics of threads"
                                                 : "thread " + std::to_string(other - 1);
      fail("race", "%s byte %lld: thread %d %s it and %s touched it, with no asc_syncthreads between", m.name.c_str(),
           static_cast<long long>(offset + int64_t(i)), current_thread(), writes ? "writes" : "reads", who.c_str());
    }
    if (writes) {
      writer = me;
    } else {
      reader = (reader == 0 || reader == me) ? me : kManyThreads;
    }
    mark = (uint64_t(core.phase) << 32) | (uint64_t(writer) << 16) | reader;
  }
}

void check_phase(Memory& m, int64_t offset, size_t bytes, const char* what, bool writes, bool atomic, Doubt* doubt) {
  if (running().in_simd) check_simd(m, offset, bytes, what, writes, doubt);
  if (running().in_simt) check_threads(m, offset, bytes, writes, atomic);
}

void note_global_read(Memory& m, int64_t at, Epoch mine, const Clock& clock) {
  Epoch& seen = m.readers[0][at];
  if (seen == mine) return;
  if (seen == 0 || (seen != kShared && ordered(seen, clock))) {
    seen = mine;
    return;
  }
  Clock& page = m.shared[size_t(at) / kPage];
  if (page.empty()) page.assign(clock.size(), 0);
  auto note = [&](Epoch e) { page[epoch_actor(e)] = std::max(page[epoch_actor(e)], epoch_number(e)); };
  if (seen != kShared) note(seen);
  note(mine);
  seen = kShared;
}

void check_readers(Memory& m, int64_t at, const char* what, Epoch mine, const Clock& clock) {
  for (Epoch* slot : m.readers) {
    if (!slot) continue;
    Epoch seen = slot[at];
    if (seen == kShared) {
      const Clock& page = m.shared[size_t(at) / kPage];
      for (uint32_t a = 0; a < page.size(); ++a) {
        if (page[a] > clock[a] && a != epoch_actor(mine)) race(m, at, what, true, make_epoch(a, page[a]), false);
      }
    } else if (seen && seen != mine && !ordered(seen, clock)) {
      race(m, at, what, true, seen, false);
    }
    slot[at] = 0;
  }
}

}  // namespace

namespace {

void check_read_or_doubt(Memory& m, int64_t offset, size_t bytes, const char* what, Doubt* doubt) {
  check_bounds(m, offset, bytes, what, false, doubt != nullptr);
  if (!machine->options->checked) return;
  Core& core = running();
  const Actor& actor = core.pipes[core.now];
  Epoch mine = make_epoch(actor_of(core, core.now), actor.issued), last = 0;
  for (size_t i = 0; i < bytes; ++i) {
    Epoch w = m.writer[offset + int64_t(i)];
    if (w == last) continue;
    if (w == 0 || (w & ~kAtomicBit) == mine || ordered(w, actor.clock)) {
      last = w;
      continue;
    }
    if (!doubt) race(m, offset + int64_t(i), what, false, w, true);
    doubt_at(*doubt, i, bytes, [&] { return race_text(m, offset + int64_t(i), what, false, w, true); });
  }
  if (m.global) {
    for (size_t i = 0; i < bytes; ++i) note_global_read(m, offset + int64_t(i), mine, actor.clock);
  } else {
    Epoch* slot = m.readers[reader_slot(m, core.now)] + offset;
    std::fill(slot, slot + bytes, mine);
  }
  check_phase(m, offset, bytes, what, false, false, doubt);
}

}  // namespace

void check_read(Memory& m, int64_t offset, size_t bytes, const char* what) {
  check_read_or_doubt(m, offset, bytes, what, nullptr);
}

void check_write(Memory& m, int64_t offset, size_t bytes, const char* what, bool atomic) {
  check_bounds(m, offset, bytes, what, true, false);
  if (!machine->options->checked) return;
  Core& core = running();
  const Actor& actor = core.pipes[core.now];
  Epoch mine = make_epoch(actor_of(core, core.now), actor.issued), last = 0;
  for (size_t i = 0; i < bytes; ++i) {
    int64_t at = offset + int64_t(i);
    check_readers(m, at, what, mine, actor.clock);
    Epoch w = m.writer[at];
    if (w != last) {
      last = w;
      bool both_atomic = atomic && (w & kAtomicBit);
      if (w && !both_atomic && (w & ~kAtomicBit) != mine && !ordered(w, actor.clock)) race(m, at, what, true, w, true);
    }
    m.writer[at] = atomic ? mine | kAtomicBit : mine;
  }
  check_phase(m, offset, bytes, what, true, atomic, nullptr);
}

namespace {

/// The memory and offset of an address of global memory or UB.
Memory& resolve(Space space, const void* where, int64_t& offset, const char* what) {
  if (space == Space::kUb) {
    Core& core = running();
    offset = static_cast<const uint8_t*>(where) - core.ub;
    return memory_of(Space::kUb);
  }
  if (space != Space::kGm) {
    offset = int64_t(reinterpret_cast<uintptr_t>(where));
    return memory_of(space);
  }
  bool near = false;
  Memory* m = memory_at(where, offset, near);
  if (!m || !m->global) fail("bounds", "%s: the address of global memory belongs to no tensor", what);
  return *m;
}

const char* current_what() {
  const Actor& actor = running().pipes[running().now];
  return actor.sites.empty() ? "scalar code" : actor.sites.back().what;
}

}  // namespace

void load(Space space, const void* where, size_t bytes, uint8_t* out, uint8_t* defined) {
  int64_t offset = 0;
  Core& core = running();
  Memory& m = resolve(space, where, offset, current_what());
  bool of_register = core.now == PIPE_V && space == Space::kUb;
  Doubt doubt;
  check_read_or_doubt(m, offset, bytes, current_what(), of_register ? &doubt : nullptr);
  if (m.global) machine->options->copied_bytes[0] += bytes;
  copy_in(m, offset, bytes, out, defined);
  if (!doubt.bytes.empty()) {
    core.doubtful = true;
    machine->doubt = doubt.text;
    for (size_t i = 0; i < bytes; ++i) {
      if (!doubt.bytes[i]) continue;
      out[i] = 0xff;
      if (defined) defined[i] = kDoubtful;
    }
  }
  if (of_register && defined && std::memchr(defined, kDoubtful, bytes)) core.doubtful = true;
}

void store(Space space, const void* where, size_t bytes, const uint8_t* in, const uint8_t* defined) {
  int64_t offset = 0;
  Core& core = running();
  Memory& m = resolve(space, where, offset, current_what());
  check_write(m, offset, bytes, current_what());
  if (m.global) {
    machine->options->copied_bytes[1] += bytes;
    need_no_doubt(defined, bytes);
  }
  copy_out(m, offset, bytes, in, defined);
  // What a vector function leaves undefined after it loaded doubtful bytes may come from them.
  if (core.now == PIPE_V && core.doubtful && defined && machine->options->checked) {
    for (size_t i = 0; i < bytes; ++i) {
      if (defined[i] != 0xff) m.defined[offset + int64_t(i)] = kDoubtful;
    }
  }
}

void need_no_doubt(const uint8_t* defined, size_t bytes) {
  if (defined && std::memchr(defined, kDoubtful, bytes)) {
    fail("race", "a result depends on this: %s", machine->doubt.c_str());
  }
}

void store_ub_of(int sub, size_t offset, size_t bytes, const uint8_t* in, const uint8_t* defined) {
  if (sub != 0 && sub != 1) fail("value", "%s: got sub-block %d, allowed are 0 and 1", current_what(), sub);
  Memory& m = *running().memories->ub[sub];
  check_write(m, int64_t(offset), bytes, current_what());
  copy_out(m, int64_t(offset), bytes, in, defined);
}

void need_aligned(Space space, const void* where, size_t alignment, const char* what) {
  int64_t offset = 0;
  resolve(space, where, offset, what);
  if (offset % int64_t(alignment) != 0) {
    fail("alignment", "%s: got address %lld, allowed are multiples of %zu", what, static_cast<long long>(offset),
         alignment);
  }
}

}  // namespace asc_host
