"""Moves the parts of a request's state from one process to another (docs/transfer.md). Needs no torch."""

from orchestrator.transfer.errors import LinkBroken, TransferFailed
from orchestrator.transfer.local import LocalListener
from orchestrator.transfer.offered import Offered, Outcome
from orchestrator.transfer.pull import Pull, Receiver
from orchestrator.transfer.sender import Sender
from orchestrator.transfer.settings import Limits, Times
from orchestrator.transfer.shared import SharedListener, dial_shared
from orchestrator.transfer.tcp import TcpListener, dial_tcp

__all__ = [
    "Limits",
    "LinkBroken",
    "LocalListener",
    "Offered",
    "Outcome",
    "Pull",
    "Receiver",
    "Sender",
    "SharedListener",
    "TcpListener",
    "Times",
    "TransferFailed",
    "dial_shared",
    "dial_tcp",
]
