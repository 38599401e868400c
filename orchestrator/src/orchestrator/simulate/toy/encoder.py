"""An encoder that makes the only right embedding of an image, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.roles import engine_port as port
from orchestrator.simulate.toy.engine import EngineShape, Key, Site, ToyEngine
from orchestrator.simulate.toy.text import embedding

SECONDS_A_PATCH = 2e-5


class EncoderEngine(ToyEngine):
    """One image after the other."""

    def __init__(self, name: str, shape: EngineShape, site: Site, emit: Callable[[Any], None]) -> None:
        super().__init__(name, shape, site, emit)
        self._on[port.Encode] = self._encode
        self._free_at = 0.0

    def _encode(self, command: port.Encode) -> None:
        now = self.site.queue.now
        self._free_at = max(self._free_at, now) + 0.005 + SECONDS_A_PATCH * command.image.patches
        bad = self._bad_row()
        payload = b"" if bad else embedding(command.image.digest)
        done = port.EncodeDone(command.image.digest, payload, "not a number" if bad else "")
        if self.hang:
            self.hang = False
            self.waiting += 1
            return
        self._answer(self._free_at - now, done)

    def forget_all(self) -> None:
        pass

    def free(self, key: Key) -> None:
        pass

    def room(self) -> float:
        return 8192.0
