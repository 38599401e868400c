"""How the ranks of one epoch reach each other: a communicator for tokens and one for agreements and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ep_comm import Communicator, Shape
    from ep_comm.cuda import FusedExchange


class Pair(NamedTuple):
    """`data` carries dispatch and combine, `control` everything that the host does.

    fused: of GPUs, where experts read and write peers' memory. closing: what else ends with the links.
    """

    data: Communicator
    control: Communicator
    fused: FusedExchange | None = None
    closing: tuple[Callable[[], None], ...] = ()

    @property
    def moves(self) -> Communicator:
        """What carries weights: the link whose memory they are in."""
        return self.control if getattr(self.data, "device", None) is None else self.data

    def close(self) -> None:
        self.data.close()
        for close in self.closing:
            close()
        self.control.close()


class Links(Protocol):
    """Of one epoch."""

    def open(self, rank: int) -> Pair:
        """This rank's ends. Waits for the others, and raises `CommError` where one does not come."""


def control_shape(ranks: int) -> Shape:
    """Sizes of a communicator that carries no tokens."""
    from ep_comm import Shape

    return Shape(ranks, max_tokens=1, hidden=4, top_k=1, experts=1)


@dataclass(frozen=True)
class SharedMemoryLinks:
    """Processes of one host. `path` is new in every epoch, so that nothing of an earlier one is ever read."""

    path: str
    shape: Shape
    timeout: float

    def open(self, rank: int) -> Pair:
        from ep_comm import shared_memory

        return Pair(
            shared_memory(f"{self.path}.data", rank, self.shape, timeout=self.timeout),
            shared_memory(f"{self.path}.control", rank, control_shape(self.shape.ranks), timeout=self.timeout),
        )


class ThreadLinks:
    """Ranks of one process."""

    def __init__(self, data: Sequence[Communicator], control: Sequence[Communicator]) -> None:
        self._data, self._control = data, control

    def open(self, rank: int) -> Pair:
        return Pair(self._data[rank], self._control[rank])
