"""The `--speculation` option."""

from __future__ import annotations

from orchestrator.commands.errors import UsageError


def speculation_of(text: str) -> str | int:
    """ "off", "scheduled" or a number of drafts, as `EngineConfig.speculation` takes it."""
    if text in ("off", "scheduled"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--speculation: got {text!r}, allowed are off, scheduled and a number of drafts above 0")
