"""What the kernels take, and how many CTAs a rank gets. Pure functions."""

from __future__ import annotations

import torch

from ep_comm.shape import Shape
from kernel_core.check import require

MOST_RANKS, MOST_SLOTS, MOST_HERE = 64, 32, 16
_CTAS_A_TOKEN, _FEWEST = 2, 8  # of fixed rows: with more, CTAs find too few to be worth their wait for each other


def check_shape(shape: Shape) -> None:
    """ValueError for what no kernel of this package takes."""
    require(shape.ranks <= MOST_RANKS, "ranks", shape.ranks, f"at most {MOST_RANKS} on GPUs")
    require(shape.top_k <= MOST_SLOTS, "top_k", shape.top_k, f"at most {MOST_SLOTS} on GPUs")
    require(shape.hidden % 16 == 0, "hidden", shape.hidden, "a multiple of 16 on GPUs")


def ctas_of(shape: Shape, most: int, fixed: bool) -> int:
    """CTAs of a rank's launch, at most `most`: all for packed rows, fewer for the few tokens of fixed ones."""
    if not fixed:
        return most
    return max(1, min(most, max(_FEWEST, _CTAS_A_TOKEN * shape.max_tokens)))


def gpu(device: torch.device | str) -> torch.device:
    """With its number: the current one where none is said."""
    where = torch.device(device)
    require(where.type == "cuda", "device", str(where), "an NVIDIA GPU")
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
