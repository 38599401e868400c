"""How expert weights lie in memory, and how separate checkpoint tensors get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernel_core.check import require, tensor
from mega_moe.huge_pages import advise_huge_pages


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token passes, in FP8 with UE8M0 scales for 32 x 32 blocks.

    w13: float8_e4m3fn [2I, d], gate rows then up rows;  s13: uint8 [2I/32, d/32];
    w2:  float8_e4m3fn [d, I];  s2: uint8 [d/32, I/32].  d and I are multiples of 32.
    Raises ValueError where they do not fit together, so that a call need not look again.
    """

    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor

    def __post_init__(self) -> None:
        tensor("shared.w13", self.w13, dtype=torch.float8_e4m3fn, shape=(None, None))
        rows, d = self.w13.shape
        inter = rows // 2
        require(inter > 0 and rows % 64 == 0, "shared.w13", f"{rows} rows", "a positive multiple of 64")
        require(d > 0 and d % 32 == 0, "shared.w13", f"{d} columns", "a positive multiple of 32")
        tensor("shared.s13", self.s13, dtype=torch.uint8, shape=(rows // 32, d // 32))
        tensor("shared.w2", self.w2, dtype=torch.float8_e4m3fn, shape=(d, inter))
        tensor("shared.s2", self.s2, dtype=torch.uint8, shape=(d // 32, inter // 32))

    def pointers(self) -> tuple[int, int, int, int, int]:
        """Width I and the addresses of the four tensors."""
        return (
            self.w2.shape[1],
            self.w13.data_ptr(),
            self.s13.data_ptr(),
            self.w2.data_ptr(),
            self.s2.data_ptr(),
        )


def stack_experts(
    experts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Join per-expert `(w1, s1, w2, s2, w3, s3)` into the tensors that `fused_experts` takes.

    w1, w3: [I, d/2] packed E2M1 (uint8, or int8 as in the checkpoint), s1, s3: [I, d/32] UE8M0 bytes,
    w2: [d, I/2], s2: [d, I/32]. Scales may be uint8 or float8_e8m0fnu: bytes are reinterpreted, never converted.
    Returns w13 uint8 [E, 2I, d/2] (w1 rows, then w3 rows), s13, w2 uint8 [E, d, I/2], s2.
    Raises ValueError for an empty list or for experts whose shapes differ.
    """
    require(len(experts) > 0, "experts", "an empty sequence", "at least one expert")
    first = [tuple(t.shape) for t in experts[0]]
    for i, expert in enumerate(experts):
        shapes = [tuple(t.shape) for t in expert]
        require(shapes == first, f"experts[{i}]", f"shapes {shapes}", f"the shapes of experts[0], {first}")
    require(
        first[0] == first[4] and first[1] == first[5], "experts[0]", f"w1 {first[0]}, w3 {first[4]}", "equal shapes"
    )

    def stack(parts: Sequence[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        rows = sum(t.shape[0] for t in parts[0])
        out = torch.empty(len(parts), rows, parts[0][0].shape[1], dtype=torch.uint8)
        advise_huge_pages(out)
        for target, tensors in zip(out, parts, strict=True):
            torch.cat([t.view(torch.uint8) for t in tensors], out=target)
        return out

    return (
        stack([(e[0], e[4]) for e in experts]),
        stack([(e[1], e[5]) for e in experts]),
        stack([(e[2],) for e in experts]),
        stack([(e[3],) for e in experts]),
    )
