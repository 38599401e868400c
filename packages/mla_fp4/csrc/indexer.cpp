// Rows are cut into groups of one request that share decoded keys and whose scores stay in a cache. With a group for
// every thread, groups run side by side; with fewer, a group's keys and rows are spread. Neither changes a score.
#include "indexer.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "cpu/select.hpp"
#include "geometry.hpp"
#include "kernel_core/parallel.hpp"

namespace mla_fp4 {
namespace {

using kernel_core::parallel_for;

constexpr int64_t kGroupScores = 256 << 10;  // floats of a group's scores, 1 MiB, unless it has the fewest rows
constexpr int64_t kFewestRows = 8;           // that make up for decoding the keys
constexpr int64_t kGroupColumns = 1024;      // (row, head) pairs of a group at most
constexpr int64_t kChunk = 1024;             // keys of one piece of work

struct Kernel {
  decltype(&scalar::packed_size) packed_size;
  decltype(&scalar::pack_queries) pack;
  decltype(&scalar::score_keys) score;
};

Kernel pick_kernel(const IndexArgs& a) {
#ifdef KERNEL_CORE_HAS_AMX
  if (kernel_core::active_isa() >= kernel_core::Isa::amx && a.keys.packed && a.heads <= amx::kMaxHeads)
    return {&amx::packed_size, &amx::pack_queries, &amx::score_keys};
#endif
  return {KERNEL_CORE_PICK(packed_size), KERNEL_CORE_PICK(pack_queries), KERNEL_CORE_PICK(score_keys)};
}

struct Group {
  int64_t row, rows;     // of the batch
  int64_t keys;          // to score: what the widest row sees, or its candidates
  const int32_t* table;  // of the request

  // A row of scores starts at a cache line, and rows lie an odd number of lines apart: that spreads them over the sets.
  int64_t stride() const { return ((keys + 15) / 16 | 1) * 16; }
};

// A group's scores, and the positions that they belong to (null: 0, 1, ...)
struct Scored {
  const float* scores;
  const int32_t* positions;
};

// Grow-only memory of the calling thread, uninitialised, from a cache line on
template <typename T, int slot>
T* aligned_scratch(int64_t count) {
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<T, Free> data;
  static thread_local int64_t size = 0;
  if (count > size) {
    data.reset();
    size = 0;
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    data.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (!data) throw std::bad_alloc();
    size = count;
  }
  return data.get();
}

void check(const IndexArgs& a) {
  check_cu_seqlens(a.cu_seqlens, a.batch, a.rows);
  const int64_t capacity = a.table_width * a.keys.rows_per_block;
  for (int64_t b = 0; b < a.batch; ++b) {
    int64_t longest = 0;
    for (int64_t row = a.cu_seqlens[b]; row < a.cu_seqlens[b + 1]; ++row) {
      check_range("visible", row, a.visible[row], 0, capacity);
      longest = std::max<int64_t>(longest, a.visible[row]);
    }
    const int64_t used = (longest + a.keys.rows_per_block - 1) / a.keys.rows_per_block;
    for (int64_t i = 0; i < used; ++i)
      if (const int32_t block = a.table[b * a.table_width + i]; block < 0 || block >= a.blocks)
        fail("block_table[" + std::to_string(b) + ", " + std::to_string(i) + "]", block,
             "0 to " + std::to_string(a.blocks - 1));
  }
}

void check(const CandidateArgs& c, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    int32_t before = -1;
    for (int64_t i = 0; i < c.width; ++i) {
      const int32_t block = c.blocks[row * c.width + i];
      if (block < 0) break;
      if (block <= before)
        fail("candidates[" + std::to_string(row) + ", " + std::to_string(i) + "]", block, "ascending block ids");
      before = block;
    }
  }
}

// Calls f(position) for the visible positions inside a row's candidate blocks, ascending; returns their number.
template <typename F>
int64_t expand(const CandidateArgs& c, int64_t row, int64_t visible, F&& f) {
  int64_t count = 0;
  for (int64_t i = 0; i < c.width; ++i) {
    const int64_t block = c.blocks[row * c.width + i];
    if (block < 0 || block * c.block >= visible) break;
    const int64_t begin = block * c.block, end = std::min(begin + c.block, visible);
    for (int64_t p = begin; p < end; ++p) f(static_cast<int32_t>(p));
    count += end - begin;
  }
  return count;
}

std::vector<Group> group_rows(const IndexArgs& a, bool together) {
  const int64_t most = together ? std::max<int64_t>(1, kGroupColumns / a.heads) : 1;
  std::vector<Group> groups;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t row = a.cu_seqlens[b]; row < a.cu_seqlens[b + 1];) {
      Group g{row, 0, 0, a.table + b * a.table_width};
      while (row < a.cu_seqlens[b + 1] && g.rows < most) {
        const int64_t keys = std::max<int64_t>(g.keys, a.visible[row]);
        if (g.rows >= kFewestRows && (g.rows + 1) * keys > kGroupScores) break;
        g.keys = keys;
        ++g.rows;
        ++row;
      }
      groups.push_back(g);
    }
  }
  return groups;
}

