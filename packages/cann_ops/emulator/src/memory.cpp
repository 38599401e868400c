// Memories with shadows, and finding the memory of an address.
#include "state.hpp"

#include <sys/mman.h>

#include <cstring>

namespace asc_host {

namespace {

/// Address space that costs nothing until it is touched.
uint8_t* zero_pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("host", "no memory for %zu bytes of shadow", bytes);
  return static_cast<uint8_t*>(p);
}

}  // namespace

Memory::Memory(std::string name_, size_t bytes_, uint8_t* data_, bool global_)
    : name(std::move(name_)), bytes(bytes_), data(data_), global(global_) {
  size_t padded = (bytes + 63) / 64 * 64;
  int reader_slots = global ? 1 : 3;
  bool owns_data = data == nullptr;
  reserved_bytes_ = padded * (1 + (owns_data ? 1 : 0) + 8 * (2 + reader_slots)) + 64;
  reserved_ = zero_pages(reserved_bytes_);
  uint8_t* p = reserved_;
  auto words = [&] {
    auto* w = reinterpret_cast<uint64_t*>(p);
    p += 8 * padded;
    return w;
  };
  writer = words();
  for (int i = 0; i < 3; ++i) readers[i] = i < reader_slots ? words() : nullptr;
  threads = words();
  defined = p;
  p += padded;
  if (owns_data) {
    data = p;
    std::memset(data, 0xff, bytes);
  }
}

Memory::~Memory() { munmap(reserved_, reserved_bytes_); }

void Memory::reset() {
  madvise(reserved_, reserved_bytes_, MADV_DONTNEED);
  std::memset(data, 0xff, bytes);
  shared.clear();
}

Memory* memory_at(const void* p, int64_t& offset, bool& near) {
  near = false;
  auto a = reinterpret_cast<uintptr_t>(p);
  uintptr_t gm = a - reinterpret_cast<uintptr_t>(machine->gm_base);
  if (gm < machine->gm_bytes) {
    near = true;
    offset = int64_t(gm % kTensorSlot) - int64_t(kTensorStart);
    return machine->tensors[gm / kTensorSlot].get();
  }
  uintptr_t ub = a - reinterpret_cast<uintptr_t>(machine->ub_base);
  near = ub + kUbGuard < machine->ub_bytes + 2 * kUbGuard;
  if (ub < machine->ub_bytes) {
    offset = int64_t(ub % kUbSlot) - int64_t(kUbStart);
    Core& core = machine->cores[ub / kUbSlot];
    return core.kind == CoreKind::kVector && core.memories ? core.memories->ub[core.sub].get() : nullptr;
  }
  return nullptr;
}

void count_step() {
  if (++machine->steps > machine->options->most_steps) {
    fail("deadlock",
         "the kernel took more than %llu instructions and accesses: it does not end, or most_steps is small",
         static_cast<unsigned long long>(machine->options->most_steps));
  }
}

Memory& memory_of(Space space) {
  Core& core = running();
  switch (space) {
    case Space::kUb:
      if (core.kind != CoreKind::kVector) fail("bounds", "a cube core has no unified buffer");
      return *core.memories->ub[core.sub];
    case Space::kL1:
      return *core.memories->l1;
    case Space::kL0a:
      return *core.memories->l0a;
    case Space::kL0b:
      return *core.memories->l0b;
    case Space::kL0c:
      return *core.memories->l0c;
    case Space::kScaleA:
      return *core.memories->scale_a;
    default:
      return *core.memories->scale_b;
  }
}

void copy_in(Memory& m, int64_t offset, size_t bytes, uint8_t* out, uint8_t* defined) {
  const uint8_t* from = m.data + offset;
  if (!machine->options->checked) {
    std::memcpy(out, from, bytes);
    if (defined) std::memset(defined, 0xff, bytes);
    return;
  }
  const uint8_t* shadow = m.defined + offset;
  for (size_t i = 0; i < bytes; ++i) out[i] = shadow[i] == 0xff ? from[i] : 0xff;
  if (defined) std::memcpy(defined, shadow, bytes);
}

void copy_out(Memory& m, int64_t offset, size_t bytes, const uint8_t* in, const uint8_t* defined) {
  std::memcpy(m.data + offset, in, bytes);
  if (!machine->options->checked) return;
  if (defined) {
    std::memcpy(m.defined + offset, defined, bytes);
  } else {
    std::memset(m.defined + offset, 0xff, bytes);
  }
}

}  // namespace asc_host
