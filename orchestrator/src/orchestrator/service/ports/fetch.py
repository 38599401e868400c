"""One state on its way in, pulled by a thread into memory until the engine takes it."""

from __future__ import annotations

import threading
import time
from typing import Literal

from orchestrator.service.ports.tickets import Ticket
from orchestrator.transfer import Limits, Receiver, Times, TransferFailed
from orchestrator.transfer.link import Dial

_LOOK = 0.2  # seconds between two looks whether it is wanted still

Verdict = Literal["", "good", "bad"]


class Fetch:
    """Parts are kept until `stop` or `conclude`; `Limits.total` bounds their bytes.

    Attributes:
        ticket: of what is fetched. parts: (name, bytes) in order. size: their bytes. moved: clock of the last one.
        complete: all have come, `ended_at`. failed: reason and text, if they will not.
    """

    def __init__(self, dial: Dial, ticket: Ticket, limits: Limits, times: Times) -> None:
        self.ticket, self.parts, self.size = ticket, list[tuple[str, bytes]](), 0
        self.complete = False
        self.failed: tuple[str, str] | None = None
        self.began = self.moved = time.monotonic()
        self.ended_at = 0.0
        self._receiver, self._times = Receiver(dial, limits, times), times
        self._verdict: Verdict = ""
        self._decided = threading.Event()
        self.thread = threading.Thread(target=self._run, name="handoff fetch", daemon=True)
        self.thread.start()

    def conclude(self) -> None:
        """All is in use: tell the sender, without waiting for it here."""
        self._decide("good")

    def stop(self) -> None:
        """It is not wanted any more: free what has come, tell the sender."""
        self._decide("bad")

    def _decide(self, verdict: Verdict) -> None:
        self._verdict = self._verdict or verdict
        self.parts = []
        self._decided.set()

    def _run(self) -> None:
        try:
            with self._receiver.pull(self.ticket.handoff, self.ticket.epoch) as pull:
                while not self._decided.is_set():
                    try:
                        part = pull.take(timeout=_LOOK)
                    except TimeoutError:
                        continue
                    if part is None:
                        self.ended_at = time.monotonic()
                        self.complete = True
                        break
                    self.moved = time.monotonic()
                    self.size += len(part[1])
                    self.parts.append(part)
                while not self._decided.wait(self._times.lease):
                    pass  # the owner's own leases end this; the sender holds nothing but names by now
                if self._verdict == "good":
                    pull.done(timeout=self._times.lease)
        except TimeoutError:
            pass  # a sender that is gone has nothing to free
        except TransferFailed as error:
            if not self._verdict:
                self.failed = (error.reason, str(error))
        except Exception as error:  # a thread's error would be lost, and its owner wait for nothing
            self.failed = ("message", f"{type(error).__name__}: {error}")
        if self._verdict:
            self.parts = []
