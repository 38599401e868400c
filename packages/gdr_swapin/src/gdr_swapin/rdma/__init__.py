"""Swap-in by a network card's loopback: an interface, an engine over it, and a simulated queue.

No card was ever driven by this: status absent.
"""

from gdr_swapin.rdma.engine import RdmaEngine
from gdr_swapin.rdma.ledger import LayerLedger
from gdr_swapin.rdma.queue_pair import Completion, QueuePair, Status, WorkRequest, open_queue_pair
from gdr_swapin.rdma.simulator import Fault, SimulatedQueue

__all__ = [
    "Completion",
    "Fault",
    "LayerLedger",
    "QueuePair",
    "RdmaEngine",
    "SimulatedQueue",
    "Status",
    "WorkRequest",
    "open_queue_pair",
]
