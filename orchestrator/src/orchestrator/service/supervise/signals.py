"""SIGINT and SIGTERM of the front: the first ends the service in order, the second at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from orchestrator.server.run import make_server
from orchestrator.server.settings import ServerSettings

_WHICH = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Counts them while it is entered, in the main thread. `count`: how many came."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {which: signal.signal(which, self._on) for which in _WHICH}
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)

    def _on(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class StoppableServer(uvicorn.Server):
    """Like `make_server`, but a signal leaves the rest of the process alone, and open requests have `grace` seconds.

    `stop_taking` is called at the first signal.
    """

    def __init__(
        self,
        app: FastAPI,
        settings: ServerSettings,
        signals: Signals,
        stop_taking: Callable[[], None],
        grace: float,
        log_level: str,
    ) -> None:
        super().__init__(make_server(app, settings, log_level=log_level).config)
        self.config.timeout_graceful_shutdown = max(1, round(grace))
        self._signals, self._stop_taking = signals, stop_taking
        if signals.count:  # it came before HTTP began
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals.count += 1
        if self._signals.count == 1:
            self._stop_taking()
            self.should_exit = True
        else:
            self.force_exit = True
