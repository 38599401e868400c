"""How token rows and results are rounded for the way, in plain PyTorch: the definition that all transports match."""

from __future__ import annotations

import torch

from ep_comm.shape import GROUP, Shape

FP8_MAX = 448.0  # largest magnitude of float8_e4m3fn


def encode_rows(x: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float32 or bfloat16 [T, hidden] in the dispatch format, and its scales float32 [T, hidden / 128] or None.

    "float32" widens, "bfloat16" rounds to nearest even. "fp8": scale = largest magnitude of 128 channels / 448, 1 where
    that is 0; code = E4M3 nearest even of x / scale, saturated. NaN does not count for the scale and stays NaN at its
    place; an infinity makes the scale infinite, so that its whole group is NaN when multiplied out.
    """
    if shape.dispatch != "fp8":
        return x.to(shape.dispatch_dtype), None
    groups = x.float().reshape(x.shape[0], shape.hidden // GROUP, GROUP)
    magnitude = groups.abs()
    scales = torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude).amax(-1) / FP8_MAX
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.reshape(x.shape), scales


def decode_rows(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows of a `Dispatched` as float32 [N, hidden]."""
    if scales is None:
        return x.float()
    groups = x.float().reshape(x.shape[0], x.shape[1] // GROUP, GROUP)
    return (groups * scales[..., None]).reshape(x.shape)


def round_results(y: torch.Tensor, shape: Shape) -> torch.Tensor:
    """float32 or bfloat16 results as they arrive: rounded to the combine format, then float32."""
    return y.to(shape.combine_dtype).float()
