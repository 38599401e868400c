// Which bytes an item of a launch moves. Plain arithmetic, the same on host and device.
#pragma once

#include "cuda/move_slices.hpp"
#include "kernel_core/cuda/hd.cuh"

namespace gdr_swapin::cuda {

// A part of one block's slice of one layer: `to_index` bytes into the index pool, the next `to_main` into the main
// pool.
struct Piece {
  const uint8_t* from;
  uint8_t* index;
  uint8_t* main;
  uint32_t to_index, to_main;
};

KC_HD uint32_t slice_bytes(const SliceLayer& layer) { return layer.index_bytes + layer.main_bytes; }

KC_HD uint32_t pieces_of(const SliceLayer& layer, uint32_t piece) { return (slice_bytes(layer) + piece - 1) / piece; }

// Once before a launch, so that the kernel divides once an item.
inline MoveParams with_parts(MoveParams p) {
  for (int l = 0; l < p.layers; ++l) p.layer[l].parts = pieces_of(p.layer[l], p.piece);
  return p;
}

KC_HD bool ends_group(const MoveParams& p, int layer) {
  return !p.group_ends || layer + 1 == p.layers || (p.group_ends >> layer & 1);
}

// One group's layers [first, end) and the pieces that a block has in them.
struct Group {
  int first, end;
  uint32_t parts;
};

KC_HD Group group_from(const MoveParams& p, int first) {
  Group group = {first, first, 0};
  do group.parts += p.layer[group.end].parts;
  while (!ends_group(p, group.end++));
  return group;
}

// Group after group, in a group block after block, in a block layer after layer, in a slice from its start.
KC_HD int64_t item_count(const MoveParams& p) {
  int64_t items = 0;
  for (int l = 0; l < p.layers; ++l) items += p.count * p.layer[l].parts;
  return items;
}

KC_HD Piece piece_at(const MoveParams& p, int64_t item) {
  Group group = group_from(p, 0);
  for (; item >= p.count * group.parts; group = group_from(p, group.end)) item -= p.count * group.parts;
  const int64_t i = item / group.parts;
  uint32_t part = static_cast<uint32_t>(item - i * group.parts);
  int l = group.first;
  for (; part >= p.layer[l].parts; ++l) part -= p.layer[l].parts;
  const SliceLayer& layer = p.layer[l];
  const uint32_t start = part * p.piece;
  const uint32_t rest = slice_bytes(layer) - start;
  const uint32_t end = start + (rest < p.piece ? rest : p.piece);
  const int64_t slot = p.slots ? p.slots[i] : i;
  const int64_t block = p.blocks[i];
  const uint32_t page = layer.index_bytes;
  const uint32_t split = start >= page ? start : (end < page ? end : page);  // index bytes lie before it
  Piece piece;
  piece.from = p.source + slot * p.source_stride + layer.offset + start;
  piece.index = layer.index + block * page + start;
  piece.main = layer.main + block * layer.main_bytes + (split > page ? split - page : 0);
  piece.to_index = split - start;
  piece.to_main = end - split;
  return piece;
}

}  // namespace gdr_swapin::cuda
