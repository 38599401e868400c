// Survival, prefix selection and layout on one thread: some thousand numbers.
#include "schedule.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "survival.hpp"

namespace dspark_kernels {
namespace {

bool present(const Schedule& a, int64_t r) { return a.limits[r] >= 0 && (!a.slots || a.slots[r] >= 0); }
int64_t slot(const Schedule& a, int64_t r) { return a.slots ? a.slots[r] : r; }
int32_t limit(const Schedule& a, int64_t r) { return std::min<int32_t>(a.limits[r], static_cast<int32_t>(a.drafts)); }
bool is_fixed(const Schedule& a, int64_t r) { return a.fixed && a.fixed[r] >= 0; }

void write_survival(const Schedule& a) {
  for (int64_t r = 0; r < a.requests; ++r) {
    float running = 1.0f;
    for (int64_t j = 0; j < a.drafts; ++j) {
      running = present(a, r) ? survive(running, a.confidence[slot(a, r) * a.drafts + j]) : 0.0f;
      a.survival[r * a.drafts + j] = running;
    }
  }
}

// The `budget` first drafts: survival descending, then position, then request. As survival never rises along a
// request and equals go by position, they are a prefix of each request.
void admit(const Schedule& a, int64_t budget) {
  std::vector<uint64_t> keys;
  keys.reserve(a.requests * a.drafts);
  for (int64_t r = 0; r < a.requests; ++r) {
    if (!present(a, r) || is_fixed(a, r)) continue;
    for (int64_t j = 0; j < limit(a, r); ++j) {
      const uint32_t bits = std::bit_cast<uint32_t>(a.survival[r * a.drafts + j]);  // not negative: ordered as it is
      keys.push_back(static_cast<uint64_t>(~bits) << 32 | static_cast<uint32_t>(j * a.requests + r));
    }
  }
  if (budget <= 0) return;
  if (budget < static_cast<int64_t>(keys.size())) {
    std::nth_element(keys.begin(), keys.begin() + budget, keys.end());
    keys.resize(budget);
  }
  for (uint64_t key : keys) ++a.lengths[static_cast<uint32_t>(key) % a.requests];
}

void write_rows(const Schedule& a) {
  const int64_t width = a.drafts + 1;
  int32_t row = 0;
  a.cu_rows[0] = 0;
  std::fill_n(a.row_of, a.requests * width, -1);
  for (int64_t r = 0; r < a.requests; ++r) {
    const int32_t count = present(a, r) ? a.lengths[r] + 1 : 0;
    for (int32_t j = 0; j < count; ++j, ++row) {
      const int64_t from = slot(a, r) * width + j;
      a.owner[row] = static_cast<int32_t>(r);
      a.place[row] = j;
      a.source[row] = static_cast<int32_t>(from);
      a.input_tokens[row] = a.tokens[from];
      a.positions[row] = a.starts[slot(a, r)] + j;
      a.row_of[r * width + j] = row;
    }
    a.kv_lengths[r] = count ? static_cast<int32_t>(a.starts[slot(a, r)]) + count : 0;
    a.cu_rows[r + 1] = row;
    a.host[r] = a.lengths[r];
  }
  a.host[a.requests] = row;
  for (int64_t i = row; i < a.capacity; ++i) {
    a.owner[i] = a.source[i] = -1;
    a.place[i] = 0;
    a.input_tokens[i] = a.positions[i] = 0;
  }
}

}  // namespace

int64_t schedule(const Schedule& a) {
  int64_t needed = 0;
  for (int64_t r = 0; r < a.requests; ++r)
    if (present(a, r)) needed += 1 + (is_fixed(a, r) ? std::min(a.fixed[r], limit(a, r)) : 0);
  if (needed > a.capacity) return needed;
  for (int64_t r = 0; r < a.requests; ++r)
    a.lengths[r] = present(a, r) && is_fixed(a, r) ? std::min(a.fixed[r], limit(a, r)) : 0;
  write_survival(a);
  admit(a, std::min(a.device_budget ? *a.device_budget : a.budget, a.capacity - needed));
  write_rows(a);
  return 0;
}

}  // namespace dspark_kernels
