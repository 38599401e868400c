"""What happened in a run, a line an event, for reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.simulate.faults.base import Fault

_LONGEST = 160


class Trace:
    """Writes lines through `write`.

    Args:
        only: names of requests; messages about others, and those about none, are left out. Empty for everything.
        start: virtual second from which it writes.
    """

    def __init__(self, write: Callable[[str], None], only: frozenset[str] = frozenset(), start: float = 0.0) -> None:
        self._write, self._only, self._start = write, only, start

    def message(self, now: float, source: str, target: str, message: Any) -> None:
        """A message arrives."""
        if now < self._start:
            return
        if self._only and getattr(message, "request", None) not in self._only:
            return
        self._write(f"{now:10.4f}  {source:>10} > {target:<10} {brief(message)}")

    def fault(self, now: float, fault: Fault, begins: bool) -> None:
        """A fault begins or ends."""
        if now >= self._start:
            self._write(f"{now:10.4f}  {'!!' if begins else 'ok':>10}   {fault}")

    def note(self, now: float, text: str) -> None:
        """Anything else."""
        if now >= self._start:
            self._write(f"{now:10.4f}  {'--':>10}   {text}")


def brief(message: Any) -> str:
    """A message on one line; long fields, such as prompts, by their length."""
    fields = []
    for name in getattr(type(message), "__struct_fields__", ()):
        value = getattr(message, name)
        if isinstance(value, (tuple, bytes, str)) and len(value) > 12:
            value = f"<{len(value)}>" if not isinstance(value, str) else value
        elif hasattr(type(value), "__struct_fields__"):
            value = f"<{type(value).__name__}>"
        fields.append(f"{name}={value}")
    text = f"{type(message).__name__}({', '.join(fields)})"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
