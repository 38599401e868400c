"""What the coordinator of a plan and the ranks say to each other. Any of it may come late or out of order but the turn.

A `Turn` is part of what starts a step: a rank that has not got it does not run the step. That is why routing and
weights can flip together on all ranks without a further round of acknowledgements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.balance.eplb.moves import Move


@dataclass(frozen=True)
class Prepare:
    """To a rank: these are all your moves of a layer (maybe none); acknowledge when their bytes are there."""

    version: int
    layer: int
    rank: int
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Chunk:
    """To a rank: copy bytes `offset` to `offset + length` of a move's expert into its spare buffer."""

    version: int
    layer: int
    move: Move
    offset: int
    length: int


@dataclass(frozen=True)
class Acknowledge:
    """From a rank: all bytes of the layer are in spare buffers."""

    version: int
    layer: int
    rank: int


@dataclass(frozen=True)
class Flip:
    """Before the step runs, the layer's prepared buffers become its slots, and `table` its routing.

    `table` is int32 [ranks, slots]; `moves` all ranks' moves.
    """

    version: int
    layer: int
    table: np.ndarray
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Dropped:
    """To all ranks: forget what was prepared for this version."""

    version: int
    reason: str


@dataclass(frozen=True)
class Turn:
    """Of one step: what flips before it, and what may be copied while it runs.

    `held`, after a failure, is int32 [layers, ranks, slots], what the ranks alive hold together: routing begins again
    from there.
    """

    step: int
    flips: tuple[Flip, ...] = ()
    prepares: tuple[Prepare, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    held: np.ndarray | None = None
