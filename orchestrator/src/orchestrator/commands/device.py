"""The `--device` option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.commands.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.model.device import DeviceName


def check_device(name: str) -> DeviceName:
    """The name; UsageError unless that device can be used here. Imports PyTorch for anything but the CPU."""
    if name == "cpu":
        return "cpu"
    from orchestrator.model.device import resolve_device

    try:
        resolve_device(name)
    except ValueError as error:
        raise UsageError(f"--{error} (`fathom doctor` lists what works here)") from None
    return "cuda"
