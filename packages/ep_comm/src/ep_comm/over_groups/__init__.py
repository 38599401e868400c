"""Ranks that reach each other through a process group of torch.distributed."""

from ep_comm.over_groups.communicator import GroupCommunicator, distributed

__all__ = ["GroupCommunicator", "distributed"]
