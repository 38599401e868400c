"""From block ids to copies: checks, addresses, merging of neighbours. Arithmetic on arrays; no memory is touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from gdr_swapin.layout import BlockLayout
from gdr_swapin.native import native
from gdr_swapin.pools import PagedPools
from kernel_core import check

Ids = Iterable[int] | np.ndarray | torch.Tensor


def checked_ids(name: str, ids: Ids, first: int, end: int, *, unique: bool = False) -> np.ndarray:
    """Ids as `int64[n]`; ValueError names one outside of [first, end), or one that comes twice where `unique`."""
    if isinstance(ids, torch.Tensor):
        check.require(ids.device.type == "cpu", name, f"a tensor on {ids.device}", "ids on the host")
        ids = ids.numpy()
    values = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if values.size == 0:
        values = values.astype(np.int64).reshape(-1)
    check.require(values.ndim == 1 and np.issubdtype(values.dtype, np.integer), name,
                  f"{values.dtype} of shape {list(values.shape)}", "a list of integers")  # fmt: skip
    values = np.ascontiguousarray(values, dtype=np.int64)
    if len(values) and not (first <= int(values.min()) and int(values.max()) < end):
        wrong = values[(values < first) | (values >= end)]
        check.require(False, name, wrong[:4].tolist(), f"{first} to {end - 1}")
    if unique and len(values) > 1:
        ordered = np.sort(values)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        check.require(not len(twice), name, f"{twice[:4].tolist()} more than once", "each block once")
    return values


def by_slot(
    slots: Ids, blocks: Ids, slot_end: int, block_end: int, *, unique: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Checked ids of a request in the order of growing slots, `int64[n]` each, so that neighbours can travel as one.

    ValueError names a slot outside of [0, slot_end) or, where `unique`, twice; a block outside of [1, block_end) or
    twice; and lists of different lengths.
    """
    if not unique and all(isinstance(ids, np.ndarray) and ids.dtype == np.int64 for ids in (slots, blocks)):
        ours = [np.ascontiguousarray(ids) for ids in (slots, blocks)]
        if ours[0].ndim == 1 and ours[0].shape == ours[1].shape:
            count = len(ours[0])
            found = np.empty((2, count), dtype=np.int64)
            if native.order_ids(
                slots=ours[0].ctypes.data, blocks=ours[1].ctypes.data, count=count, slot_end=slot_end,
                block_end=block_end, sorted_slots=found.ctypes.data, sorted_blocks=found.ctypes.data + 8 * count,
            ):  # fmt: skip
                return found[0], found[1]
    # What was given otherwise, or is wrong somewhere: step by step, for the words of the error.
    sources = checked_ids("slots", slots, 0, slot_end, unique=unique)
    pages = checked_ids("blocks", blocks, 1, block_end, unique=True)
    check.require(len(sources) == len(pages), "slots", f"{len(sources)} ids", f"{len(pages)}, one a block")
    order = np.argsort(sources, kind="stable")
    return sources[order], pages[order]


@dataclass(frozen=True)
class Copies:
    """Pieces of memory to copy: addresses and sizes in bytes, `uint64[n]` each."""

    targets: np.ndarray
    sources: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())

    def part(self, start: int, end: int) -> Copies:
        return Copies(self.targets[start:end], self.sources[start:end], self.sizes[start:end])

    def cut(self, most: int) -> Iterator[Copies]:
        """In runs of at most `most` pieces."""
        for start in range(0, len(self), most):
            yield self.part(start, start + most)

    def where(self, mask: np.ndarray) -> Copies:
        """Those that the mask names."""
        return Copies(self.targets[mask], self.sources[mask], self.sizes[mask])

    def reversed(self) -> Copies:
        """The way back."""
        return Copies(self.sources, self.targets, self.sizes)

    def arguments(self) -> dict[str, int]:
        """What the compiled modules take; the arrays have to stay alive during the call."""
        return {
            "targets": self.targets.ctypes.data,
            "sources": self.sources.ctypes.data,
            "sizes": self.sizes.ctypes.data,
            "count": len(self),
        }


