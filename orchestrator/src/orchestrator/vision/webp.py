"""The size of a WebP image, from its first bytes (the container format is published by its makers)."""

from __future__ import annotations

_HEADER = 30  # bytes that hold a size in each of the three forms


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of the canvas, None for what is no WebP file or too short to tell."""
    if len(data) < _HEADER or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = (int.from_bytes(data[at : at + 2], "little") for at in (26, 28))
        return width & 0x3FFF, height & 0x3FFF
    return None
