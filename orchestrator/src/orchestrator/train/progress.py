"""How far a training run is, for a person: one live line on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

_PLAIN_SECONDS = 15.0


class Progress:
    """A context manager; `update` takes what was logged last. Writes to standard error."""

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps = title, steps
        self._live: Any = None
        self._task: Any = None
        self._printed = 0.0

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
                from rich.progress import Progress as Bars
            except ImportError:  # a bare machine has torch only
                return self
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._live = Bars(*columns, console=Console(stderr=True))
            self._live.start()
            self._task = self._live.add_task(self.title, total=self.steps, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, loss: float | None, tokens_per_second: float, seconds_left: float) -> None:
        """`loss` None: not finite."""
        shown = "not finite" if loss is None else f"{loss:.4f}"
        note = f"loss {shown}  {tokens_per_second:,.0f} tokens/s  {duration(seconds_left)} left"
        if self._live is not None:
            self._live.update(self._task, completed=step, note=note)
        elif time.monotonic() - self._printed >= _PLAIN_SECONDS:
            self._printed = time.monotonic()
            print(f"{self.title}: step {step} of {self.steps}  {note}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
