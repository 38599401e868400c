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

// Layer after layer, in a layer block after block, in a slice from its start.
KC_HD int64_t item_count(const MoveParams& p) {
  int64_t items = 0;
  for (int l = 0; l < p.layers; ++l) items += p.count * pieces_of(p.layer[l], p.piece);
  return items;
}

KC_HD Piece piece_at(const MoveParams& p, int64_t item) {
  int l = 0;
  for (;; ++l) {
    const int64_t items = p.count * pieces_of(p.layer[l], p.piece);
    if (item < items) break;
    item -= items;
  }
  const SliceLayer& layer = p.layer[l];
  const uint32_t parts = pieces_of(layer, p.piece);
  const int64_t i = item / parts;
  const uint32_t start = static_cast<uint32_t>(item - i * parts) * p.piece;
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
