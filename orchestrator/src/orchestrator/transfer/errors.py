"""What can go wrong with a transfer."""

from __future__ import annotations

from typing import Final

REASONS: Final = (
    "unknown",  # no such handoff at the sender, or it was forgotten
    "epoch",  # the handoff is there, under another epoch
    "bound",  # another receiver has it
    "restarted",  # the sender is not the one that sent the first parts
    "gone",  # parts that were acknowledged are wanted again
    "busy",  # as many handoffs or links as allowed
    "size",  # more bytes or parts than allowed
    "checksum",  # a part came broken each time
    "message",  # bytes that are no message, or one that does not belong here
    "lease",  # no word from the other side for that long
    "cancelled",  # by the other side's owner
    "closed",  # by this side's owner
    "ended",  # the transfer is over
)


class TransferFailed(RuntimeError):
    """A transfer that will not be completed; what it held is free. `reason` is one of `REASONS`, for a counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class LinkBroken(OSError):
    """One connection is of no more use; the transfer may go on over another one."""

    def __init__(self, message: str, reason: str = "lease") -> None:
        super().__init__(message)
        self.reason = reason


class TransferUnavailable(ImportError):
    """A kind of link that needs a library which is not here; the message says which."""


def require(condition: bool, argument: str, got: object, allowed: str) -> None:
    """As `kernel_core.check.require`, which needs torch."""
    if not condition:
        raise ValueError(f"{argument}: got {got}, allowed is {allowed}")
