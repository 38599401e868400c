"""Sizes of an image on its way to tokens: pixels, patches, grid, span. No pixels here (docs/vision.md, Geometry)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_core.check import require
from orchestrator.model.config import VisionConfig

FRAME_TOKENS = 2
"""The first and the last token of a span."""


@dataclass(frozen=True)
class Geometry:
    """The canvas that an image is fitted into.

    Attributes:
        width, height: of the canvas in pixels, whole patches.
        columns, rows: patches.
        grid_columns, grid_rows: image tokens, one for `downsample_ratio` squared patches; the last ones may be partly
            empty.
    """

    width: int
    height: int
    columns: int
    rows: int
    grid_columns: int
    grid_rows: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Of the span: a newline behind each row of the grid, and the frame."""
        return self.grid_rows * (self.grid_columns + 1) + FRAME_TOKENS


def fit(width: int, height: int, vision: VisionConfig) -> Geometry:
    """The canvas for an image of that size in pixels.

    Small images grow to `min_pixels`; those whose span would be longer than `max_image_tokens` shrink, keeping their
    aspect as far as whole patches allow. Raises ValueError for a size below 1.
    """
    for name, value in (("width", width), ("height", height)):
        require(value >= 1, name, value, "1 or more pixels")
    if width * height < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    patch = vision.patch_size
    found = _canvas(_up(width, patch), _up(height, patch), vision)
    if found.tokens > vision.max_image_tokens:
        found = _canvas(*_shrunk(width, height, vision), vision)
    return found


def _canvas(columns: int, rows: int, vision: VisionConfig) -> Geometry:
    """The canvas of so many patches."""
    patch, ratio = vision.patch_size, vision.downsample_ratio
    return Geometry(columns * patch, rows * patch, columns, rows, _up(columns, ratio), _up(rows, ratio))


def _shrunk(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Columns and rows of patches of the largest canvas with about this aspect whose span is short enough."""
    ratio, room = vision.downsample_ratio, vision.max_image_tokens - FRAME_TOKENS
    aspect = height / width
    grid_columns = math.sqrt(room / aspect + 0.25) - 0.5  # solves aspect * g * (g + 1) = room
    grid_rows = grid_columns * aspect
    if grid_columns < 1:
        return ratio, room // 2 * ratio
    if grid_rows < 1:
        return (room - 1) * ratio, ratio
    cell = vision.patch_size * ratio
    scale = min(math.floor(grid_columns) * cell / width, math.floor(grid_rows) * cell / height)
    columns, rows = (math.floor(side * scale / vision.patch_size) for side in (width, height))
    return max(1, columns), max(1, rows)


def _up(value: int, step: int) -> int:
    return -(-value // step)
