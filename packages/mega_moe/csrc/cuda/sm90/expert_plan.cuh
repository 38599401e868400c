// Who computes what: token tiles of experts and the queue of items. Host and device.
//
// Experts have ordinals: the shared expert, where there is one, is ordinal 0, since its items are the longest; then the
// routed ones. An expert's rows are cut into token tiles of at most `columns` rows. An item is one or two blocks of 128
// weight rows for one token tile, and the items that read the same weights are neighbours. The queue holds the items of
// the first product of all experts, then those of the second. (An expert's second ones right after the first ones of a
// later expert, so that weights keep coming meanwhile, were slower by 4 to 14 % with few rows.)
#pragma once

#include "expert_layout.cuh"

namespace mega_moe::sm90 {

inline constexpr int kMostExperts = 512;

enum class Kind : int { first = 0, second = 1, end = 2 };

struct Item {
  Kind kind;
  int ordinal;
  int block;      // of the weight, in units of an item's blocks
  int tile;       // token tile, counted over all experts
  int rows;       // of the tile
  int columns;    // of the product and the image
  int first_row;  // position of the tile's first row: sorted rows, or tokens for the shared expert
  int image_row;  // rows of all images before this one
};

// Prefix sums over ordinals.
struct ExpertPlan {
  int ordinals, has_shared;
  int blocks1, blocks2;          // of the two weights, in units of an item's
  int first[kMostExperts + 2];   // position of the first row
  int count[kMostExperts + 2];   // rows
  int tiles[kMostExperts + 2];   // token tiles before
  int images[kMostExperts + 2];  // image rows before
};

KC_HD constexpr int tiles_of(int rows, int columns) { return (rows + columns - 1) / columns; }

// Image rows of an expert.
KC_HD constexpr int image_rows(int rows, int columns) {
  const int rest = rows % columns;
  return rows - rest + (rest ? product_rows(rest, columns) : 0);
}

KC_HD int total_tiles(const ExpertPlan& p) { return p.tiles[p.ordinals]; }
KC_HD int first_items(const ExpertPlan& p) { return total_tiles(p) * p.blocks1; }
KC_HD int second_items(const ExpertPlan& p) { return total_tiles(p) * p.blocks2; }

// The last ordinal whose prefix is not above `value`, among those with something: prefix[ordinals] > value.
KC_HD int find_ordinal(const int* prefix, int ordinals, int value) {
  int low = 0, high = ordinals - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (prefix[middle] <= value)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

KC_HD Item find_item(const ExpertPlan& p, int number, int columns) {
  const int firsts = first_items(p), second = number >= firsts;
  const int at = second ? number - firsts : number, blocks = second ? p.blocks2 : p.blocks1;
  if (at >= total_tiles(p) * blocks) return {Kind::end, 0, 0, 0, 0, 8, 0, 0};
  const int ordinal = find_ordinal(p.tiles, p.ordinals, at / blocks);
  const int tiles = p.tiles[ordinal + 1] - p.tiles[ordinal], rest = at - p.tiles[ordinal] * blocks;
  const int block = rest / tiles, tile = rest - block * tiles;
  const int left = p.count[ordinal] - tile * columns, rows = left < columns ? left : columns;
  return {second ? Kind::second : Kind::first,
          ordinal,
          block,
          p.tiles[ordinal] + tile,
          rows,
          product_rows(rows, columns),
          p.first[ordinal] + tile * columns,
          p.images[ordinal] + tile * columns};
}

// Where a row's image begins, and its place there. `row`: of the expert.
struct RowPlace {
  int image_row, columns, row;
};
KC_HD RowPlace row_place(const ExpertPlan& p, int ordinal, int row, int columns) {
  const int tile = row / columns, left = p.count[ordinal] - tile * columns;
  return {p.images[ordinal] + tile * columns, product_rows(left < columns ? left : columns, columns),
          row - tile * columns};
}

// Upper bounds for workspaces, from sizes that the host knows.
KC_HD constexpr int64_t most_image_rows(int64_t tokens, int64_t slots, int64_t experts, bool shared, int columns) {
  const int64_t routed = tokens * slots, active = (experts < routed ? experts : routed) + 1;
  return 2 * (routed + (shared ? tokens : 0)) + (least_columns(columns) - 2) * active;
}
KC_HD constexpr int64_t most_tiles(int64_t tokens, int64_t slots, int64_t experts, bool shared, int64_t columns) {
  const int64_t routed = tokens * slots;
  return routed / columns + (experts < routed ? experts : routed) + (shared ? tokens / columns + 1 : 0);
}

}  // namespace mega_moe::sm90
