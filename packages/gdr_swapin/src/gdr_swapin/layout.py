"""Bytes of a cache block at rest: for each source layer its index page, then its main rows, layer after layer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import accumulate

from kernel_core import check

MAIN_ROW_BYTES = 288
INDEX_ROW_BYTES = 68
_ALIGNMENT = 16  # of every part, for bulk copies and 16-byte loads


@dataclass(frozen=True)
class SourceLayer:
    """A layer that has global rows. `layer`: its number in the model. `rows`: compressed rows in a block."""

    layer: int
    rows: int
    main_row_bytes: int = MAIN_ROW_BYTES
    index_row_bytes: int = INDEX_ROW_BYTES

    @property
    def index_bytes(self) -> int:
        """Of a block's index page."""
        return self.rows * self.index_row_bytes

    @property
    def main_bytes(self) -> int:
        """Of a block's main rows."""
        return self.rows * self.main_row_bytes

    @property
    def slice_bytes(self) -> int:
        """Of both, which are contiguous in a block at rest."""
        return self.index_bytes + self.main_bytes


@dataclass(frozen=True)
class BlockLayout:
    """Source layers in the order in which a forward pass needs them, which is their order in a block too."""

    layers: tuple[SourceLayer, ...]

    def __post_init__(self) -> None:
        check.require(0 < len(self.layers) <= 8, "layers", f"{len(self.layers)} layers", "1 to 8")
        numbers = [source.layer for source in self.layers]
        check.require(numbers == sorted(set(numbers)) and numbers[0] >= 0, "layers", numbers,
                      "layer numbers of at least 0, each above the one before")  # fmt: skip
        for source in self.layers:
            parts = (source.index_bytes, source.main_bytes)
            check.require(source.rows > 0 and all(p > 0 and p % _ALIGNMENT == 0 for p in parts),
                          f"layer {source.layer}", f"parts of {parts} bytes",
                          f"positive multiples of {_ALIGNMENT}")  # fmt: skip

    @property
    def numbers(self) -> tuple[int, ...]:
        """Layer numbers, in deadline order."""
        return tuple(source.layer for source in self.layers)

    @property
    def block_bytes(self) -> int:
        """Of a whole block."""
        return sum(source.slice_bytes for source in self.layers)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer's index page starts in a block; its main rows follow at once."""
        sizes = [source.slice_bytes for source in self.layers]
        return tuple(accumulate(sizes[:-1], initial=0))

    @property
    def tag(self) -> str:
        """16 hex digits that name this layout; a reader refuses another one."""
        fields = [(s.layer, s.rows, s.main_row_bytes, s.index_row_bytes) for s in self.layers]
        return hashlib.sha256(f"block layout 1 {fields}".encode()).hexdigest()[:16]

    def position(self, layer: int) -> int:
        """Index of a source layer; ValueError for a layer that is none."""
        check.require(layer in self.numbers, "layer", layer, f"one of {list(self.numbers)}")
        return self.numbers.index(layer)


# 128 tokens: one row for two tokens at layers 2, 8 and 14, one a token at layer 20.
V41 = BlockLayout((SourceLayer(2, 64), SourceLayer(8, 64), SourceLayer(14, 64), SourceLayer(20, 128)))
