"""The sender's side: handoffs that are offered, and the links over which receivers pull them."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time

from orchestrator.transfer import frames
from orchestrator.transfer.errors import LinkBroken, TransferFailed
from orchestrator.transfer.link import Link, Listener
from orchestrator.transfer.offered import Offered, Outcome
from orchestrator.transfer.serving import Serving
from orchestrator.transfer.settings import Limits, Times, check_handoff


class Sender:
    """Serves receivers by threads of its own until it is closed. Takes over the listener.

    Example:
        >>> with Sender(TcpListener("127.0.0.1", 0)) as sender:
        ...     offered = sender.offer(handoff, epoch)
        ...     for name, data in parts:
        ...         offered.put(name, data, timeout=10)
        ...     offered.finish()
        ...     offered.wait(timeout=10)
    """

    def __init__(self, listener: Listener, limits: Limits | None = None, times: Times | None = None) -> None:
        self._listener, self._limits, self._times = listener, limits or Limits(), times or Times()
        self._name = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._offers: dict[bytes, Offered] = {}
        self._links: dict[Link, threading.Thread] = {}
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="transfer sender", daemon=True)
        self._accepting.start()

    def offer(self, handoff: bytes, epoch: int) -> Offered:
        """Begin a handoff; its receiver may ask for it from now on, and has to within the lease.

        An ended one of a lower epoch gives way to it.

        Raises:
            ValueError: the handoff is here already, or was under this epoch or a higher one.
            TransferFailed: "busy", as many as allowed are here; "closed".
        """
        check_handoff(handoff, epoch)
        self._sweep()
        with self._lock:
            if self._closed:
                raise TransferFailed("closed", "the sender is closed")
            known = self._offers.get(handoff)
            if known is not None and (known.outcome is None or known.epoch >= epoch):
                raise ValueError(f"handoff: got {handoff.hex()[:16]} in epoch {epoch}, it is in {known.epoch} here")
            if sum(offered.outcome is None for offered in self._offers.values()) >= self._limits.handoffs:
                raise TransferFailed("busy", f"{self._limits.handoffs} handoffs are held, as many as allowed")
            ended = [key for key, offered in self._offers.items() if offered.outcome is not None]
            for key in ended[: max(0, len(ended) - 2 * self._limits.handoffs)]:
                del self._offers[key]  # the oldest
            self._offers.pop(handoff, None)
            offered = self._offers[handoff] = Offered(handoff, epoch, self._limits, self._times)
            return offered

    @property
    def held(self) -> int:
        """Bytes of all parts that are kept."""
        with self._lock:
            return sum(offered.held for offered in self._offers.values())

    def close(self) -> None:
        """End all handoffs and links; receivers are told where that is possible."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            offers, links = list(self._offers.values()), dict(self._links)
        for offered in offers:
            offered.end(Outcome(False, "closed", "the sender was closed"))
        self._listener.close()
        self._accepting.join(2 * self._times.silence)
        until = time.monotonic() + self._times.silence
        for link, thread in links.items():
            thread.join(max(0.0, until - time.monotonic()))
            with contextlib.suppress(OSError):
                link.stop()
        for thread in links.values():
            thread.join(2 * self._times.silence)

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                link = self._listener.accept(self._times.beat)
            except LinkBroken:
                return
            self._sweep()
            if link is not None:
                self._serve(link)

    def _serve(self, link: Link) -> None:
        with self._lock:
            if self._closed or len(self._links) >= self._limits.links:
                link.close()  # the receiver dials again until its lease ends
                return
            thread = threading.Thread(target=self._run, args=(link,), name="transfer link", daemon=True)
            self._links[link] = thread
        thread.start()

    def _run(self, link: Link) -> None:
        try:
            Serving(link, self._name, self._find, self._times).run()
        finally:
            with self._lock:
                self._links.pop(link, None)

    def _find(self, ask: frames.Ask) -> Offered | frames.Refused:
        with self._lock:
            offered = self._offers.get(ask.handoff)
        if offered is None:
            return frames.Refused("unknown", f"no handoff {ask.handoff.hex()[:16]} is here")
        return offered

    def _sweep(self) -> None:
        """End what has lost its lease, forget what has ended long ago."""
        with self._lock:
            offers = list(self._offers.items())
        now = time.monotonic()
        for handoff, offered in offers:
            if offered.check_lease() and now - offered.ended_at > self._times.tombstone:
                with self._lock:
                    if self._offers.get(handoff) is offered:
                        del self._offers[handoff]
