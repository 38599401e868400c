// The cube core: operands to L0, products, results out of L0C.
#include "asc_host/cube.hpp"

#include <algorithm>
#include <cstring>

#include "instruction.hpp"

namespace asc_host {

namespace {

constexpr int kFractal = 512, kRowBytes = 32;
using Bytes = std::vector<uint8_t>;

/// Rows of one operand as floats; `known[row]` says that all of it is defined.
struct Operand {
  std::vector<float> values;  // [rows][k]
  std::vector<uint8_t> known;
};

Operand read_operand(Space data, Space scales, uintptr_t from, int rows, const Product& p) {
  bool fp4 = p.number == Number::kE2m1x2;
  int bytes = number_bytes(p.number), in_row = fp4 ? 64 : kRowBytes / bytes;
  int row_fractals = (rows + 15) / 16, k_fractals = (p.k + in_row - 1) / in_row;
  Bytes raw(size_t(row_fractals) * k_fractals * kFractal), shadow(raw.size());
  load(data, at(from), raw.size(), raw.data(), shadow.data());
  int pairs = p.k / 64;
  Bytes scale, scale_shadow;
  if (p.scaled) {
    scale.resize(size_t(row_fractals) * pairs * 32);
    scale_shadow.resize(scale.size());
    load(scales, at(from / 16), scale.size(), scale.data(), scale_shadow.data());
  }
  Operand o{std::vector<float>(size_t(rows) * p.k), Bytes(size_t(rows), 0xff)};
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < p.k; ++k) {
      size_t place = (size_t(k / in_row) * row_fractals + r / 16) * kFractal + size_t(r % 16) * kRowBytes;
      place += fp4 ? size_t(k % 64) / 2 : size_t(k % in_row) * bytes;
      float v = fp4 ? e2m1_value((k & 1) ? raw[place] >> 4 : raw[place] & 15) : number_value(p.number, &raw[place]);
      for (int b = 0; b < bytes; ++b) o.known[size_t(r)] &= shadow[place + size_t(b)];
      if (p.scaled) {
        size_t s = (size_t(r / 16) * pairs + k / 64) * 32 + size_t(r % 16) * 2 + size_t(k % 64) / 32;
        v *= e8m0_value(scale[s]);
        o.known[size_t(r)] &= scale_shadow[s];
      }
      o.values[size_t(r) * p.k + k] = v;
    }
  }
  return o;
}

/// The unit flag lets the fixpipe follow the products of one tile without an event.
void unit_wait(Core& core, pipe_t pipe, int flag) {
  Clock& clock = pipe == PIPE_M ? core.unit_free : core.unit_full;
  if (flag && !clock.empty()) join(core.pipes[pipe].clock, clock);
}
void unit_done(Core& core, pipe_t pipe, int flag) {
  if (!flag) return;
  Clock& clock = pipe == PIPE_M ? core.unit_full : core.unit_free;
  clock = core.pipes[pipe].clock;
  clock[actor_of(core, pipe)] = core.pipes[pipe].issued;
}

}  // namespace

void copy_l1_to_l0(Space l0, uintptr_t to, uintptr_t l1, const Fractals& f, int line) {
  const char* what = l0 == Space::kL0a ? "asc_copy_l12l0a" : "asc_copy_l12l0b";
  Instruction one(PIPE_MTE1, what, line);
  need_aligned(l0, at(to), kFractal, what);
  need_aligned(Space::kL1, at(l1), kRowBytes, what);
  need_range(what, "steps of rows", f.m_steps, 1, 255);
  need_range(what, "steps of columns", f.k_steps, 1, 255);
  int in_row = kRowBytes / f.element;
  if (f.transposed) {
    need_range(what, "rows beyond whole groups", f.m_steps * 16 % in_row, 0, 0);
    need_range(what, "columns beyond whole groups", f.k_steps * in_row % 16, 0, 0);
  }
  Bytes fractal(kFractal), shadow(kFractal);
  for (int k = 0; k < f.k_steps; ++k) {
    for (int m = 0; m < f.m_steps; ++m) {
      uintptr_t from = l1 + (uintptr_t(f.k_start + k) * uintptr_t(f.l1_step) + uintptr_t(f.m_start + m)) * kFractal;
      load(Space::kL1, at(from), kFractal, fractal.data(), shadow.data());
      if (!f.transposed) {
        store(l0, at(to + (uintptr_t(k) * uintptr_t(f.l0_step) + uintptr_t(m)) * kFractal), kFractal, fractal.data(),
              shadow.data());
        continue;
      }
      for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < in_row; ++j) {
          int row = m * 16 + i, column = k * in_row + j;
          uintptr_t place = (uintptr_t(row / in_row) * uintptr_t(f.l0_step) + uintptr_t(column / 16)) * kFractal +
                            uintptr_t(column % 16) * kRowBytes + uintptr_t(row % in_row * f.element);
          size_t source = size_t(i) * kRowBytes + size_t(j * f.element);
          store(l0, at(to + place), size_t(f.element), &fractal[source], &shadow[source]);
        }
      }
    }
  }
}

