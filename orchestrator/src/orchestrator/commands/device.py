"""The `--device` option."""

from __future__ import annotations

from orchestrator.commands.errors import UsageError


def check_device(name: str) -> None:
    """Raise UsageError unless the device of that name can be used here. Imports PyTorch for anything but the CPU."""
    if name == "cpu":
        return
    from orchestrator.model.device import resolve_device

    try:
        resolve_device(name)
    except ValueError as error:
        raise UsageError(f"--{error} (`fathom doctor` lists what works here)") from None
