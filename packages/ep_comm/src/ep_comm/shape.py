"""The sizes that all ranks of a communicator agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernel_core.check import require

Format = Literal["float32", "bfloat16", "fp8"]
GROUP = 128  # channels that share a scale in format "fp8"
_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class Shape:
    """Fixed when a communicator is made, equal on all its ranks; buffers are sized by it and never grow.

    ranks: of the expert-parallel group, 1 or more. max_tokens: most tokens that one rank dispatches in one call.
    hidden: channels of a token. top_k: slots of a token. experts: physical experts that a rank holds (EPLB copies
    among them); physical expert p of the group is number p % experts of rank p // experts.
    dispatch: how token rows travel. "fp8" is E4M3 with a float32 scale for each 128 channels, value = code * scale.
    combine: how results travel, "float32" or "bfloat16"; they are added in float32.
    """

    ranks: int
    max_tokens: int
    hidden: int
    top_k: int
    experts: int
    dispatch: Format = "float32"
    combine: Format = "float32"

    def __post_init__(self) -> None:
        for name in ("ranks", "max_tokens", "hidden", "top_k", "experts"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, name, value, "1 or more")
        require(self.dispatch in _BYTES, "dispatch", repr(self.dispatch), f"one of {tuple(_BYTES)}")
        require(self.combine in ("float32", "bfloat16"), "combine", repr(self.combine), "'float32' or 'bfloat16'")
        require(self.hidden % 4 == 0, "hidden", self.hidden, "a multiple of 4")
        if self.dispatch == "fp8":
            require(self.hidden % GROUP == 0, "hidden", self.hidden, f"a multiple of {GROUP} with format 'fp8'")

    @property
    def dispatch_dtype(self) -> torch.dtype:
        """Of `Dispatched.x`."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[self.dispatch]

    @property
    def combine_dtype(self) -> torch.dtype:
        """Of the rows that `combine` sends."""
        return torch.float32 if self.combine == "float32" else torch.bfloat16

    @property
    def token_bytes(self) -> int:
        """Of one dispatched row: channels and scales, without ids and weights."""
        scales = 4 * self.hidden // GROUP if self.dispatch == "fp8" else 0
        return self.hidden * _BYTES[self.dispatch] + scales

    @property
    def physical_experts(self) -> int:
        return self.ranks * self.experts
