"""The encoder role's engine: asks for the pixels of images, encodes them, gives their embeddings as bytes."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.engine.handoff.pictures import image_bytes
from orchestrator.model.checkpoint.vision_weights import load_vision
from orchestrator.model.device import moved, resolve_device
from orchestrator.model.vision.encoder import VisionEncoder
from orchestrator.roles.engine_port import Drop, Dropped, Encode, EncodeDone, EngineEvent, Reform, Reformed
from orchestrator.service.pixels import unpack

ASK = 0.5  # seconds between two questions for the same pixels
PATIENCE = 10.0  # seconds in which pixels have to come
_MOST = 4096  # images that wait for pixels; an encoder's patches allow fewer
_log = logging.getLogger(__name__)


@dataclass
class _Wanted:
    """An image whose pixels have not come. `asked`: when, at last."""

    command: Encode
    since: float
    asked: float


class EncoderPort:
    """`EnginePort` of an encoder core. Images are encoded by a thread of its own, one after the other; everything else
    belongs to one thread, which calls `answers` regularly, also without a command.

    Args:
        model: folder of the checkpoint, of which the image encoder alone is read; or an encoder.
        ask: is called with a party and a digest in hex whose pixels it has; they come by `pixels`, or not.

    Attributes:
        counts: images, patches, questions, refused pixels.

    Raises:
        ValueError: the model reads no images, or its files are not what they should be.
    """

    def __init__(
        self,
        model: Path | VisionEncoder,
        ask: Callable[[str, str], Any],
        *,
        device: str = "cpu",
        every: float = ASK,
        patience: float = PATIENCE,
    ) -> None:
        if isinstance(model, Path):
            model = VisionEncoder(moved(load_vision(model), resolve_device(device)))
        self.encoder, self._ask, self._every, self._patience = model, ask, every, patience
        self.counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._wanted: dict[str, _Wanted] = {}
        self._encoding: dict[str, Encode] = {}
        self._answers: list[EngineEvent] = []
        self._group = 0
        self._work: queue.SimpleQueue[tuple[int, Encode, bytes] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, str, bytes, str]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="image encoder", daemon=True)
        self._thread.start()

    def do(self, command: Any) -> None:
        if isinstance(command, Encode):
            self._encode(command)
        elif isinstance(command, Drop):  # embeddings are kept by the core
            self._answers.append(Dropped(command.request, command.epoch))
        elif isinstance(command, Reform):
            self._group += 1
            self._wanted.clear()
            self._encoding.clear()
            self._answers = [Reformed(command.number, 1, 0.0, 0)]
        else:
            raise TypeError(f"command: got {type(command).__name__}, which an encoder has no use for")

    def answers(self) -> list[EngineEvent]:
        self._take_done()
        self._ask_again(time.monotonic())
        answers, self._answers = self._answers, []
        return answers

    def pixels(self, digest: str, payload: bytes) -> None:
        """What was asked for; empty where it is not there any more. Others' and late ones are no error."""
        wanted = self._wanted.get(digest)
        if wanted is None:
            return
        if not payload:
            del self._wanted[digest]
            self._answers.append(EncodeDone(digest, b"", "its pixels are not there any more"))
        elif digest not in self._encoding:
            self._encoding[digest] = wanted.command
            self._work.put((self._group, wanted.command, payload))

    def numbers(self) -> dict[str, float]:
        """From any thread."""
        return {name: float(count) for name, count in self.counts.copy().items()} | {"encoder seconds": self._seconds}

    def close(self) -> None:
        """End the thread behind the image that it is at."""
        self._group += 1
        self._work.put(None)
        self._thread.join(self._patience)

    # Pixels

    def _encode(self, command: Encode) -> None:
        digest = command.image.digest
        if digest in self._wanted:
            return  # the first one answers
        if not command.entry or len(self._wanted) >= _MOST:
            why = "nobody to ask for its pixels" if not command.entry else f"{_MOST} images wait for their pixels"
            self._answers.append(EncodeDone(digest, b"", why))
            return
        now = time.monotonic()
        self._wanted[digest] = _Wanted(command, now, now)
        self._ask_for(command)

    def _ask_for(self, command: Encode) -> None:
        self.counts["questions"] += 1
        self._ask(command.entry, command.image.digest)

    def _ask_again(self, now: float) -> None:
        for digest, wanted in list(self._wanted.items()):
            if digest in self._encoding:
                continue
            if now - wanted.since > self._patience:
                del self._wanted[digest]
                why = f"its pixels did not come within {self._patience} s"
                self._answers.append(EncodeDone(digest, b"", why))
            elif now - wanted.asked >= self._every:
                wanted.asked = now
                self._ask_for(wanted.command)

    def _take_done(self) -> None:
        while not self._done.empty():
            group, digest, rows, why = self._done.get()
            if group != self._group or self._encoding.pop(digest, None) is None:
                continue
            if rows or why:
                del self._wanted[digest]
                self._answers.append(EncodeDone(digest, rows, why))
            else:
                self.counts["pixels refused"] += 1  # it is asked for again

    # The thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            group, command, payload = work
            if group == self._group:
                self._done.put((group, command.image.digest, *self._make(command, payload)))

    def _make(self, command: Encode, payload: bytes) -> tuple[bytes, str]:
        """The embedding, or why there is none; neither where the pixels are not those of the image."""
        began, digest = time.monotonic(), command.image.digest
        try:
            image = unpack(payload)
            if image.digest.hex() != digest or image.geometry.patches != command.image.patches:
                raise ValueError(f"pixels: got those of {image.digest.hex()[:16]}, allowed are those of {digest[:16]}")
        except ValueError as error:
            _log.warning("image %s: %s", digest[:16], error)
            return b"", ""
        try:
            rows = image_bytes(self.encoder.encode(image))
        except Exception as error:  # one image must not end the thread, and its owner wait for nothing
            _log.error("image %s", digest[:16], exc_info=error)
            return b"", f"it could not be encoded: {error}"
        self.counts["images"] += 1
        self.counts["patches"] += image.geometry.patches
        self._seconds += time.monotonic() - began
        return rows, ""
