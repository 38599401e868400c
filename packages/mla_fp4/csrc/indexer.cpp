// Rows are cut into groups of one request that share decoded keys, and groups into rounds whose scores fit a buffer
// of fixed size. Neither cut changes a score. A round packs its queries, scores (group, key chunk) pieces, and then
// selects row by row.
#include "indexer.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/select.hpp"
#include "geometry.hpp"
#include "kernel_core/parallel.hpp"

namespace mla_fp4 {
namespace {

using kernel_core::parallel_for;

constexpr int64_t kScoreBudget = 8 << 20;  // floats of a round's scores, 32 MiB
constexpr int64_t kGroupColumns = 1024;    // (row, head) pairs that share decoded keys
constexpr int64_t kChunk = 1024;           // keys of one piece of work

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
  int64_t row, rows;         // of the batch
  int64_t keys;              // to score
  const int32_t* table;      // of the request
  const int32_t* positions;  // of the keys, or null for 0, 1, ...
  int64_t scores, stride;    // where in the score buffer
  int64_t packed, weights;   // where in the query buffers
};

// Grow-only memory of the calling thread, uninitialised
template <typename T, int slot>
T* scratch(int64_t count) {
  static thread_local std::unique_ptr<T[]> data;
  static thread_local int64_t size = 0;
  if (count > size) {
    data.reset(new T[static_cast<size_t>(count)]);
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

// Scores of a round's groups into `buffer`
void score_round(const IndexArgs& a, const Kernel& kernel, const Group* groups, int64_t count, float* buffer) {
  struct Piece {
    const Group* group;
    int64_t first, count;
  };
  std::vector<Piece> pieces;
  int64_t work = 0;
  for (int64_t g = 0; g < count; ++g)
    for (int64_t first = 0; first < groups[g].keys; first += kChunk) {
      pieces.push_back({&groups[g], first, std::min(kChunk, groups[g].keys - first)});
      work += pieces.back().count * groups[g].rows;
    }
  if (pieces.empty()) return;
  const Group& last = groups[count - 1];
  const PackedSize end = kernel.packed_size(last.rows, a.heads, a.keys.dim);
  uint8_t* packed = scratch<uint8_t, 0>(last.packed + end.bytes + 64);
  packed += (64 - reinterpret_cast<uintptr_t>(packed) % 64) % 64;
  float* weights = scratch<float, 1>(last.weights + end.weights);
  parallel_for(count, groups[0].rows * a.heads * a.keys.dim * 4, [&](int64_t i) {
    const Group& g = groups[i];
    if (g.keys)
      kernel.pack({a.q + g.row * a.heads * a.keys.dim, a.weights + g.row * a.heads, g.rows, a.heads, a.keys.dim,
                   a.keys.packed, packed + g.packed, weights + g.weights});
  });
  const auto pieces_count = static_cast<int64_t>(pieces.size());
  parallel_for(pieces_count, work / pieces_count * a.heads * a.keys.dim / 8, [&](int64_t i) {
    const auto& [g, first, keys] = pieces[static_cast<size_t>(i)];
    kernel.score({packed + g->packed, weights + g->weights, g->rows, a.heads, a.keys, g->table,
                  g->positions ? g->positions + first : nullptr, first, keys, buffer + g->scores + first, g->stride});
  });
}

// Groups of at most `most` rows of one request; a group's widest row sets its key count.
std::vector<Group> group_rows(const IndexArgs& a, int64_t most) {
  std::vector<Group> groups;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t row = a.cu_seqlens[b]; row < a.cu_seqlens[b + 1];) {
      Group g{row, 0, 0, a.table + b * a.table_width, nullptr, 0, 0, 0, 0};
      while (row < a.cu_seqlens[b + 1] && g.rows < most) {
        const int64_t keys = std::max<int64_t>(g.keys, a.visible[row]);
        if (g.rows && (g.rows + 1) * keys > kScoreBudget) break;
        g.keys = keys;
        ++g.rows;
        ++row;
      }
      groups.push_back(g);
    }
  }
  return groups;
}

// Calls run(first group, count, floats of scores) for rounds whose scores and candidate positions fit the budget.
template <typename F>
void in_rounds(std::vector<Group>& groups, const Kernel& kernel, const IndexArgs& a, F&& run) {
  size_t first = 0;
  int64_t scores = 0, packed = 0, weights = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    Group& g = groups[i];
    if (i > first && scores + g.rows * g.keys > kScoreBudget) {
      run(&groups[first], static_cast<int64_t>(i - first), scores);
      first = i;
      scores = packed = weights = 0;
    }
    g.scores = scores;
    g.stride = g.keys;
    g.packed = packed;
    g.weights = weights;
    const PackedSize size = kernel.packed_size(g.rows, a.heads, a.keys.dim);
    scores += g.rows * g.keys;
    packed += (size.bytes + 63) / 64 * 64;
    weights += size.weights;
  }
  if (first < groups.size()) run(&groups[first], static_cast<int64_t>(groups.size() - first), scores);
}

