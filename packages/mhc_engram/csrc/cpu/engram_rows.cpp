// N-gram hashes: token ids to table rows. Integers only, so one copy serves every instruction set.
#include "kernel_core/parallel.hpp"
#include "mhc_engram.hpp"

namespace mhc_engram {
namespace {

// 64-bit product that wraps, as NumPy's and PyTorch's do
int64_t multiply(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

int64_t floor_mod(int64_t a, int64_t m) {
  const int64_t r = a % m;
  return r < 0 ? r + m : r;
}

// `local` is the token's place inside its request's rows of this step.
void hash_token(const EngramRows& a, int64_t request, int64_t t, int64_t local) {
  const int64_t columns = (a.shifts - 1) * a.heads;
  int64_t* out = a.rows + t * columns;
  if (a.dead[t]) {
    for (int64_t c = 0; c < columns; ++c) out[c] = -1;
    return;
  }
  const int64_t* history = a.history + request * (a.shifts - 1);
  int64_t rolling = multiply(a.mapped[t], a.multipliers[0]);
  bool blocked = false;
  for (int64_t s = 1; s < a.shifts; ++s) {
    int64_t id = a.pad_mapped;
    if (!blocked) {
      const int64_t seen = local < s ? history[s - local - 1] : a.dead[t - s] ? -1 : a.mapped[t - s];
      blocked = seen < 0;
      if (!blocked) id = seen;
    }
    rolling ^= multiply(id, a.multipliers[s]);
    for (int64_t c = (s - 1) * a.heads; c < s * a.heads; ++c) out[c] = floor_mod(rolling, a.primes[c]) + a.offsets[c];
  }
}

}  // namespace

const char* engram_rows_problem(const EngramRows& a) {
  bool ordered = a.cu_seqlens[0] == 0 && a.cu_seqlens[a.requests] == a.tokens;
  for (int64_t b = 0; b < a.requests; ++b) ordered = ordered && a.cu_seqlens[b] <= a.cu_seqlens[b + 1];
  if (!ordered) return "cu_seqlens";
  for (int64_t c = 0; c < (a.shifts - 1) * a.heads; ++c)
    if (a.primes[c] < 1) return "primes";
  return nullptr;
}

void engram_rows(const EngramRows& a) {
  kernel_core::parallel_for(a.requests, a.tokens / (a.requests ? a.requests : 1) * a.shifts * a.heads * 16,
                            [&](int64_t b) {
                              const int64_t start = a.cu_seqlens[b];
                              for (int64_t t = start; t < a.cu_seqlens[b + 1]; ++t) hash_token(a, b, t, t - start);
                            });
}

int64_t first_row_outside(const int64_t* rows, int64_t count, int64_t table_rows) {
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] >= table_rows || rows[i] < -1) return i;
  return -1;
}

}  // namespace mhc_engram