void copy_scales(Space scales, uint64_t to, uintptr_t l1, const Fractals& f, int line) {
  const char* what = scales == Space::kScaleA ? "asc_copy_l12l0a_mx" : "asc_copy_l12l0b_mx";
  Instruction one(PIPE_MTE1, what, line);
  uint8_t block[kRowBytes], shadow[kRowBytes];
  for (int m = 0; m < f.m_steps; ++m) {
    for (int k = 0; k < f.k_steps; ++k) {
      uintptr_t from = l1 + (uintptr_t(f.m_start + m) * uintptr_t(f.l1_step) + uintptr_t(f.k_start + k)) * kRowBytes;
      load(Space::kL1, at(from), kRowBytes, block, shadow);
      store(scales, at(to + (uint64_t(m) * uint64_t(f.l0_step) + uint64_t(k)) * kRowBytes), kRowBytes, block, shadow);
    }
  }
}

void multiply(uintptr_t l0c, uintptr_t l0a, uintptr_t l0b, const Product& p, int line) {
  const char* what = p.scaled ? "asc_mmad_mx" : "asc_mmad";
  Instruction one(PIPE_M, what, line);
  Core& core = running();
  need_range(what, "m", p.m, 1, 4095);
  need_range(what, "k", p.k, 1, 4095);
  need_range(what, "n", p.n, 1, 4095);
  if (p.scaled) need_range(what, "k beyond pairs of scales", p.k % 64, 0, 0);
  need_aligned(Space::kL0a, at(l0a), kFractal, what);
  need_aligned(Space::kL0b, at(l0b), kFractal, what);
  need_aligned(Space::kL0c, at(l0c), 64, what);
  unit_wait(core, PIPE_M, p.unit_flag);
  Operand a = read_operand(Space::kL0a, Space::kScaleA, l0a, p.m, p);
  Operand b = read_operand(Space::kL0b, Space::kScaleB, l0b, p.n, p);
  std::vector<float> columns(b.values.size());  // [k][n]: the sums of a row run over k in order, n side by side
  for (int n = 0; n < p.n; ++n) {
    for (int k = 0; k < p.k; ++k) columns[size_t(k) * p.n + n] = b.values[size_t(n) * p.k + k];
  }
  int rows = (p.m + 15) / 16 * 16;
  std::vector<float> sums(size_t(p.n));
  for (int m = 0; m < p.m; ++m) {
    std::fill(sums.begin(), sums.end(), 0.f);
    for (int k = 0; k < p.k; ++k) {
      float x = a.values[size_t(m) * p.k + k];
      const float* y = &columns[size_t(k) * p.n];
      for (int n = 0; n < p.n; ++n) sums[size_t(n)] += x * y[n];
    }
    for (int first = 0; first < p.n; first += 16) {
      int n = std::min(16, p.n - first);
      float tile[16];
      uint8_t raw[64], shadow[64];
      const void* place = at(l0c + (uintptr_t(first / 16) * uintptr_t(rows) + uintptr_t(m)) * 64);
      std::memset(shadow, 0xff, sizeof shadow);
      if (!p.first) {
        load(Space::kL0c, place, size_t(n) * 4, raw, shadow);
        std::memcpy(tile, raw, size_t(n) * 4);
      }
      for (int j = 0; j < n; ++j) {
        tile[j] = p.first ? sums[size_t(first + j)] : tile[j] + sums[size_t(first + j)];
        uint8_t known = a.known[size_t(m)] & b.known[size_t(first + j)];
        if (known != 0xff) std::memset(shadow + 4 * j, known, 4);
      }
      std::memcpy(raw, tile, size_t(n) * 4);
      store(Space::kL0c, place, size_t(n) * 4, raw, shadow);
    }
  }
  unit_done(core, PIPE_M, p.unit_flag);
}

