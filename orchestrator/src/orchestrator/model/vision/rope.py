"""Rotary angles in two dimensions: half of a head's pairs turn with the row of a patch, half with its column."""

from __future__ import annotations

import numpy as np
import torch


def tables(rows: int, columns: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [rows * columns, head_dim / 2], patches row by row.

    The first quarter of the channels has the angles of the row, the second those of the column. Frequencies are
    computed in float64 and rounded once, an angle is the float32 product with the position, as for text.
    """
    count = head_dim // 4
    steps = (theta ** (-np.arange(count, dtype=np.float64) / count)).astype(np.float32)
    across = np.repeat(np.arange(rows, dtype=np.float32), columns)
    along = np.tile(np.arange(columns, dtype=np.float32), rows)
    angles = torch.from_numpy(np.concatenate([np.outer(across, steps), np.outer(along, steps)], axis=1))
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [heads, T, head_dim], its first half turned against its second; in the dtype of x, computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
