"""What a transport gives a rank: memory of all ranks, a meeting on the host, and moves of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ep_comm.communicator import Moving
from ep_comm.results import Transfer


class Connection(ABC):
    """memory: uint8, the rank's own region. addresses: of all ranks' regions, as this rank reaches them."""

    memory: torch.Tensor
    addresses: list[int]
    closed: bool = False

    @abstractmethod
    def gather(self, row: torch.Tensor, epoch: int, seconds: float) -> torch.Tensor:
        """int64 [n] of each rank as [ranks, n]; raises CommError after `seconds`."""

    @abstractmethod
    def move(self, transfers: Sequence[Transfer], seconds: float) -> Moving: ...

    @abstractmethod
    def under_way(self) -> set[tuple[int, int, int]]:
        """(tag, source, target) of this rank's transfers that have not ended."""

    @abstractmethod
    def end(self, reason: str) -> None:
        """Ends the host's waits of this process."""

    @abstractmethod
    def close(self) -> None:
        """Gives memory back. The device is idle."""
