"""Memory for experts' weights on one rank: numbered buffers of one expert each, of any layer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from kernel_core.check import require


@dataclass(frozen=True)
class ExpertShapes:
    """Of one expert's four tensors (`orchestrator.model.weights.Experts` without the first dimension), all uint8."""

    w13: tuple[int, int]
    s13: tuple[int, int]
    w2: tuple[int, int]
    s2: tuple[int, int]

    @staticmethod
    def of(hidden: int, intermediate: int) -> ExpertShapes:
        """MXFP4 experts: two codes a byte, a scale byte for 32 columns."""
        return ExpertShapes(
            (2 * intermediate, hidden // 2),
            (2 * intermediate, hidden // 32),
            (hidden, intermediate // 2),
            (hidden, intermediate // 32),
        )


class ExpertPool:
    """Buffers of all layers in one tensor a weight, so that a kernel takes an expert by its buffer's number.

    An expert's bytes are w13, s13, w2, s2 one after the other; moves count offsets in that order.

    Attributes:
        w13, s13, w2, s2: uint8 [buffers, ...], as `mega_moe.fused_experts` takes them.
        buffers: how many there are. expert_bytes: of one.
    """

    def __init__(self, shapes: ExpertShapes, buffers: int, device: torch.device | None = None) -> None:
        require(buffers > 0, "buffers", buffers, "1 or more")
        self.buffers = buffers
        self.w13, self.s13, self.w2, self.s2 = (
            torch.zeros(buffers, *shape, dtype=torch.uint8, device=device)
            for shape in (shapes.w13, shapes.s13, shapes.w2, shapes.s2)
        )
        self._parts = [t.view(buffers, -1) for t in (self.w13, self.s13, self.w2, self.s2)]
        self.expert_bytes = sum(part.shape[1] for part in self._parts)

    def pieces(self, buffer: int, offset: int, length: int) -> list[torch.Tensor]:
        """The bytes `offset` to `offset + length` of a buffer as at most four contiguous views, uint8 [n]."""
        require(0 <= buffer < self.buffers, "buffer", buffer, f"0 to {self.buffers - 1}")
        inside = offset >= 0 and length > 0 and offset + length <= self.expert_bytes
        require(inside, "offset, length", (offset, length), f"within {self.expert_bytes} bytes")
        found, begin = [], 0
        for part in self._parts:
            end = begin + part.shape[1]
            low, high = max(offset, begin), min(offset + length, end)
            if low < high:
                found.append(part[buffer, low - begin : high - begin])
            begin = end
        return found

    def write(self, buffer: int, offset: int, data: torch.Tensor) -> None:
        """Put bytes uint8 [n] at an offset of a buffer."""
        for piece in self.pieces(buffer, offset, data.numel()):
            piece.copy_(data[: piece.numel()])
            data = data[piece.numel() :]

    def digest(self, buffer: int) -> str:
        """SHA-256 of a buffer's bytes."""
        found = hashlib.sha256()
        for piece in self.pieces(buffer, 0, self.expert_bytes):
            found.update(piece.cpu().numpy().data)
        return found.hexdigest()
