"""Where each layer's rows stand in a block at rest: one contiguous object of 128 tokens.

Source layers in order, each its index page (all codes, then all scales), then its main rows. With production rows the
object has 113,920 bytes. The tag names the layout; whoever reads bytes refuses a tag that it does not know.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from orchestrator.cache.chain import framed
from orchestrator.model.cache import CachePools
from orchestrator.model.config import BLOCK_TOKENS, ModelConfig


@dataclass(frozen=True)
class Section:
    """Bytes [offset, offset + size) of a block: the rows of one kind ("index" or "main") of one layer."""

    layer: int
    kind: str
    offset: int
    size: int


@dataclass(frozen=True)
class BlockLayout:
    """All sections, in order, without gaps."""

    sections: tuple[Section, ...]

    @staticmethod
    def of(config: ModelConfig, *, quantised: bool = True) -> BlockLayout:
        """Layout of a model's blocks; without quantisation rows are float32."""
        sections, offset = [], 0
        for layer in config.kv_source_layer_ids:
            rows = config.rows_per_block(layer)
            index = config.index_row_bytes if quantised else 4 * config.index_head_dim
            main = config.main_row_bytes if quantised else 4 * config.head_dim
            for kind, size in (("index", rows * index), ("main", rows * main)):
                sections.append(Section(layer, kind, offset, size))
                offset += size
        return BlockLayout(tuple(sections))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        last = self.sections[-1]
        return last.offset + last.size

    @property
    def tag(self) -> bytes:
        """32 bytes that name the layout: equal tags, equal meaning of every byte."""
        lines = [f"{s.layer} {s.kind} {s.offset} {s.size}".encode() for s in self.sections]
        return hashlib.sha256(framed(b"fathom-block/1", str(BLOCK_TOKENS).encode(), *lines)).digest()

    def gather(self, pools: CachePools, block: int) -> bytes:
        """Copy one block out of the paged pools."""
        parts = [_rows(pools, section, block).cpu().numpy().tobytes() for section in self.sections]
        for section, part in zip(self.sections, parts, strict=True):
            if len(part) != section.size:
                raise ValueError(f"pools: layer {section.layer} has {len(part)} bytes of {section.kind} rows a block, "
                                 f"allowed are {section.size}")  # fmt: skip
        return b"".join(parts)

    def scatter(self, pools: CachePools, block: int, payload: bytes | memoryview) -> None:
        """Copy one block into the paged pools; the inverse of `gather`."""
        if len(payload) != self.block_bytes:
            raise ValueError(f"payload: got {len(payload)} bytes, allowed are {self.block_bytes}")
        if not 0 < block < pools.num_blocks:
            raise ValueError(f"block: got {block}, allowed are 1 to {pools.num_blocks - 1} (0 is padding)")
        source = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        for section in self.sections:
            rows = _rows(pools, section, block)
            rows.copy_(source[section.offset : section.offset + section.size].to(rows.device))


def _rows(pools: CachePools, section: Section, block: int) -> torch.Tensor:
    """The section's bytes in the pools, flat."""
    pool = pools.pools[section.layer]
    return (pool.index if section.kind == "index" else pool.main)[block].view(torch.uint8).reshape(-1)
