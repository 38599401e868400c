"""The tokens that stand for an image: a frame, rows of image tokens, a newline behind each row."""

from __future__ import annotations

import torch

from kernel_core.check import require
from orchestrator.model.vision.geometry import Geometry


def span_rows(
    features: torch.Tensor, geometry: Geometry, start: torch.Tensor, newline: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """Embeddings [tokens, d] of a whole span, in the dtype of `features`.

    `features` [grid_rows * grid_columns, d] goes row by row; `start`, `newline` and `end` [d] are the learnt vectors.
    """
    rows, columns, width = geometry.grid_rows, geometry.grid_columns, start.shape[0]
    wanted = (rows * columns, width)
    require(tuple(features.shape) == wanted, "features", tuple(features.shape), str(wanted))
    out = features.new_empty(geometry.tokens, width)
    out[0], out[-1] = start.to(out), end.to(out)
    lines = out[1:-1].view(rows, columns + 1, width)
    lines[:, :columns] = features.view(rows, columns, width)
    lines[:, columns] = newline.to(out)
    return out
