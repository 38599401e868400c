"""One link at the sender: what the receiver asks for is checked, then parts go out while its answers come in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from orchestrator.transfer import frames
from orchestrator.transfer.errors import LinkBroken
from orchestrator.transfer.link import Link
from orchestrator.transfer.offered import Offered, Outcome
from orchestrator.transfer.settings import Times

Find = Callable[[frames.Ask], "Offered | frames.Refused"]


class Serving:
    """Runs in a thread of its own, `run`, and another one that writes."""

    def __init__(self, link: Link, sender: bytes, find: Find, times: Times) -> None:
        self._link, self._sender, self._find, self._times = link, sender, find, times

    def run(self) -> None:
        """Until the handoff ends or the link does."""
        try:
            self._run()
        except OSError:  # also LinkBroken: the receiver dials again, or the lease ends
            pass
        finally:
            self._link.close()

    def _run(self) -> None:
        stall = self._times.silence
        got = self._link.receive(stall, _no_room, stall=stall)
        if got is None or not isinstance(got[0], frames.Ask):
            return
        ask = got[0]
        offered = self._find(ask)
        refused = self._bind(offered, ask) if isinstance(offered, Offered) else offered
        if refused is not None:
            self._link.send(refused, stall=stall)
            return
        assert isinstance(offered, Offered)
        self._link.send(frames.Welcome(self._sender), stall=stall)
        writer = threading.Thread(target=self._write, args=(offered, ask), name="transfer writer", daemon=True)
        writer.start()
        try:
            self._read(offered)
            if offered.link is self._link:
                self._drain()
        except LinkBroken:
            self._link.stop()
            raise
        finally:
            with offered.changed:
                offered.changed.notify_all()
            writer.join(2 * stall)  # where the handoff has ended it says so, and ends
            self._link.stop()
            writer.join(2 * stall)

    def _bind(self, offered: Offered, ask: frames.Ask) -> frames.Refused | frames.Closed | None:
        """Make this the link of the handoff, or say why not."""
        with offered.changed:
            if ask.epoch != offered.epoch:
                return frames.Refused("epoch", f"got epoch {ask.epoch}, the handoff's is {offered.epoch}")
            if offered.pull not in (b"", ask.pull):
                return frames.Refused("bound", "another receiver has this handoff")
            if offered.outcome is not None:
                return _ended(offered.outcome)
            if ask.sender and ask.sender != self._sender:
                return frames.Refused("restarted", "the first parts came from another sender")
            if not offered.taken <= ask.taken <= ask.next <= offered.count or not ask.pull or ask.window < 1:
                why = f"got taken {ask.taken} and next {ask.next}, held are {offered.taken} to {offered.count}"
                return frames.Refused("gone", why)
            offered.pull, offered.link, offered.heard = ask.pull, self._link, time.monotonic()
            offered.free(ask.taken)
            return None

    def _write(self, offered: Offered, ask: frames.Ask) -> None:
        """Parts in order as the window allows, their end, and how the handoff ended."""
        try:
            self._send_parts(offered, ask)
        except OSError:  # also LinkBroken: the thread that reads sees it too
            self._link.stop()

    def _send_parts(self, offered: Offered, ask: frames.Ask) -> None:
        number, told, said = ask.next, False, time.monotonic()
        stall, beat = self._times.silence, self._times.beat
        while True:
            message: frames.Any | None = None
            payload = b""
            with offered.changed:
                if offered.link is not self._link:
                    return
                if offered.outcome is not None:
                    message = _ended(offered.outcome)
                elif (part := offered.part(number, ask.window)) is not None:
                    message, payload = frames.Piece(number, part.name, part.crc), part.data
                    number += 1
                elif offered.finished and number == offered.count and not told:
                    message, told = frames.End(number), True
                elif (idle := time.monotonic() - said) < beat:
                    offered.changed.wait(beat - idle)
                    continue
                else:
                    message = frames.Alive()
            self._link.send(message, payload, stall=stall)
            said = time.monotonic()
            if isinstance(message, frames.Refused | frames.Closed):
                return

    def _read(self, offered: Offered) -> None:
        """Until the handoff ends, another link takes over, or the receiver is silent."""
        heard, silence = time.monotonic(), self._times.silence
        while offered.outcome is None and offered.link is self._link:
            got = self._link.receive(self._times.beat, _no_room, stall=silence)
            now = time.monotonic()
            if got is None:
                if now - heard > silence:
                    raise LinkBroken(f"no word from the receiver for {silence} s")
                continue
            heard = now
            with offered.changed:
                if offered.link is not self._link or offered.outcome is not None:
                    return
                offered.heard = now
                self._take(offered, got[0])

    def _drain(self) -> None:
        """Until the receiver has heard of the end: a socket that is closed with bytes unread would lose it."""
        until = time.monotonic() + self._times.silence
        while time.monotonic() < until:
            self._link.receive(self._times.beat, _no_room, stall=self._times.silence)

    def _take(self, offered: Offered, message: frames.Any) -> None:
        if isinstance(message, frames.Ack):
            if message.taken > offered.count:  # a lower one than before may come late, and says nothing new
                raise LinkBroken(f"taken: got {message.taken}, allowed are {offered.count} at most", "message")
            offered.free(message.taken)
        elif isinstance(message, frames.Verdict):
            whole = offered.finished and offered.taken == offered.count
            if message.good and not whole:
                raise LinkBroken("verdict: got good, with parts that were not taken", "message")
            offered.end(Outcome(message.good, "" if message.good else "cancelled", message.why))
        elif not isinstance(message, frames.Alive):
            raise LinkBroken(f"got {type(message).__name__}, which a receiver does not say here", "message")


def _no_room() -> int:
    return 0


def _ended(outcome: Outcome) -> frames.Refused | frames.Closed:
    if outcome.good:
        return frames.Closed()
    return frames.Refused(outcome.reason, outcome.why)
