"""Moves the parts of a request's state from one process to another (docs/transfer.md). Needs no torch."""

from typing import TYPE_CHECKING, Any

from orchestrator.transfer.errors import LinkBroken, TransferFailed, TransferUnavailable
from orchestrator.transfer.local import LocalListener
from orchestrator.transfer.offered import Offered, Outcome
from orchestrator.transfer.pull import Pull, Receiver
from orchestrator.transfer.sender import Sender
from orchestrator.transfer.settings import Limits, Times
from orchestrator.transfer.shared import SharedListener, dial_shared
from orchestrator.transfer.tcp import TcpListener, dial_tcp

if TYPE_CHECKING:
    from orchestrator.transfer.mooncake import MooncakeListener, dial_mooncake

__all__ = [
    "Limits",
    "LinkBroken",
    "LocalListener",
    "MooncakeListener",
    "Offered",
    "Outcome",
    "Pull",
    "Receiver",
    "Sender",
    "SharedListener",
    "TcpListener",
    "Times",
    "TransferFailed",
    "TransferUnavailable",
    "dial_mooncake",
    "dial_shared",
    "dial_tcp",
]


def __getattr__(name: str) -> Any:
    """Mooncake's library is large, and not everywhere: only who names it loads it."""
    if name in ("MooncakeListener", "dial_mooncake"):
        from orchestrator.transfer import mooncake

        return getattr(mooncake, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
