// Window prefill on the host: runs, the key ring, and one row through the layouts of the kernel.
#include <vector>

#include "cuda/sm90/window_plan.cuh"

using namespace mla_fp4::cuda;
using namespace mla_fp4::cuda::window;
namespace kc = kernel_core::cuda;
namespace wgmma = kernel_core::wgmma;

namespace {

struct HostRing {
  std::vector<uint16_t> image = std::vector<uint16_t>(kRingBytes / 2, 0x7FFF);
  void put(int slot, const uint8_t* row) {  // null: zeros
    for (int unit = 0; unit < 32; ++unit) {
      uint32_t raw[4] = {};
      if (row) std::memcpy(raw, row + unit * 16, 16);
      decode_unit(raw, row ? row[512 + unit / 2] : 0, [&](int j, uint32_t a, uint32_t b) {
        const uint32_t words[2] = {a, b};
        std::memcpy(reinterpret_cast<uint8_t*>(image.data()) + unit_target(slot, unit, j), words, 8);
      });
    }
  }
  float at(int slot, int place) const {  // as a product reads it
    return kc::bf16_float(image[(place / 64 * kKeyColumn + wgmma::swizzle128(slot, place % 64 * 2)) / 2]);
  }
};

// One row of 64 heads: queries to slices and fragments, products over all slots, results to their columns.
void attend(const HostRing& ring, const uint16_t* q, int own_slot, int seen, float scale, const float* sink,
            const float* rope, float* out) {
  std::vector<uint16_t> slices(kQueryBytes / 2);
  for (int head = 0; head < 64; ++head)
    for (int n = 0; n < 64; ++n)
      std::memcpy(reinterpret_cast<uint8_t*>(slices.data()) + n / 8 * kSliceBytes + wgmma::swizzle128(head, n % 8 * 16),
                  q + head * 512 + n * 8, 16);
  std::vector<float> a(64 * 512);  // by row of the product and place
  for (int t = 0; t < 128; ++t) {
    const int c = wgmma::accumulator_column(t) / 2;
    for (int n = 0; n < 32; ++n) {
      const int slice = n / 4, g = n / 2 % 2, h = n % 2, m = wgmma::accumulator_row(t) + 8 * h;
      const uint16_t* from =
          &slices[(slice * kSliceBytes + fragment_source(head_of(m - 8 * h), c, g) + h * wgmma::kAtomBytes) / 2];
      for (int i = 0; i < 8; ++i) {  // words 0, 1 to the first product, 2, 3 to the second: places 2 c and 2 c + 8
        const int k = slice * 64 + g * 32 + i / 4 * 16 + i / 2 % 2 * 8 + 2 * c + i % 2;
        a[m * 512 + k] = kc::bf16_float(from[i]);
      }
    }
  }
  for (int m = 0; m < 64; ++m) {
    const int head = head_of(m & ~8) + (m & 8);
    float s[kSlots], top = minus_infinity(), total = 0, o[512] = {};
    for (int slot = 0; slot < kSlots; ++slot) {
      float dot = 0;
      for (int k = 0; k < 512; ++k) dot += a[m * 512 + k] * ring.at(slot, k);
      const int column = slot % 8 & 6;  // the kernel moves both sides by its thread's column
      s[slot] = slot_age(own_slot - column, slot - column) < seen ? dot * (scale * kLog2E) : minus_infinity();
      top = s[slot] > top ? s[slot] : top;
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      const float w = weight(s[slot], top), p = kc::round_bf16(w);
      total += w;
      for (int k = 0; k < 512; ++k) o[k] += p * ring.at(slot, k);
    }
    const float factor = finish_factor(top, total, sink[head] * kLog2E);
    for (int place = 0; place < 512; place += 2) {
      const int column = place_column(place), turned = (column - 448) / 2;
      float even = o[place] * factor, odd = o[place + 1] * factor;
      if (column >= 448) {
        const float c = rope[turned], sine = rope[32 + turned], t = even * c + odd * sine;
        odd = odd * c - even * sine;
        even = t;
      }
      out[head * 512 + column] = even, out[head * 512 + column + 1] = odd;
    }
  }
}

}  // namespace

