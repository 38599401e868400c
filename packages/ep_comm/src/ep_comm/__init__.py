"""Expert parallelism between ranks: dispatch and combine of tokens, small collectives, moves of expert weights."""

from ep_comm.communicator import Communicator, Moving
from ep_comm.errors import Broken, CommError, Mismatch, PeerTimeout
from ep_comm.local import local
from ep_comm.over_groups import distributed
from ep_comm.results import Dispatched, Transfer
from ep_comm.shape import Shape
from ep_comm.shared import shared_memory, threads

__all__ = [
    "Broken",
    "CommError",
    "Communicator",
    "Dispatched",
    "Mismatch",
    "Moving",
    "PeerTimeout",
    "Shape",
    "Transfer",
    "distributed",
    "local",
    "shared_memory",
    "threads",
]
