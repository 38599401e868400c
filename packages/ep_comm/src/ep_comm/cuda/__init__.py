"""Expert parallelism on NVIDIA GPUs: ranks that store into each other's memory."""

from ep_comm.cuda.communicator import CudaCommunicator
from ep_comm.cuda.fused import FusedBuffers, FusedTables, virtual_buffers
from ep_comm.cuda.peers import peers
from ep_comm.cuda.together import Together
from ep_comm.cuda.virtual import virtual

__all__ = ["CudaCommunicator", "FusedBuffers", "FusedTables", "Together", "peers", "virtual", "virtual_buffers"]
