"""The receiver's side: one handoff is pulled over as many links as that takes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator

from orchestrator.transfer import frames
from orchestrator.transfer.errors import REASONS, LinkBroken, TransferFailed
from orchestrator.transfer.inbox import Inbox
from orchestrator.transfer.link import Dial, Link
from orchestrator.transfer.settings import Limits, Times, check_handoff, check_timeout, short


class Receiver:
    """Pulls handoffs of one sender.

    Args:
        dial: makes a link to it; `TcpListener`, `SharedListener` and `LocalListener` each have one.

    Example:
        >>> with Receiver(dial).pull(handoff, epoch) as pull:
        ...     for name, data in pull.parts(timeout=10):
        ...         coming.put(name, data)
        ...     pull.done(timeout=10)
    """

    def __init__(self, dial: Dial, limits: Limits | None = None, times: Times | None = None) -> None:
        self._dial, self._limits, self._times = dial, limits or Limits(), times or Times()

    def pull(self, handoff: bytes, epoch: int) -> Pull:
        """Begin to pull; parts come by a thread of its own, `Limits.window` bytes ahead of the owner at most."""
        check_handoff(handoff, epoch)
        return Pull(self._dial, handoff, epoch, self._limits, self._times)


class Pull:
    """One handoff on its way in. `take`, `parts`, `done` and `close` belong to its owner."""

    def __init__(self, dial: Dial, handoff: bytes, epoch: int, limits: Limits, times: Times) -> None:
        self._dial, self._handoff, self._epoch, self._limits, self._times = dial, handoff, epoch, limits, times
        self._pull, self._sender = secrets.token_bytes(16), b""
        self._inbox = Inbox(limits)
        self._link: Link | None = None
        self._verdict: frames.Verdict | None = None
        self._stopped = threading.Event()
        self._heard = time.monotonic()
        self._broken = 0
        self._thread = threading.Thread(target=self._run, name="transfer receiver", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Bytes that have come and were not taken."""
        return self._inbox.waiting

    def take(self, *, timeout: float) -> tuple[str, bytes] | None:
        """The next part, whole and once; None behind the last.

        Raises:
            TimeoutError: none came by then; it may come still.
            TransferFailed: it will not come.
        """
        check_timeout(timeout)
        if self._stopped.is_set():
            raise TransferFailed("closed", "the pull was closed")
        part = self._inbox.take(timeout)
        if part is not None:
            self._say(frames.Ack(self._inbox.taken))
        return part

    def parts(self, *, timeout: float) -> Iterator[tuple[str, bytes]]:
        """All parts, each within `timeout`. Raises as `take`."""
        while (part := self.take(timeout=timeout)) is not None:
            yield part

    def done(self, *, timeout: float, good: bool = True, why: str = "") -> None:
        """Tell the sender that all is in use, or (`good=False`) that nothing will be; it then frees what it holds.

        Raises:
            ValueError: good, with parts that were not taken.
            TimeoutError: the sender has not answered by then. It may know or not; its lease frees what it holds.
            TransferFailed: the sender has given the handoff up before.
        """
        check_timeout(timeout)
        with self._inbox.changed:
            if good and self._inbox.taken != self._inbox.end:
                raise ValueError(f"good: got True after {self._inbox.taken} parts, allowed is False before the last")
            if self._verdict is not None and self._verdict.good != good:
                raise ValueError(f"good: got {good}, it was {self._verdict.good} before")
            self._verdict = self._verdict or frames.Verdict(good, short(why))
        self._say(self._verdict)
        if not self._inbox.wait_over(timeout):
            raise TimeoutError(f"done: the sender has not answered within {timeout} s")
        if good and not self._inbox.concluded and self._inbox.failed is not None:
            raise self._inbox.failed

    def close(self) -> None:
        """Stop and free what has come. The sender is told, if it can be, when no verdict was given."""
        if self._stopped.is_set():
            return
        if self._verdict is None:
            self._verdict = frames.Verdict(False, "the receiver was closed")
            if self._link is not None:
                self._say(self._verdict)
                self._inbox.wait_over(self._times.silence)
        self._stopped.set()
        self._inbox.fail(TransferFailed("closed", "the pull was closed"))
        link = self._link
        if link is not None:
            link.stop()
        self._thread.join(self._times.dial + 2 * self._times.silence)
        self._inbox.clear()

    def __enter__(self) -> Pull:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # The thread

    def _run(self) -> None:
        cause = LinkBroken("nobody answered")
        try:
            while not self._over:
                try:
                    self._pull_over(self._dial(self._times.dial))
                except LinkBroken as error:
                    cause = error
                    self._count(error)
                except OSError as error:
                    cause = LinkBroken(str(error))
                if time.monotonic() - self._heard > self._times.lease:
                    why = f"no word from the sender for {self._times.lease} s, at last: {cause}"
                    self._inbox.fail(TransferFailed("lease", why))
                if not self._over:
                    self._stopped.wait(self._times.backoff)
        except TransferFailed as error:
            self._inbox.fail(error)
        except Exception as error:  # a thread's error would be lost, and its owner wait for nothing
            self._inbox.fail(TransferFailed("message", f"{type(error).__name__}: {error}"))

    @property
    def _over(self) -> bool:
        return self._stopped.is_set() or self._inbox.failed is not None or self._inbox.concluded

    def _count(self, error: LinkBroken) -> None:
        """Links that break for what came over them may do so a few times without a new part."""
        if error.reason in ("checksum", "size", "message"):
            self._broken += 1
            if self._broken >= self._times.tries:
                raise TransferFailed(error.reason, f"{self._broken} times one after the other, at last: {error}")

    def _pull_over(self, link: Link) -> None:
        try:
            inbox, stall = self._inbox, self._times.silence
            with inbox.changed:
                taken, number = inbox.taken, inbox.next
            window = self._limits.window
            ask = frames.Ask(self._handoff, self._epoch, self._pull, self._sender, taken, number, window)
            link.send(ask, stall=stall)
            got = link.receive(stall, _none, stall=stall)
            if got is None:
                raise LinkBroken(f"no answer for {stall} s")
            self._welcome(got[0])
            self._link = link
            if taken != inbox.taken:  # by the owner, before it could see this link
                link.send(frames.Ack(inbox.taken), stall=stall)
            if self._verdict is not None:
                link.send(self._verdict, stall=stall)
            self._read(link)
        finally:
            self._link = None
            link.stop()
            link.close()

    def _welcome(self, message: frames.Any) -> None:
        if isinstance(message, frames.Welcome):
            if self._sender and message.sender != self._sender:
                raise TransferFailed("restarted", "the first parts came from another sender")
            self._sender, self._heard = message.sender, time.monotonic()
        else:
            self._hear(message)
            if not self._over:
                raise LinkBroken(f"got {type(message).__name__}, allowed is Welcome first", "message")

    def _read(self, link: Link) -> None:
        times = self._times
        said = self._heard

        def say_so() -> None:
            nonlocal said
            if time.monotonic() - said >= times.beat:
                link.send(frames.Alive(), stall=times.silence)
                said = time.monotonic()

        def tick() -> None:  # a large part over a slow link: neither side may take the other one for dead
            self._heard = time.monotonic()
            say_so()

        while not self._over:
            got = link.receive(times.beat, self._inbox.room, stall=times.silence, tick=tick)
            if got is not None:
                self._heard = time.monotonic()
                message, payload = got
                if isinstance(message, frames.Piece):
                    self._inbox.add(message, payload)
                    self._broken = 0
                else:
                    self._hear(message)
            elif time.monotonic() - self._heard > times.silence:
                raise LinkBroken(f"no word from the sender for {times.silence} s")
            say_so()

    def _hear(self, message: frames.Any) -> None:
        if isinstance(message, frames.Refused):
            reason = message.reason if message.reason in REASONS else "message"
            raise TransferFailed(reason, message.why)
        if isinstance(message, frames.Closed):
            if self._verdict is None:
                raise TransferFailed("ended", "the handoff was concluded before")
            self._inbox.conclude()
        elif isinstance(message, frames.End):
            self._inbox.close(message.count)
        elif not isinstance(message, frames.Alive):
            raise LinkBroken(f"got {type(message).__name__}, which a sender does not say here", "message")

    def _say(self, message: frames.Any) -> None:
        """Over the link of the moment; the next one begins with what was to be said."""
        link = self._link
        if link is not None:
            try:
                link.send(message, stall=self._times.silence)
            except OSError:
                link.stop()  # so that the thread dials again


def _none() -> int:
    return 0
