// The ring kernel's own code on the host, its asynchronous copies as early or as late as the hardware may make them.
//
// Late: a load's bytes are there only when its barrier is waited for, and its stage holds rubbish until then; a store
// reads its stage only when a wait for reading forces it to, and its bytes reach memory only at the very end.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#define __device__
#define __forceinline__ inline

namespace emulated {

struct Load {
  uint32_t to;
  const void* from;
  uint32_t bytes;
};
struct Barrier {
  uint32_t phase = 0;
  int64_t expected = 0, announced = 0;
  std::vector<Load> loads;
};
struct Store {
  uint8_t* to;
  uint32_t from, bytes;
  std::vector<uint8_t> data;
  bool read = false;
};

inline bool late = false;
inline uint8_t* shared = nullptr;
inline uint32_t shared_bytes = 0;
inline std::map<uint32_t, Barrier> barriers;
inline std::vector<std::vector<Store>> groups;  // the last one is open
inline int under_way = 0, most_under_way = 0;
inline const char* error = nullptr;

inline void expect(bool holds, const char* what) {
  if (!holds && !error) error = what;
}
inline bool inside(uint32_t at, uint32_t bytes) { return bytes <= shared_bytes && at <= shared_bytes - bytes; }

inline void land(const Load& load) { std::memcpy(shared + load.to, load.from, load.bytes); }
inline void read(Store& store) {
  if (store.read) return;
  store.data.assign(shared + store.from, shared + store.from + store.bytes);
  store.read = true;
}
inline void write(std::vector<Store>& group) {
  for (Store& store : group) {
    read(store);
    std::memcpy(store.to, store.data.data(), store.bytes);
  }
}

inline void start(bool copies_late, std::vector<uint8_t>& memory, uint8_t* aligned, uint32_t bytes) {
  late = copies_late, shared = aligned, shared_bytes = bytes;
  std::fill(memory.begin(), memory.end(), 0xCC);
  barriers.clear(), groups.assign(1, {});
  under_way = most_under_way = 0, error = nullptr;
}

}  // namespace emulated

namespace kernel_core::ptx {

using namespace emulated;

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - emulated::shared);
}
inline void fence_barrier_init() {}
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  expect(arrivals == 1, "a barrier that more than one thread arrives at");
  barriers[barrier] = {};
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  Barrier& b = barriers.at(barrier);
  expect(b.announced == 0, "a stage is filled while its barrier's phase is open");
  b.announced = bytes;
}
inline void cp_async_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  expect(to % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0 && bytes % 16 == 0 && bytes > 0,
         "a bulk load's alignment");
  expect(inside(to, bytes), "a bulk load outside of shared memory");
  if (emulated::error) return;
  Barrier& b = barriers.at(barrier);
  b.loads.push_back({to, from, bytes});
  most_under_way = std::max(most_under_way, ++under_way);
  if (late)
    std::memset(emulated::shared + to, 0xCC, bytes);
  else
    land(b.loads.back());
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  Barrier& b = barriers.at(barrier);
  if (b.phase != parity) return;  // that phase is over
  int64_t bytes = 0;
  for (const Load& load : b.loads) bytes += load.bytes;
  expect(b.announced > 0 && bytes == b.announced, "a wait that never ends");
  if (late)
    for (const Load& load : b.loads) land(load);
  under_way -= static_cast<int>(b.loads.size());
  b.loads.clear(), b.announced = 0, b.phase ^= 1;
}

}  // namespace kernel_core::ptx

namespace gdr_swapin::cuda {

using namespace emulated;

inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  expect(from % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0 && bytes % 16 == 0 && bytes > 0,
         "a bulk store's alignment");
  expect(inside(from, bytes), "a bulk store outside of shared memory");
  if (emulated::error) return;
  groups.back().push_back({static_cast<uint8_t*>(to), from, bytes, {}, false});
  if (!late) read(groups.back().back());
}
inline void bulk_commit() { groups.emplace_back(); }
template <int Pending>
void bulk_wait_read() {
  for (size_t g = 0; g + Pending + 1 < groups.size(); ++g)
    for (Store& store : groups[g]) read(store);
}
template <int Pending>
void bulk_wait_written_but() {
  for (size_t g = 0; g + Pending + 1 < groups.size(); ++g) write(groups[g]), groups[g].clear();
}
inline void bulk_load_once(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  kernel_core::ptx::cp_async_bulk(to, from, bytes, barrier);
}
inline void (*told)() = nullptr;  // called at each step of a counter
inline void count_up(uint32_t* counter) {
  ++*counter;
  if (told) told();
}
inline void bulk_wait_written() {
  expect(groups.back().empty(), "stores that were not committed");
  for (auto& group : groups) write(group);
  groups.assign(1, {});
}

}  // namespace gdr_swapin::cuda

#include "cuda/sm90/move_bulk.cuh"

using namespace gdr_swapin::cuda;

// `layers`: five 64-bit numbers a layer, as the bindings take them. Null, or what went wrong.
extern "C" const char* move_ring_host(int late, const uint8_t* source, int64_t stride, const int32_t* slots,
                                      const int32_t* blocks, int64_t count, uint32_t piece, const uint64_t* layers,
                                      int layer_count, uint32_t group_ends, uint32_t* done, void (*told)(), int once,
                                      int ctas, int stages, int* most_under_way) {
  MoveParams p = {source, stride, slots, blocks, count, piece, layer_count, {}};
  for (int l = 0; l < layer_count; ++l, layers += 5)
    p.layer[l] = {static_cast<int64_t>(layers[0]), static_cast<uint32_t>(layers[1]), static_cast<uint32_t>(layers[2]),
                  reinterpret_cast<uint8_t*>(layers[3]), reinterpret_cast<uint8_t*>(layers[4])};
  p.group_ends = group_ends, p.done = done, p.stream_once = once != 0;
  p = with_parts(p);
  gdr_swapin::cuda::told = told;
  const uint32_t bytes = kHeadBytes + piece * static_cast<uint32_t>(stages);
  std::vector<uint8_t> memory(bytes + kRingAlignment);
  uint8_t* aligned = memory.data() + (kRingAlignment - reinterpret_cast<uintptr_t>(memory.data()) % kRingAlignment);
  *most_under_way = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    emulated::start(late != 0, memory, aligned, bytes);
    move_ring(p, stages, cta, ctas, aligned);
    emulated::expect(emulated::under_way == 0, "loads that nobody waited for");
    *most_under_way = std::max(*most_under_way, emulated::most_under_way);
    if (emulated::error) return emulated::error;
  }
  return nullptr;
}

extern "C" int64_t piece_count_host(int64_t count, uint32_t piece, uint32_t index_bytes, uint32_t main_bytes) {
  MoveParams p = {nullptr, 0, nullptr, nullptr, count, piece, 1, {}};
  p.layer[0] = {0, index_bytes, main_bytes, nullptr, nullptr};
  return item_count(with_parts(p));
}
