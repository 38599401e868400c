"""Ctrl-C and SIGTERM, noted so that a loop can end in order."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupts:
    """Notes Ctrl-C and SIGTERM instead of ending at once; a second one acts as usual."""

    def __init__(self) -> None:
        self.seen = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: object) -> None:
        self.seen = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
