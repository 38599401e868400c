// Stacks of fibers with a guard page below, and what happens when generated code leaves all memory: an error, not the
// end of the process.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.hpp"

namespace asc_host {

Stack::Stack(size_t bytes) : bytes_(bytes), guard_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  void* p = mmap(nullptr, bytes_ + guard_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("host", "no memory for a stack of %zu bytes", bytes);
  base_ = static_cast<uint8_t*>(p);
  mprotect(base_, guard_, PROT_NONE);
}

Stack::~Stack() { munmap(base_, bytes_ + guard_); }

void Stack::use(ucontext_t& context, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = base_ + guard_;
  context.uc_stack.ss_size = bytes_;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

namespace {

constexpr size_t kSignalStack = 64u << 10;

void on_fault(int, siginfo_t* info, void*) {
  fail("bounds", "generated code uses address %p, which is no memory of the device, or too much stack", info->si_addr);
}

}  // namespace

FaultGuard::FaultGuard() : stack_(new uint8_t[kSignalStack]) {
  stack_t mine{};
  mine.ss_sp = stack_.get();
  mine.ss_size = kSignalStack;
  sigaltstack(&mine, &before_stack_);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before_segv_);
  sigaction(SIGBUS, &action, &before_bus_);
}

FaultGuard::~FaultGuard() {
  sigaction(SIGSEGV, &before_segv_, nullptr);
  sigaction(SIGBUS, &before_bus_, nullptr);
  sigaltstack(&before_stack_, nullptr);
}

}  // namespace asc_host
