"""The one error of a checkpoint that cannot be used."""

from __future__ import annotations


class CheckpointError(ValueError):
    """Names the file or tensor, what was found, what is expected and what to do."""
