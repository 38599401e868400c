"""How many threads the kernels and PyTorch use."""

from __future__ import annotations

import os


def use_threads(count: int | None) -> None:
    """Set the number for every thread of this process; None keeps the default. Call before PyTorch is imported:
    the engine's own thread takes its number from the environment."""
    if count is None:
        return
    os.environ["OMP_NUM_THREADS"] = str(count)
    import torch

    torch.set_num_threads(count)
