// Copies of MTE2 and MTE3.
#include "asc_host/copies.hpp"

#include <algorithm>
#include <cstring>

#include "instruction.hpp"

namespace asc_host {

namespace {

constexpr int64_t kMostBursts = 4095, kMostBytes = (1 << 21) - 1, kBlock = 32;
using Bytes = std::vector<uint8_t>;

uint8_t* byte_at(const void* p, int64_t offset) {
  return const_cast<uint8_t*>(static_cast<const uint8_t*>(p)) + offset;
}

void need_bursts(const char* what, const UbBursts& b) {
  need_range(what, "bursts", b.count, 0, kMostBursts);
  need_range(what, "bytes of a burst", b.bytes, 0, kMostBytes);
  need_range(what, "padding on the left", b.left, 0, kBlock / b.element);
  need_range(what, "padding on the right", b.right, 0, kBlock / b.element);
}

}  // namespace

void set_pad_value(uint64_t bits) { running().pad_value = bits; }

void set_atomic(Atomic op, Number number) {
  running().atomic = op;
  running().atomic_number = number;
}

void copy_gm_to_ub(void* ub, const void* gm, const UbBursts& b, int line) {
  const char* what = "asc_copy_gm2ub_align";
  Instruction one(PIPE_MTE2, what, line);
  need_bursts(what, b);
  if (b.bytes == 0 || b.count == 0) return;
  need_aligned(Space::kUb, ub, kBlock, what);
  int64_t left = int64_t(b.left) * b.element, right = int64_t(b.right) * b.element;
  int64_t whole = left + b.bytes + right;
  // Rows closer than whole blocks follow each other byte by byte; else a burst fills its last block.
  bool fills = b.count == 1 || b.ub_step % kBlock == 0;
  int64_t total = fills ? (whole + kBlock - 1) / kBlock * kBlock : whole;
  if (b.count > 1) total = std::max(whole, std::min(total, b.ub_step));
  Bytes bytes(static_cast<size_t>(total)), shadow(bytes.size());
  for (int64_t i = 0; i < b.count; ++i) {
    std::fill(shadow.begin(), shadow.end(), 0);
    load(Space::kGm, byte_at(gm, i * b.gm_step), size_t(b.bytes), bytes.data() + left, shadow.data() + left);
    auto pad = [&](int64_t from, int64_t to) {
      for (int64_t k = from; k < to; ++k) {
        bytes[size_t(k)] = b.use_pad_value ? uint8_t(running().pad_value >> (8 * ((k - from) % b.element)))
                                           : bytes[size_t(left + (k - from) % b.element)];
        shadow[size_t(k)] = 0xff;
      }
    };
    pad(0, left);
    pad(left + b.bytes, b.use_pad_value ? total : whole);
    if (!b.use_pad_value) std::fill(bytes.begin() + whole, bytes.end(), 0xff);
    store(Space::kUb, byte_at(ub, i * b.ub_step), bytes.size(), bytes.data(), shadow.data());
  }
}

void copy_ub_to_gm(void* gm, const void* ub, const UbBursts& b, int line) {
  const char* what = "asc_copy_ub2gm_align";
  Instruction one(PIPE_MTE3, what, line);
  need_bursts(what, b);
  if (b.bytes == 0 || b.count == 0) return;
  need_aligned(Space::kUb, ub, kBlock, what);
  Bytes bytes(static_cast<size_t>(b.bytes)), shadow(bytes.size());
  for (int64_t i = 0; i < b.count; ++i) {
    load(Space::kUb, byte_at(ub, i * b.ub_step), bytes.size(), bytes.data(), shadow.data());
    store_global(byte_at(gm, i * b.gm_step), bytes.size(), bytes.data(), shadow.data());
  }
}

void set_fractal_steps(int row_step, int block_step) {
  running().row_step = row_step;
  running().block_step = block_step;
}

void copy_gm_to_l1(uintptr_t l1, const void* gm, const ToFractals& s, int line) {
  const char* what = s.transposed ? "asc_copy_gm2l1_dn2nz" : "asc_copy_gm2l1_nd2nz";
  Instruction one(PIPE_MTE2, what, line);
  Core& core = running();
  need_range(what, "rows", s.rows, 0, 65535);
  need_range(what, "columns", s.columns, 0, (1 << 24) - 1);
  need_aligned(Space::kL1, at(l1), kBlock, what);
  int64_t in_block = kBlock / s.element, blocks = (s.columns + in_block - 1) / in_block;
  Bytes row(static_cast<size_t>(blocks * kBlock)), shadow(row.size());
  for (int64_t r = 0; r < s.rows; ++r) {
    // A last block that is not full is filled with zeros.
    std::fill(row.begin(), row.end(), 0);
    std::fill(shadow.begin(), shadow.end(), 0xff);
    if (!s.transposed) {
      load(Space::kGm, byte_at(gm, r * s.step), size_t(s.columns * s.element), row.data(), shadow.data());
    } else {
      for (int64_t c = 0; c < s.columns; ++c) {
        size_t to = size_t(c * s.element);
        load(Space::kGm, byte_at(gm, c * s.step + r * s.element), size_t(s.element), &row[to], &shadow[to]);
      }
    }
    for (int64_t k = 0; k < blocks; ++k) {
      uintptr_t to = l1 + uintptr_t((k * core.block_step + r * core.row_step) * kBlock);
      store(Space::kL1, at(to), kBlock, &row[size_t(k * kBlock)], &shadow[size_t(k * kBlock)]);
    }
  }
}

void copy_ub_to_l1(uintptr_t l1, const void* ub, int count, int blocks, int ub_gap, int l1_gap, int line) {
  const char* what = "asc_copy_ub2l1";
  Instruction one(PIPE_MTE3, what, line);
  need_range(what, "bursts", count, 0, kMostBursts);
  need_range(what, "blocks of a burst", blocks, 0, 65535);
  need_range(what, "gap in UB", ub_gap, 0, 65535);
  need_range(what, "gap in L1", l1_gap, 0, 65535);
  if (!count || !blocks) return;
  need_aligned(Space::kUb, ub, kBlock, what);
  need_aligned(Space::kL1, at(l1), kBlock, what);
  Bytes bytes(size_t(blocks) * kBlock), shadow(bytes.size());
  for (int64_t i = 0; i < count; ++i) {
    load(Space::kUb, byte_at(ub, i * (blocks + ub_gap) * kBlock), bytes.size(), bytes.data(), shadow.data());
    store(Space::kL1, at(l1 + uintptr_t(i * (blocks + l1_gap) * kBlock)), bytes.size(), bytes.data(), shadow.data());
  }
}

void fill_l1(uintptr_t l1, uint32_t word, int word_bytes, uint64_t repeat, uint64_t blocks, uint64_t gap, int line) {
  const char* what = "asc_fill_l1";
  Instruction one(PIPE_MTE2, what, line);
  need_range(what, "repeats", int64_t(repeat), 0, 32767);
  need_range(what, "blocks", int64_t(blocks), 0, 32767);
  need_aligned(Space::kL1, at(l1), kBlock, what);
  if (!repeat || !blocks) return;
  Bytes bytes(size_t(blocks) * kBlock);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(word >> (8 * (i % size_t(word_bytes))));
  for (uint64_t i = 0; i < repeat; ++i) {
    store(Space::kL1, at(l1 + uintptr_t(i * (blocks + gap) * kBlock)), bytes.size(), bytes.data(), nullptr);
  }
}

}  // namespace asc_host