// Scores a group into memory of this thread. Spreads over threads unless it runs on one of several already.
Scored score_group(const IndexArgs& a, const Kernel& kernel, const CandidateArgs* candidates, const Group& g) {
  float* scores = aligned_scratch<float, 0>(g.rows * g.stride());
  int32_t* positions = candidates ? aligned_scratch<int32_t, 1>(g.keys) : nullptr;
  if (g.keys == 0) return {scores, positions};
  if (int32_t* next = positions)
    expand(*candidates, g.row, a.visible[g.row], [&](int32_t position) { *next++ = position; });
  const PackedSize size = kernel.packed_size(g.rows, a.heads, a.keys.dim);
  uint8_t* packed = aligned_scratch<uint8_t, 2>(size.bytes);
  float* weights = aligned_scratch<float, 3>(size.weights);
  kernel.pack({a.q + g.row * a.heads * a.keys.dim, a.weights + g.row * a.heads, g.rows, a.heads, a.keys.dim,
               a.keys.packed, packed, weights});
  parallel_for((g.keys + kChunk - 1) / kChunk, kChunk * g.rows * a.heads * a.keys.dim / 8, [&](int64_t i) {
    const int64_t first = i * kChunk;
    kernel.score({packed, weights, g.rows, a.heads, a.keys, g.table, positions ? positions + first : nullptr, first,
                  std::min(kChunk, g.keys - first), scores + first, g.stride()});
  });
  return {scores, positions};
}

// Calls finish(row, its scores, their number, their positions or null) for every row.
template <typename F>
void for_each_row(const IndexArgs& a, const CandidateArgs* candidates, F&& finish) {
  const Kernel kernel = pick_kernel(a);
  std::vector<Group> groups = group_rows(a, !candidates);
  if (candidates)
    for (Group& g : groups) g.keys = expand(*candidates, g.row, a.visible[g.row], [](int32_t) {});
  const auto run = [&](const Group& g) {
    const auto [scores, positions] = score_group(a, kernel, candidates, g);
    parallel_for(g.rows, g.keys, [&, scores = scores, positions = positions](int64_t i) {
      const int64_t row = g.row + i;
      finish(row, scores + i * g.stride(), candidates ? g.keys : a.visible[row], positions);
    });
  };
  const auto count = static_cast<int64_t>(groups.size());
  if (count < omp_get_max_threads()) {
    for (const Group& g : groups) run(g);
  } else {
    int64_t work = 0;
    for (const Group& g : groups) work += g.rows * g.keys;
    parallel_for(count, work / count * a.heads * a.keys.dim / 8,
                 [&](int64_t i) { run(groups[static_cast<size_t>(i)]); });
  }
}

void fill(int32_t* out, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; ++i) out[i] = -1;
}

// The best blocks of a row. The last holds the newest visible position and is always among them.
void publish_row(const float* scores, int64_t visible, int64_t block, int64_t publish, int32_t* out) {
  const int64_t count = (visible + block - 1) / block;
  int64_t written = 0;
  if (count <= publish) {
    for (; written < count; ++written) out[written] = static_cast<int32_t>(written);
  } else {
    static thread_local std::vector<float> best;
    best.resize(static_cast<size_t>(count));
    KERNEL_CORE_PICK(block_maxima)(scores, visible, block, best.data());
    written = KERNEL_CORE_PICK(select_top)(best.data(), count - 1, publish - 1, out);
    out[written++] = static_cast<int32_t>(count - 1);
  }
  fill(out, written, publish);
}

}  // namespace

void index_topk(const IndexArgs& a, const CandidateArgs& c, int64_t k, int32_t* out, int64_t publish,
                int32_t* published) {
  check(a);
  if (c.given()) check(c, a.rows);
  const auto select = KERNEL_CORE_PICK(select_top);
  for_each_row(a, c.given() ? &c : nullptr,
               [&](int64_t row, const float* scores, int64_t count, const int32_t* positions) {
                 int32_t* chosen = out + row * k;
                 const int64_t written = select(scores, count, k, chosen);
                 if (positions)
                   for (int64_t i = 0; i < written; ++i) chosen[i] = positions[chosen[i]];
                 fill(chosen, written, k);
                 if (publish) publish_row(scores, count, c.block, publish, published + row * publish);
               });
}

void index_scores(const IndexArgs& a, float* out, int64_t width) {
  check(a);
  for_each_row(a, nullptr, [&](int64_t row, const float* scores, int64_t count, const int32_t*) {
    std::copy_n(scores, count, out + row * width);
    std::fill(out + row * width + count, out + (row + 1) * width, -std::numeric_limits<float>::infinity());
  });
}

}  // namespace mla_fp4