namespace {

/// Row `m` of the result in the target's type.
void read_row(uintptr_t l0c, const Result& r, int m, Bytes& out, Bytes& shadow, const char* what) {
  int size = number_bytes(r.number);
  need_range(what, "relu", r.relu, 0, 1);
  int expected = r.number == Number::kFloat ? 0 : r.number == Number::kHalf ? 1 : 16;
  if (r.quant != expected) {
    fail("unsupported", "%s: quantisation mode %d is not emulated for this target type", what, r.quant);
  }
  for (int first = 0; first < r.n; first += 16) {
    int n = std::min(16, r.n - first);
    uint8_t raw[64], known[64];
    load(Space::kL0c, at(l0c + (uintptr_t(first / 16) * uintptr_t(r.from_step) + uintptr_t(m)) * 64), size_t(n) * 4,
         raw, known);
    for (int j = 0; j < n; ++j) {
      float v = number_value(Number::kFloat, raw + 4 * j);
      if (r.relu == 1 && !(v > 0.f)) v = 0.f;
      size_t to = size_t(first + j) * size_t(size);
      number_bits(r.number, v, &out[to]);
      int all = known[4 * j] & known[4 * j + 1] & known[4 * j + 2] & known[4 * j + 3];
      std::memset(&shadow[to], all, size_t(size));
    }
  }
}

void need_result(const char* what, uintptr_t l0c, const Result& r) {
  need_range(what, "n", r.n, 1, 4095);
  need_range(what, "m", r.m, 1, 8192);
  need_aligned(Space::kL0c, at(l0c), 64, what);
}

}  // namespace

void copy_result_to_gm(void* gm, uintptr_t l0c, const Result& r, int line) {
  const char* what = "asc_copy_l0c2gm";
  Instruction one(PIPE_FIX, what, line);
  Core& core = running();
  need_result(what, l0c, r);
  unit_wait(core, PIPE_FIX, r.unit_flag);
  int size = number_bytes(r.number);
  Bytes row(size_t(r.n) * size_t(size)), shadow(row.size());
  for (int m = 0; m < r.m; ++m) {
    read_row(l0c, r, m, row, shadow, what);
    store_global(static_cast<uint8_t*>(gm) + m * r.to_step * size, row.size(), row.data(), shadow.data());
  }
  unit_done(core, PIPE_FIX, r.unit_flag);
}

void copy_result_to_ub(void* ub, uintptr_t l0c, const Result& r, int line) {
  const char* what = "asc_copy_l0c2ub";
  Instruction one(PIPE_FIX, what, line);
  Core& core = running();
  if (machine->kernel->blocks != 3) fail("value", "%s needs a mixed kernel: this one has no vector cores", what);
  need_result(what, l0c, r);
  need_range(what, "dual", r.dual, 0, 2);
  int parts = r.dual ? 2 : 1;
  if ((r.dual == 1 && r.m % 2) || (r.dual == 2 && r.n % 32)) {
    fail("value", "%s: %d rows by %d columns do not split over two vector cores", what, r.m, r.n);
  }
  unit_wait(core, PIPE_FIX, r.unit_flag);
  int size = number_bytes(r.number), rows = r.dual == 1 ? r.m / 2 : r.m, columns = r.dual == 2 ? r.n / 2 : r.n;
  int64_t base = static_cast<uint8_t*>(ub) - core.ub;
  if (base % kRowBytes)
    fail("alignment", "%s: got UB address %lld, allowed are multiples of 32", what, (long long)base);
  Bytes row(size_t(r.n) * size_t(size)), shadow(row.size());
  for (int m = 0; m < r.m; ++m) {
    read_row(l0c, r, m, row, shadow, what);
    for (int part = 0; part < parts; ++part) {
      if (r.dual == 1 && m / rows != part) continue;
      int sub = r.dual ? part : r.sub;
      size_t first = r.dual == 2 ? size_t(part * columns * size) : 0;
      store_ub_of(sub, size_t(base + (m % rows) * r.to_step * size), size_t(columns * size), &row[first],
                  &shadow[first]);
    }
  }
  unit_done(core, PIPE_FIX, r.unit_flag);
}

}  // namespace asc_host
