"""A prepared image as bytes, on its way from a front to an encoder."""

from __future__ import annotations

import struct

import numpy as np

from orchestrator.model.vision.geometry import Geometry
from orchestrator.model.vision.image import PreparedImage

_HEAD = struct.Struct("<4s6I32s")  # magic, width, height, columns, rows, grid columns, grid rows, digest
_MAGIC = b"FPX1"
_COLOURS = 3
LARGEST = 256 << 20
"""Bytes of one image's pixels."""


def pack(image: PreparedImage) -> bytes:
    size = image.geometry
    numbers = (size.width, size.height, size.columns, size.rows, size.grid_columns, size.grid_rows)
    return _HEAD.pack(_MAGIC, *numbers, image.digest) + np.ascontiguousarray(image.pixels).tobytes()


def unpack(data: bytes) -> PreparedImage:
    """Raises ValueError for anything but what `pack` gave, before memory is taken for it."""
    if len(data) < _HEAD.size:
        raise ValueError(f"pixels: got {len(data)} bytes, allowed are at least {_HEAD.size}")
    magic, *numbers, digest = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"pixels: got bytes that begin with {magic!r}, allowed is {_MAGIC!r}")
    size = Geometry(*numbers)
    whole = (
        min(numbers) >= 1
        and size.width % size.columns == 0
        and size.height % size.rows == 0
        and size.grid_columns <= size.columns
        and size.grid_rows <= size.rows
    )
    if not whole:
        raise ValueError(f"pixels: got {size}, allowed are whole patches")
    wanted = size.width * size.height * _COLOURS
    if wanted > LARGEST or len(data) - _HEAD.size != wanted:
        raise ValueError(f"pixels: got {len(data) - _HEAD.size} bytes, allowed are {min(wanted, LARGEST)}")
    pixels = np.frombuffer(data, dtype=np.uint8, offset=_HEAD.size).reshape(size.height, size.width, _COLOURS).copy()
    image = PreparedImage(pixels, size)
    if image.digest != digest:
        raise ValueError("pixels: other bytes than those of their digest")
    return image
