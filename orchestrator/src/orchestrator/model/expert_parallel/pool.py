"""Memory for experts' weights on one rank: numbered buffers of one expert each, of any layer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernel_core.check import require
from mega_moe.cuda import layout, widen


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

    def split(self, data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All bytes of one expert, uint8 [n], as its four tensors."""
        shapes = (self.w13, self.s13, self.w2, self.s2)
        parts = data.split([rows * columns for rows, columns in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class BufferPool:
    """Buffers in a few tensors, uint8 [buffers, ...] each; a buffer's bytes are its rows of them, one after the other.

    Attributes:
        buffers: how many there are. expert_bytes: of one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.buffers = tensors[0].shape[0]
        self._parts = [t.view(self.buffers, -1) for t in tensors]
        self.expert_bytes = sum(part.shape[1] for part in self._parts)

    @property
    def device(self) -> torch.device:
        return self._parts[0].device

    def pieces(self, buffer: int, offset: int, length: int) -> list[torch.Tensor]:
        """The bytes `offset` to `offset + length` of a buffer as a few contiguous views, uint8 [n]."""
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


class ExpertPool(BufferPool):
    """Stored weights: an expert's bytes are w13, s13, w2, s2 one after the other.

    Attributes:
        w13, s13, w2, s2: uint8 [buffers, ...], as `mega_moe.fused_experts` takes them.
    """

    def __init__(self, shapes: ExpertShapes, buffers: int, device: torch.device | None = None) -> None:
        require(buffers > 0, "buffers", buffers, "1 or more")
        self.w13, self.s13, self.w2, self.s2 = (
            torch.zeros(buffers, *shape, dtype=torch.uint8, device=device)
            for shape in (shapes.w13, shapes.s13, shapes.w2, shapes.s2)
        )
        super().__init__((self.w13, self.s13, self.w2, self.s2))


class PackedPool(BufferPool):
    """Weights as the GPU kernels read them (`mega_moe.cuda.layout`): first products, then second ones.

    Attributes:
        packed: of all buffers, without a shared expert; kernels take an expert by its buffer's number.
    """

    def __init__(self, hidden: int, intermediate: int, buffers: int, device: torch.device) -> None:
        require(buffers > 0, "buffers", buffers, "1 or more")
        wide = widen.wider(intermediate)
        require(layout.fits(hidden, wide), "hidden", hidden, f"a multiple of {widen.MULTIPLE} for the GPU kernels")
        first, second = (
            torch.zeros(buffers, layout.weight_bytes(rows, columns), dtype=torch.uint8, device=device)
            for rows, columns in ((2 * wide, hidden), (hidden, wide))
        )
        self.packed = widen.WidenedExperts(first, second, hidden, wide, layout.new_state(device), stored=intermediate)
        super().__init__((first, second))
