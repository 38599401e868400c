"""A full read of a checkpoint: every byte once, in pieces, looking for values that no model has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from orchestrator.model.checkpoint.assemble import NAN_SCALE
from orchestrator.model.checkpoint.checks import check_tensors
from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.reader import Checkpoint
from orchestrator.model.engram_tables import check_engram_rows

_PIECE_BYTES = 64 << 20


def verify_checkpoint(path: str | Path, progress: Callable[[str], None] | None = None) -> int:
    """Read everything, Engram tables too; returns the payload bytes. `progress` gets each tensor's name before it.

    Raises `CheckpointError` for all that `load_weights` refuses and for NaN or infinite weights.
    """
    checkpoint = Checkpoint(path)
    check_tensors(checkpoint.config, checkpoint.entries, checkpoint.folder)
    check_engram_rows(checkpoint.config)
    total = 0
    for name, entry in checkpoint.entries.items():
        if progress is not None:
            progress(name)
        rows, nbytes = entry.shape[0], entry.end - entry.begin
        step = max(1, _PIECE_BYTES * rows // max(nbytes, 1))
        for start in range(0, rows, step):
            piece = checkpoint.read_rows(name, start, min(rows, start + step))
            bad = _invalid(piece, entry.dtype)
            if bool(bad.any()):
                first, *rest = bad.nonzero()[0].tolist()
                raise CheckpointError(
                    f"{checkpoint.file_of(name)}: {name}: no finite value at {[start + first, *rest]}; "
                    "download the file again"
                )
        total += nbytes
    return total


def _invalid(values: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype == "F8_E8M0":
        return values == NAN_SCALE
    if dtype == "F8_E4M3":
        return (values.view(torch.uint8) & 0x7F) == 0x7F
    if dtype == "I8":  # every FP4 code is a number
        return torch.zeros(1, dtype=torch.bool)
    return ~torch.isfinite(values)
