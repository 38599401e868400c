"""What the engine needs of a queue pair whose two ends are one card: post reads or writes, poll completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Status(Enum):
    """How a work request ended. FLUSHED: the queue had failed before its turn."""

    SUCCESS = "success"
    ERROR = "error"
    FLUSHED = "flushed"


@dataclass(frozen=True)
class WorkRequest:
    """Copy `bytes` from address `source` to address `target`; `id` comes back in the completion."""

    id: int
    target: int
    source: int
    bytes: int


@dataclass(frozen=True)
class Completion:
    """`bytes`: how many were moved. Completions may come in any order, and more than once from a faulty card."""

    id: int
    status: Status
    bytes: int


class QueuePair(Protocol):
    """A queue of at most `depth` requests that have not completed."""

    depth: int

    def post(self, requests: Sequence[WorkRequest]) -> None:
        """Hand requests to the card, in order. Raises, with none of them posted, where they do not fit."""
        ...

    def poll(self, most: int) -> list[Completion]:
        """Completions that are there now, at most `most`."""
        ...

    def reset(self) -> None:
        """Stop everything under way. After it returns, nothing posted before writes memory any more."""
        ...


def open_queue_pair(card: str) -> QueuePair:
    """A queue pair of a card. There is no implementation: NotImplementedError says what exists."""
    raise NotImplementedError(
        f"RDMA loopback has no implementation for card {card!r}; what exists: gdr_swapin.rdma.SimulatedQueue"
    )
