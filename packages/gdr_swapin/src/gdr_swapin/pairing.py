"""Two blocks in one copy: rows of a strided copy may be any distance apart, so two pieces of one size are one command.

The engines then start half as many copies, and the gap between two copies counts half.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from gdr_swapin.plan import Copies

MOST_PITCH = 2**31 - 1  # bytes; what drivers take


@dataclass(frozen=True)
class Strided:
    """Copies of rows: addresses, distances and widths in bytes, `uint64[n]` each."""

    targets: np.ndarray
    target_pitches: np.ndarray
    sources: np.ndarray
    source_pitches: np.ndarray
    widths: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    def arguments(self) -> dict[str, int]:
        """What the compiled module takes; the arrays have to stay alive during the call."""
        return {**{f.name: getattr(self, f.name).ctypes.data for f in fields(self)}, "count": len(self)}


def paired(copies: Copies) -> tuple[Strided, Copies]:
    """Pieces 2i and 2i + 1 as two rows where they are of one size and both addresses grow; and all others."""
    even = len(copies) // 2 * 2
    first, second = (Copies(*(getattr(copies, f)[start:even:2] for f in ("targets", "sources", "sizes")))
                     for start in (0, 1))  # fmt: skip
    # Unsigned: a negative distance becomes a huge one.
    to, from_, width = second.targets - first.targets, second.sources - first.sources, first.sizes
    fits = (first.sizes == second.sizes) & (to >= width) & (from_ >= width) & (to <= MOST_PITCH) & (from_ <= MOST_PITCH)
    pairs = Strided(
        first.targets[fits], to[fits], first.sources[fits], from_[fits], width[fits],
        np.full(int(fits.sum()), 2, dtype=np.uint64),
    )  # fmt: skip
    alone = np.ones(len(copies), dtype=bool)
    alone[:even] = ~np.repeat(fits, 2)
    return pairs, copies.where(alone)


def pairing_order(slots: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """An order of blocks, given by growing slots, in which most can be paired: both ids grow from 2i to 2i + 1.

    The lower and the upper half of the slots are sorted by page and matched at the smallest shift that fits.
    """
    half = len(slots) // 2
    order = np.arange(len(slots))
    low, high = order[:half], order[len(slots) - half :]
    low, high = low[np.argsort(blocks[low], kind="stable")], high[np.argsort(blocks[high], kind="stable")]
    ahead = np.searchsorted(blocks[high], blocks[low], side="right") - np.arange(half)
    shift = int(max(0, ahead.max())) if half else 0
    matched = half - shift
    pairs = np.stack([low[:matched], high[shift:]], axis=1).reshape(-1)
    rest = np.concatenate([low[matched:], high[:shift], order[half : len(slots) - half]])
    return np.concatenate([pairs, rest]).astype(np.int64)
