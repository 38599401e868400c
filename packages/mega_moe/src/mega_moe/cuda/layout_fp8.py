"""MXFP4 weights for the W4A8 kernel: scales relative to a row's smallest, so that a code and its scale are one E4M3.

csrc/cuda/sm90/expert_fp8.cuh says where what stands; blocks, steps and rows are those of `mega_moe.cuda.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_core.check import require, tensor
from mega_moe.cuda import layout

SPAN = 11  # powers of two between a row's scales: 0.5 times the smallest is E4M3's smallest normal, 2^-6
_LEAST = 5  # a table's first power is 2^-5


@dataclass(frozen=True)
class PackedExpertsFp8:
    """w13, w2: uint8 [E, bytes]; scale13: float32 [E, 2I], scale2: float32 [E, d], factors of rows in packed order."""

    w13: torch.Tensor
    w2: torch.Tensor
    scale13: torch.Tensor
    scale2: torch.Tensor
    d: int
    inter: int
    state: torch.Tensor


def folds(scale: torch.Tensor) -> bool:
    """Whether every row's UE8M0 scales are near enough to each other. Reads back to the host."""
    if scale.numel() == 0:
        return True
    values = scale.int()
    return bool(((values.amax(-1) - values.amin(-1)) <= SPAN).all()) and int(values.max()) < 255


def pack_experts(w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor) -> PackedExpertsFp8:
    """Pack what `mega_moe.fused_experts` takes. Raises ValueError where scales do not fold (`folds`)."""
    experts, d, half = w2.shape
    require(layout.fits(d, 2 * half), "w2", f"[{d}, {2 * half}]", "multiples of 256")
    first = [pack(w13[e], s13[e], interleaved=True) for e in range(experts)]
    second = [pack(w2[e], s2[e], interleaved=False) for e in range(experts)]
    return PackedExpertsFp8(
        torch.stack([codes for codes, _ in first]),
        torch.stack([codes for codes, _ in second]),
        torch.stack([factor for _, factor in first]),
        torch.stack([factor for _, factor in second]),
        d,
        2 * half,
        layout.new_state(w2.device),
    )


def pack(codes: torch.Tensor, scale: torch.Tensor, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [R, K/2] and UE8M0 [R, K/32] to uint8 [bytes] and float32 [R] in packed order; R and K of 128."""
    tensor("codes", codes, dtype=torch.uint8, shape=(None, None))
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    tensor("scale", scale, dtype=torch.uint8, shape=(rows, columns // 32))
    require(rows % 128 == 0 and columns % 128 == 0, "codes", f"[{rows}, {columns}]", "multiples of 128")
    require(folds(scale), "scale", "a row's scales too far apart", f"at most {SPAN} powers of two")
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    # [tile, warp, r, g, step, piece, product, half, c, column]
    parts = layout.split_rows(nibbles, interleaved).unflatten(-1, (-1, 2, 2, 2, 4, 4))
    words = torch.zeros((), dtype=torch.int32, device=codes.device)
    for half in range(2):
        for column in range(4):
            table = torch.tensor([_spread(code, half, column) for code in range(16)], dtype=torch.int32)
            words = words | table.to(codes.device)[parts[..., half, :, column].int()]
    # [tile, warp, r, g, step, piece, product, c] to [tile, step, piece, warp, g, c, product, r]
    words = words.permute(0, 4, 5, 1, 3, 7, 6, 2)
    least = scale.amin(-1, keepdim=True)
    scales = layout.split_rows((scale - least) * 8, interleaved).unflatten(-1, (-1, 2, 2))
    packed = layout.join_steps(words.contiguous().view(torch.uint8), scales.permute(0, 4, 1, 3, 5, 2, 6))
    factor = torch.ldexp(torch.ones_like(least, dtype=torch.float32), least.int() + (_LEAST - 127))
    return packed, layout.split_rows(factor, interleaved).flatten().contiguous()


def unpack(
    packed: torch.Tensor, factor: torch.Tensor, columns: int, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of `pack`."""
    rows = factor.shape[0]
    codes, scales = layout.split_steps(packed, rows, columns // 128, 256)
    words = codes.contiguous().view(torch.int32).unflatten(-1, (2, 4, 8, 4, 2, 2)).permute(0, 3, 7, 4, 1, 2, 6, 5)
    parts = torch.stack(
        [torch.stack([_gather(words, half, column) for column in range(4)], dim=-1) for half in range(2)], dim=-3
    )
    nibbles = layout.join_rows(parts, interleaved).flatten(1)
    grid = scales.unflatten(-1, (4, 8, 2, 2, 2)).permute(0, 2, 5, 3, 1, 4, 6)
    least = torch.frexp(factor)[1] - 1 - (_LEAST - 127)
    base = layout.join_rows(least.view(-1, 4, 2, 8, 1), interleaved)
    scale = layout.join_rows(grid, interleaved).flatten(1) // 8 + base
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, scale.to(torch.uint8).contiguous()


def _places(half: int, column: int) -> tuple[int, int]:
    """Bits of a word: where a code's magnitude begins, and its sign."""
    return 4 * (4 * half + column), 8 * column + (3 if half else 7)


def _spread(code: int, half: int, column: int) -> int:
    magnitude, sign = _places(half, column)
    word = (code & 7) << magnitude | (code >> 3) << sign
    return word - (1 << 32) if word >> 31 else word


def _gather(words: torch.Tensor, half: int, column: int) -> torch.Tensor:
    magnitude, sign = _places(half, column)
    return (words >> magnitude & 7 | (words >> sign & 1) << 3).to(torch.uint8)
