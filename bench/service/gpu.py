"""The same on one NVIDIA GPU: one prefill and one decode process share it, beside one process that does both.

Processes on one GPU take turns, so the times say what the hand-over costs and not what two GPUs would give.
"""

from __future__ import annotations

from dataclasses import replace

from bench.service.run import Wanted
from kernel_core.bench import device_ledger

COUNTS = (1, 8, 32)


def wanted(asked: Wanted) -> Wanted:
    """What is asked for, on a GPU of this host. Raises ValueError without one."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("device: got 'cuda', but this PyTorch sees no NVIDIA GPU; leave it out to measure on the CPU")
    return replace(asked, prefill=1, decode=1, encoder=min(asked.encoder, 1), counts=COUNTS)


def ledger_name() -> str:
    import torch

    return device_ledger(torch.cuda.get_device_name())
