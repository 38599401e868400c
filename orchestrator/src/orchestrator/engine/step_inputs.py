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
    """1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, ... up to `most`, which is the last one.

    A step is at most half again as large as it has to be, and one that verifies all drafts (six rows a request) of a
    power of two of requests is none at all.
    """
    found, power = [1], 2
    while power < most:
        found += [power, power + power // 2]
        power *= 2
    return [*(n for n in found if n < most), most]
