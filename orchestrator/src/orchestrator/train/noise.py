"""Pseudo-random numbers that are a function of the data: no generator, no state, the same inside a captured graph."""

from __future__ import annotations

import torch

_BITS = 24


def noise(tokens: torch.Tensor, salt: int) -> torch.Tensor:
    """float32 of the shape of tokens int64 [B, S], in [0, 1): mixes each position with its row's sum and its token."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    x = tokens * 0x9E3779B1 + position * 0x85EBCA77 + tokens.sum(-1, keepdim=True) * 0xC2B2AE3D + salt * 0x27D4EB2F
    x = x & 0xFFFFFFFF
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF  # 32 bits times 30 stay below 2^63
    x = x ^ (x >> 15)
    return (x & ((1 << _BITS) - 1)).float() / (1 << _BITS)
