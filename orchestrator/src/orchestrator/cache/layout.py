"""Where each layer's rows stand in a block at rest: one contiguous object of 128 tokens.

Source layers in order, each its index page (all codes, then all scales), then its main rows. With production rows the
object has 113,920 bytes. The tag names the layout; whoever reads bytes refuses a tag that it does not know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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

    def gather(self, pools: CachePools, blocks: list[int]) -> list[bytes]:
        """Copy blocks out of the paged pools, with one copy to the host for all of them.

        On a GPU that is in the order of the current stream.
        """
        if not blocks:
            return []
        parts = [_rows(pools, section)[blocks].view(torch.uint8).reshape(len(blocks), -1) for section in self.sections]
        for section, part in zip(self.sections, parts, strict=True):
            if part.shape[1] != section.size:
                raise ValueError(f"pools: layer {section.layer} has {part.shape[1]} bytes of {section.kind} rows a "
                                 f"block, allowed are {section.size}")  # fmt: skip
        return [row.tobytes() for row in torch.cat(parts, dim=1).cpu().numpy()]

    def scatter(self, pools: CachePools, blocks: list[int], payloads: Sequence[bytes | memoryview]) -> None:
        """Copy blocks into the paged pools, in place and in the order of the current stream; inverse of `gather`."""
        for payload in payloads:
            if len(payload) != self.block_bytes:
                raise ValueError(f"payloads: got {len(payload)} bytes, allowed are {self.block_bytes}")
        for block in blocks:
            if not 0 < block < pools.num_blocks:
                raise ValueError(f"blocks: got {block}, allowed are 1 to {pools.num_blocks - 1} (0 is padding)")
        if len(set(blocks)) != len(payloads) or len(blocks) != len(payloads):
            raise ValueError(f"blocks: got {blocks}, allowed are {len(payloads)} different ones, one a payload")
        if not blocks:
            return
        source = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8).view(len(blocks), -1)
        for section in self.sections:
            rows = _rows(pools, section)
            part = source[:, section.offset : section.offset + section.size].contiguous()
            rows[blocks] = part.view(rows.dtype).view(len(blocks), *rows.shape[1:]).to(rows.device)


def _rows(pools: CachePools, section: Section) -> torch.Tensor:
    """The section's rows of all blocks, [blocks, ...]."""
    pool = pools.pools[section.layer]
    return pool.index if section.kind == "index" else pool.main
