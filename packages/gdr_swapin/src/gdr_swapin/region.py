"""A shared region of blocks: a header page that says what it holds, a state byte a slot, then the blocks."""

from __future__ import annotations

import struct

import torch

from gdr_swapin.layout import BlockLayout
from kernel_core import check

PAGE = 4096
_MAGIC = b"GDRARENA"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ16s")  # magic, version, block bytes, slots, layout tag


def region_bytes(layout: BlockLayout, slots: int) -> int:
    """Size of the region that `HostArena.over` wants for so many slots."""
    return data_offset(slots) + slots * layout.block_bytes


def data_offset(slots: int) -> int:
    """Where block 0 starts: the page behind the states."""
    return -(-(PAGE + slots) // PAGE) * PAGE


def states_of(region: torch.Tensor, slots: int) -> torch.Tensor:
    """The state bytes."""
    return region[PAGE : PAGE + slots]


def write_header(region: torch.Tensor, layout: BlockLayout, slots: int) -> None:
    """Mark all slots empty, then say what the region holds."""
    states_of(region, slots).zero_()
    header = _HEADER.pack(_MAGIC, _VERSION, layout.block_bytes, slots, layout.tag.encode())
    region[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)


def check_header(region: torch.Tensor, layout: BlockLayout, slots: int) -> None:
    """Raise ValueError unless the region holds `slots` blocks of this layout."""
    magic, version, block_bytes, count, tag = _HEADER.unpack(bytes(region[: _HEADER.size].numpy()))
    check.require(magic == _MAGIC and version == _VERSION, "buffer", f"header {magic!r} version {version}",
                  f"{_MAGIC!r} version {_VERSION}")  # fmt: skip
    check.require(tag == layout.tag.encode() and block_bytes == layout.block_bytes, "buffer",
                  f"layout {tag!r} with blocks of {block_bytes} bytes",
                  f"{layout.tag} with {layout.block_bytes}")  # fmt: skip
    check.require(count == slots, "slots", slots, f"the header's {count}")
