"""What ends a collective other than its end."""

from __future__ import annotations


class CommError(RuntimeError):
    """Of this package. The communicator is broken after it: every later call raises `Broken`."""


class PeerTimeout(CommError):
    """A rank waited too long.

    Attributes:
        rank: who waited. waiting_for: the ranks that had not come. kind: "dispatch", "combine", "barrier", ...
        epoch: of the collective.
    """

    def __init__(self, rank: int, waiting_for: tuple[int, ...], kind: str, epoch: int, seconds: float) -> None:
        self.rank, self.waiting_for, self.kind, self.epoch = rank, waiting_for, kind, epoch
        many = "ranks" if len(waiting_for) > 1 else "rank"
        names = ", ".join(map(str, waiting_for))
        super().__init__(f"rank {rank} waited {seconds:g} s for {many} {names} in {kind}, epoch {epoch}")


class Mismatch(CommError):
    """Ranks are in different collectives at the same epoch, or were made with different shapes."""


class Broken(CommError):
    """The communicator failed before, was aborted by a peer, or was closed; says by whom and why."""