def joined(*lists: Copies) -> Copies:
    """One list behind the other."""
    return Copies(*(np.concatenate([getattr(c, f) for c in lists]) for f in ("targets", "sources", "sizes")))


def merged(copies: Copies) -> Copies:
    """Neighbours on both sides become one piece; the order stays."""
    if len(copies) < 2:
        return copies
    to_end, from_end = copies.targets + copies.sizes, copies.sources + copies.sizes
    starts = np.flatnonzero(
        np.concatenate(([True], (copies.targets[1:] != to_end[:-1]) | (copies.sources[1:] != from_end[:-1])))
    )
    return Copies(copies.targets[starts], copies.sources[starts], np.add.reduceat(copies.sizes, starts))


@dataclass(frozen=True)
class Source:
    """Blocks at rest in memory: the first one's address, and bytes from one to the next."""

    base: int
    stride: int

    def at(self, slots: np.ndarray, offset: int) -> np.ndarray:
        """Addresses of byte `offset` of blocks, `uint64[n]`."""
        return np.uint64(self.base + offset) + slots.astype(np.uint64) * np.uint64(self.stride)


def layer_parts(
    start: Source, slots: np.ndarray, pools: PagedPools, blocks: np.ndarray, position: int
) -> tuple[Copies, Copies]:
    """A layer's index pages and its main rows from an arena into the pools; neighbours on both sides are merged."""
    layout = pools.layout
    source = layout.layers[position]
    pages = blocks.astype(np.uint64)

    def part(tensor: torch.Tensor, size: int, skip: int) -> Copies:
        targets = np.uint64(tensor.data_ptr()) + pages * np.uint64(size)
        sizes = np.full(len(slots), size, dtype=np.uint64)
        return merged(Copies(targets, start.at(slots, layout.offsets[position] + skip), sizes))

    index = part(pools.index[position], source.index_bytes, 0)
    return index, part(pools.main[position], source.main_bytes, source.index_bytes)


def layer_copies(start: Source, slots: np.ndarray, pools: PagedPools, blocks: np.ndarray, position: int) -> Copies:
    """Both in one list."""
    return joined(*layer_parts(start, slots, pools, blocks, position))


@dataclass(frozen=True)
class Span:
    """Source layers [first, end) of a block, which are contiguous at rest: byte `offset`, `size` bytes."""

    first: int
    end: int
    offset: int
    size: int


def spans_of(layout: BlockLayout, order: str) -> list[Span]:
    """What of a block travels in one piece: each "layer" alone, the "first" and then the rest, or the whole "block"."""
    n = len(layout.layers)
    bounds = {"layer": range(n + 1), "first": sorted({0, 1, n}), "block": (0, n)}[order]
    ends = [*layout.offsets, layout.block_bytes]
    return [Span(a, b, ends[a], ends[b] - ends[a]) for a, b in pairwise(bounds)]


def regular_runs(slots: np.ndarray, blocks: np.ndarray, fewest: int) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Runs (start, length) of at least `fewest` blocks in which both ids grow by one, and a mask of all others.

    Such a run is one strided copy for each part of a layer.
    """
    n = len(slots)
    alone = np.ones(n, dtype=bool)
    if n == 0:
        return [], alone
    breaks = (np.diff(slots) != 1) | (np.diff(blocks) != 1)
    if n - 1 - np.count_nonzero(breaks) < fewest - 1:  # the usual case of scattered blocks, quickly
        return [], alone
    starts = np.flatnonzero(np.concatenate(([True], breaks)))
    lengths = np.diff(np.append(starts, n))
    runs = [(int(s), int(l)) for s, l in zip(starts, lengths, strict=True) if l >= fewest]
    for start, length in runs:
        alone[start : start + length] = False
    return runs, alone
