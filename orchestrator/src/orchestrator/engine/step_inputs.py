"""What the host says about an overlapped step, and the sizes that steps come in."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Inputs(NamedTuple):
    """What the host says about a step; `budget` are the drafts to verify, the rest as `decode_rows` and the scheduling
    op take it."""

    slots: torch.Tensor  # int32 [R]
    limits: torch.Tensor  # int32 [R]
    budget: torch.Tensor  # int32 [1]
    lower: torch.Tensor  # int64 [R]
    blocks: torch.Tensor  # int32 [R, M]


def sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 32, 64, ... up to `most`, which is the last one."""
    small = [n for n in (1, 2, 3, 4, 6, 8, 12) if n < most]
    return [*small, *(1 << power for power in range(4, most.bit_length()) if 1 << power < most), most]
