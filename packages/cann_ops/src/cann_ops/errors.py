"""Errors of this package."""

from __future__ import annotations


class CannUnavailableError(RuntimeError):
    """An op cannot run on an Ascend NPU here; the message names the step that failed and what to do."""


class NotLoweredError(RuntimeError):
    """A program could not be turned into AscendC: TileLang is missing, or it refused the program."""
