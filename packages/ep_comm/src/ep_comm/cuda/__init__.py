"""Expert parallelism on NVIDIA GPUs: ranks that store into each other's memory."""

from ep_comm.cuda.communicator import CudaCommunicator
from ep_comm.cuda.fused import FusedBuffers, FusedSizes, FusedTables, peer_buffers, virtual_buffers
from ep_comm.cuda.peers import Symmetric, peers
from ep_comm.cuda.publish import CopyTables, FusedExchange
from ep_comm.cuda.together import Together
from ep_comm.cuda.virtual import virtual

__all__ = [
    "CopyTables",
    "CudaCommunicator",
    "FusedBuffers",
    "FusedExchange",
    "FusedSizes",
    "FusedTables",
    "Symmetric",
    "Together",
    "peer_buffers",
    "peers",
    "virtual",
    "virtual_buffers",
]
