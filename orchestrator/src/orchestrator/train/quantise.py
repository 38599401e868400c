"""Values through their stored formats and back, with a straight-through gradient.

The same numbers as `kernel_core.formats` (a test compares them bit by bit), written as arithmetic so that a compiler
can fuse it: no codes are made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from orchestrator.train.fused import fused

_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
_MAIN_FLOOR, _WINDOW_FLOOR, _INDEX_FLOOR = 6 * 2.0**-9, 1e-4, 6 * 2.0**-126
_BLOCK = 32


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with ties to the even code: the step doubles at 2 and 4."""
    a = x.abs().clamp(max=_E2M1_MAX)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two not below `x` (positive, normal)."""
    bits = x.view(torch.int32)
    up = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)) << 23
    return up.view(torch.float32)


def _groups(x: torch.Tensor, size: int, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().unflatten(-1, (-1, size))
    return groups, groups.abs().amax(-1, keepdim=True).clamp(min=floor)


def main_rows(x: torch.Tensor) -> torch.Tensor:
    """float [..., D] as a main row gives it back: E2M1 codes, an E4M3 scale for 16."""
    groups, amax = _groups(x, 16, _MAIN_FLOOR)
    scale = _e4m3(amax / _E2M1_MAX)
    return (_e2m1(groups * (1.0 / scale)) * scale).flatten(-2).to(x.dtype)


def window_rows(x: torch.Tensor) -> torch.Tensor:
    """float [..., D] as a window row gives it back: E4M3 codes, a UE8M0 scale for 32."""
    groups, amax = _groups(x, _BLOCK, _WINDOW_FLOOR)
    scale = _power_of_two(amax / _E4M3_MAX)
    return (_e4m3(groups * (1.0 / scale)) * scale).flatten(-2).to(x.dtype)


def index_rows(x: torch.Tensor) -> torch.Tensor:
    """float [..., D] as an index key (and an expert weight) gives it back: E2M1 codes, a UE8M0 scale for 32."""
    groups, amax = _groups(x, _BLOCK, _INDEX_FLOOR)
    scale = _power_of_two(amax / _E2M1_MAX)
    return (_e2m1(groups * (1.0 / scale)) * scale).flatten(-2).to(x.dtype)


def fp8_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A dense weight [o, i] as FP8 with a scale for 32 x 32 gives it back; edge blocks may be smaller."""
    o, i = weight.shape
    padded = F.pad(weight.float(), (0, -i % _BLOCK, 0, -o % _BLOCK))
    blocks = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))
    scale = _power_of_two(blocks.abs().amax((1, 3), keepdim=True).clamp(min=_WINDOW_FLOOR) / _E4M3_MAX)
    values = _e4m3(blocks * (1.0 / scale)) * scale
    return values.flatten(2).flatten(0, 1)[:o, :i].to(weight.dtype)


class StraightThrough(torch.autograd.Function):
    """`function(x)` in the forward pass, the identity in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


@fused
def _blocks(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n, 1024] blocks of FP8 weights, each with one scale."""
    scale = _power_of_two(flat.abs().amax(-1, keepdim=True).clamp(min=_WINDOW_FLOOR) / _E4M3_MAX)
    return (_e4m3(flat * (1.0 / scale)) * scale).to(dtype)


@fused
def _segments(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n, 32] segments of expert weights."""
    return index_rows(flat).to(dtype)


@fused
def _table(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n, 32] segments of Engram tables."""
    return window_rows(flat).to(dtype)


class StoredWeights(torch.autograd.Function):
    """All weights as their storages give them back, one call a storage whatever the number of weights."""

    @staticmethod
    def forward(ctx: Any, storages: tuple[str, ...], dtype: torch.dtype, *weights: torch.Tensor) -> Any:
        results: list[torch.Tensor | None] = [None] * len(weights)
        for storage, function in (("fp8", _blocks), ("fp4", _segments), ("table", _table)):
            chosen = [i for i, s in enumerate(storages) if s == storage]
            if not chosen:
                continue
            flat = [_flatten(weights[i]) if storage == "fp8" else weights[i].reshape(-1, _BLOCK) for i in chosen]
            pieces = function(torch.cat(flat), dtype).split([f.shape[0] for f in flat])
            for i, piece in zip(chosen, pieces, strict=True):
                shape = weights[i].shape
                results[i] = _unflatten(piece, shape) if storage == "fp8" else piece.view(shape)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *(None if g is None else g.float() for g in grads)


def _flatten(weight: torch.Tensor) -> torch.Tensor:
    """[o, i] -> [o/32 * i/32, 1024]."""
    return weight.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK)).transpose(1, 2).reshape(-1, _BLOCK * _BLOCK)


def _unflatten(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    o, i = shape
    return blocks.view(o // _BLOCK, i // _BLOCK, _BLOCK, _BLOCK).transpose(1, 2).reshape(o, i)


def prepare(
    entries: dict[str, Any], values: dict[str, torch.Tensor], dtype: torch.dtype, *, quantised: bool
) -> dict[str, torch.Tensor]:
    """Every tensor as a product takes it: through its storage where asked, matrices in `dtype`.

    `entries` are `parameters.Entry`. FP8 weights have sizes that are multiples of 32.
    """
    result = dict(values)
    packed = [name for name, entry in entries.items() if entry.storage in ("fp8", "fp4", "table")]
    if quantised:
        storages = tuple(entries[name].storage for name in packed)
        passed = StoredWeights.apply(storages, dtype, *(values[name] for name in packed))
        result |= dict(zip(packed, passed, strict=True))
    else:
        result |= {name: values[name].to(dtype) for name in packed}
    matrices = [name for name, entry in entries.items() if entry.storage == "bf16" and len(entry.shape) > 1]
    return result | {name: values[name].to(dtype) for name in matrices}