int64_t rows_together(const IndexArgs& a) { return std::max<int64_t>(1, kGroupColumns / a.heads); }

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
  const Kernel kernel = pick_kernel(a);
  std::vector<Group> groups = group_rows(a, c.given() ? 1 : rows_together(a));
  if (c.given())
    for (Group& g : groups) g.keys = expand(c, g.row, a.visible[g.row], [](int32_t) {});
  const auto select = KERNEL_CORE_PICK(select_top);
  in_rounds(groups, kernel, a, [&](Group* round, int64_t count, int64_t floats) {
    float* buffer = scratch<float, 2>(floats);
    if (c.given()) {
      int32_t* next = scratch<int32_t, 3>(floats);
      for (int64_t i = 0; i < count; ++i) {
        round[i].positions = next;
        expand(c, round[i].row, a.visible[round[i].row], [&](int32_t position) { *next++ = position; });
      }
    }
    score_round(a, kernel, round, count, buffer);
    const int64_t first = round[0].row, last = round[count - 1].row + round[count - 1].rows;
    std::vector<const Group*> owner(static_cast<size_t>(last - first));
    for (int64_t i = 0; i < count; ++i)
      for (int64_t r = 0; r < round[i].rows; ++r) owner[static_cast<size_t>(round[i].row + r - first)] = &round[i];
    parallel_for(last - first, floats / (last - first) + k * 16, [&](int64_t i) {
      const Group& g = *owner[static_cast<size_t>(i)];
      const int64_t row = first + i, n = g.positions ? g.keys : a.visible[row];
      const float* scores = buffer + g.scores + (row - g.row) * g.stride;
      int32_t* chosen = out + row * k;
      const int64_t written = select(scores, n, k, chosen);
      if (g.positions)
        for (int64_t j = 0; j < written; ++j) chosen[j] = g.positions[chosen[j]];
      fill(chosen, written, k);
      if (publish) publish_row(scores, n, c.block, publish, published + row * publish);
    });
  });
}

void index_scores(const IndexArgs& a, float* out, int64_t width) {
  check(a);
  const Kernel kernel = pick_kernel(a);
  std::vector<Group> groups = group_rows(a, rows_together(a));
  in_rounds(groups, kernel, a, [&](const Group* round, int64_t count, int64_t floats) {
    float* buffer = scratch<float, 2>(floats);
    score_round(a, kernel, round, count, buffer);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t r = 0; r < round[i].rows; ++r) {
        const int64_t row = round[i].row + r;
        const float* scores = buffer + round[i].scores + r * round[i].stride;
        std::copy_n(scores, a.visible[row], out + row * width);
        std::fill(out + row * width + a.visible[row], out + (row + 1) * width, -std::numeric_limits<float>::infinity());
      }
    }
  });
}

}  // namespace mla_fp4
