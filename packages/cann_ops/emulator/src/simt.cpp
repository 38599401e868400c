// SIMT threads. A fiber runs thread after thread until one waits; that one keeps the fiber and a new one goes on, so
// that functions without barriers cost no switches.
#include "asc_host/simt.hpp"

#include "state.hpp"

namespace asc_host {

namespace {

constexpr size_t kThreadStack = 128u << 10;
constexpr int kMostThreads = 2048;

struct Region {
  const std::function<void()>* body = nullptr;
  cce::dim3 shape{1};
  std::vector<Thread> threads;
  int started = 0, current = -1;
  ucontext_t back{};
  std::vector<std::unique_ptr<Stack>> stacks;
  uint64_t values[kMostThreads / 32][32];
  uint32_t masks[kMostThreads / 32];
};

Region* region = nullptr;
std::vector<std::unique_ptr<Stack>> spare_stacks;

void show(int thread) {
  region->current = thread;
  auto x = uint32_t(region->shape.x), y = uint32_t(region->shape.y);
  auto t = uint32_t(thread);
  threadIdx = {t % x, t / x % y, t / (x * y)};
}

void fiber_main() {
  while (region->started < int(region->threads.size())) {
    int mine = region->started++;
    show(mine);
    (*region->body)();
    // The thread may have waited and other fibers gone on: `current` is this thread again.
    region->threads[size_t(region->current)].state = Thread::State::kDone;
  }
  setcontext(&region->back);
}

void new_fiber(ucontext_t& context) {
  if (spare_stacks.empty()) spare_stacks.push_back(std::make_unique<Stack>(kThreadStack));
  region->stacks.push_back(std::move(spare_stacks.back()));
  spare_stacks.pop_back();
  region->stacks.back()->use(context, fiber_main);
}

void stop(Thread::State state) {
  int me = region->current;
  region->threads[size_t(me)].state = state;
  swapcontext(&region->threads[size_t(me)].context, &region->back);
  show(me);
}

/// Threads that wait in their warp go on, with the values that all of them gave.
bool release_warps() {
  bool any = false;
  int n = int(region->threads.size());
  for (int first = 0; first < n; first += 32) {
    uint32_t mask = 0;
    for (int i = first; i < first + 32 && i < n; ++i) {
      Thread& t = region->threads[size_t(i)];
      if (t.state != Thread::State::kWarp) continue;
      mask |= 1u << (i - first);
      region->values[first / 32][i - first] = t.value;
      t.state = Thread::State::kReady;
    }
    if (mask) region->masks[first / 32] = mask;
    any |= mask != 0;
  }
  return any;
}

void release_barrier(const char* name) {
  int waiting = 0, done = 0;
  for (const Thread& t : region->threads) {
    waiting += t.state == Thread::State::kBlock;
    done += t.state == Thread::State::kDone;
  }
  if (done) {
    fail("flag", "%s: %d threads wait in asc_syncthreads and %d have ended without it", name, waiting, done);
  }
  for (Thread& t : region->threads) t.state = Thread::State::kReady;
  running().phase = machine->next_phase++;
}

bool run_ready() {
  bool any = false;
  for (size_t i = 0; i < region->threads.size(); ++i) {
    if (int(i) >= region->started || region->threads[i].state != Thread::State::kReady) continue;
    any = true;
    swapcontext(&region->back, &region->threads[i].context);
  }
  return any;
}

}  // namespace

void run_threads(cce::dim3 shape, const std::function<void()>& body, const char* name, int line) {
  Core& core = running();
  long long n = 1ll * shape.x * shape.y * shape.z;
  if (shape.x < 1 || shape.y < 1 || shape.z < 1 || n > kMostThreads) {
    fail("value", "%s: got (%d, %d, %d) threads, allowed are 1 to %d", name, shape.x, shape.y, shape.z, kMostThreads);
  }
  begin(PIPE_V, name, line);
  core.in_simt = true;
  core.phase = machine->next_phase++;
  auto mine = std::make_unique<Region>();
  region = mine.get();
  region->body = &body;
  region->shape = shape;
  region->threads.resize(size_t(n));
  blockDim = {uint32_t(shape.x), uint32_t(shape.y), uint32_t(shape.z)};
  for (;;) {
    while (region->started < n) {
      ucontext_t fiber;
      new_fiber(fiber);
      swapcontext(&region->back, &fiber);
    }
    if (run_ready() || release_warps()) continue;
    bool ended = true;
    for (const Thread& t : region->threads) ended &= t.state == Thread::State::kDone;
    if (ended) break;
    release_barrier(name);
  }
  for (auto& stack : region->stacks) spare_stacks.push_back(std::move(stack));
  region = nullptr;
  core.in_simt = false;
  core.now = PIPE_S;
}

void block_barrier() {
  if (!region) fail("value", "asc_syncthreads outside of a SIMT function");
  if (region->threads.size() == 1) return;
  stop(Thread::State::kBlock);
}

void warp_barrier() {
  warp_exchange(0);
  running().phase = machine->next_phase++;
}

void warp_exchange(uint64_t mine) {
  if (!region) fail("value", "a warp operation outside of a SIMT function");
  region->threads[size_t(region->current)].value = mine;
  stop(Thread::State::kWarp);
}

uint64_t warp_value(int l) { return region->values[region->current / 32][l]; }
uint32_t warp_mask() { return region->masks[region->current / 32]; }
int lane() { return region ? region->current % 32 : 0; }
int current_thread() { return region ? region->current : -1; }
void release_stacks() {
  region = nullptr;
  spare_stacks.clear();
}

void atomic_access(void* p, size_t bytes) {
  int64_t offset = 0;
  bool near = false;
  Memory* m = memory_at(p, offset, near);
  if (!m) fail("bounds", "an atomic of %zu bytes is outside of all tensors and of UB", bytes);
  check_write(*m, offset, bytes, "an atomic", true);
  if (!machine->options->checked) return;
  for (size_t i = 0; i < bytes; ++i) {
    if (m->defined[offset + int64_t(i)] != 0xff) {
      need_no_doubt(m->defined + offset + int64_t(i), 1);
      fail("undefined", "an atomic updates %s byte %lld, which nothing has written", m->name.c_str(),
           static_cast<long long>(offset));
    }
  }
}

}  // namespace asc_host