extern "C" {

int64_t window_run(int64_t rows, int64_t heads, int64_t batch, int64_t multiprocessors) {
  return window_run_rows(rows, heads, batch, multiprocessors);
}
int64_t items(int64_t rows, int64_t batch, int64_t run_rows) { return run_items(rows, batch, run_rows); }

// As a warp of the kernel finds the run of an item.
void find(const int32_t* cu, int32_t batch, uint32_t run_rows, uint32_t item, int32_t* out) {
  uint32_t begun = 0;
  for (int32_t b = 0; b < batch; ++b) begun += first_item(cu[b], b, run_rows) <= item;
  const uint32_t b = begun - 1, first = cu[b];
  const Run run = run_at(b, first, cu[b + 1] - first, item - first_item(first, b, run_rows), run_rows);
  out[0] = run.request, out[1] = run.first, out[2] = run.rows;
}

int age(int own, int slot) { return slot_age(own, slot); }
int seen(int64_t position, int64_t lower, int index, int window) {
  return seen_ages(known_positions(position, lower), index, window);
}
bool wild(uint32_t word) { return word_is_wild(word); }
int column_of(int place) { return place_column(place); }
uint32_t target(int slot, int unit, int j) { return unit_target(slot, unit, j); }
uint32_t fragment(int row, int c, int g) { return fragment_source(head_of(row), c, g); }

bool fits(int64_t rows, int64_t heads, int64_t batch, int64_t slots, int64_t ring_rows, int64_t window,
          int64_t run_rows) {
  alignas(16) static const uint8_t some[16] = {};
  alignas(16) static uint8_t target[16];
  WindowParams a = {};
  a.q = some, a.out = target, a.new_rows = a.ring = some, a.cu_seqlens = a.ring_slot = (const int32_t*)some;
  a.start_pos = a.lower = (const int64_t*)some, a.sink = a.rope = (const float*)some;
  a.rows = rows, a.heads = heads, a.batch = batch, a.slots = slots, a.ring_rows = ring_rows, a.window = window;
  a.run_rows = run_rows;
  return window_fits(a);
}

// A run of one request through a ring that is filled once and gets a key a row, all of them `ahead` rows early.
void attend_run(const uint16_t* q, const uint8_t* new_rows, const uint8_t* ring, int64_t ring_rows, int64_t start,
                int64_t lower, int64_t window, int64_t first, int64_t rows, int ahead, float scale, const float* sink,
                const float* rope, float* out) {
  const RowPlace place = row_place(first, 0, start, lower, 0, window, ring_rows);
  const int64_t position = start + first;
  const int own = static_cast<int>(kc::ring_offset(position, kSlots));
  const int32_t known = known_positions(position, lower);
  HostRing keys;
  for (int slot = 0; slot < kSlots; ++slot) {
    const int at = static_cast<int>(window) - 1 - slot_age(own, slot);
    const KeyRow key = at < 0 ? kNoKey : window_key(place, at, static_cast<int>(window), ring_rows);
    keys.put(slot, key == kNoKey ? nullptr : (key & kNewRow ? new_rows : ring) + window_offset(key));
  }
  for (int64_t r = 0, there = 1; r < rows; ++r) {
    for (; there < rows && there <= r + ahead; ++there)
      keys.put((own + there) % kSlots, known + there > 0 ? new_rows + (first + there) * kWindowRowBytes : nullptr);
    attend(keys, q + (first + r) * 64 * 512, (own + r) % kSlots, seen_ages(known, r, static_cast<int>(window)), scale,
           sink, rope + (first + r) * 64, out + (first + r) * 64 * 512);
  }
}
}
