"""States on their way into an engine: fetched by threads, checked and taken in by the engine's own."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from orchestrator.engine.engine import Engine
from orchestrator.engine.handoff.handoffs import Handoffs
from orchestrator.engine.handoff.messages import Offer
from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.roles.engine_port import Expect, Load
from orchestrator.roles.messages import Key
from orchestrator.roles.state_parts import Kind, Manifest
from orchestrator.service.ports.departures import labels_of
from orchestrator.service.ports.doors import Doors
from orchestrator.service.ports.fetch import Fetch
from orchestrator.service.ports.tickets import Announced, Ticket, unpack, unpack_announced
from orchestrator.transfer import Limits, Times


class NotLoaded(Exception):
    """A state will not come in; nothing is held of it. `reason` is a word for a counter."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why if why.startswith(reason) else f"{reason}: {why}")
        self.reason = reason


@dataclass
class Loading:
    """A load whose parts have not all been seen. `announced`: by kind."""

    command: Load
    fetch: Fetch
    announced: dict[Kind, Announced]
    began: float


class Arrivals:
    """For the engine's thread, which never waits here.

    Args:
        patience: seconds that a load may take.

    Attributes:
        fetches, loads: by request and epoch. ending: fetches whose threads have a last word to say.
        counts: handoffs and bytes; failures by reason. seconds: from loads to their answers.
    """

    def __init__(
        self, engine: Engine, handoffs: Handoffs, doors: Doors, limits: Limits, times: Times, patience: float
    ) -> None:
        self._engine, self._handoffs, self._doors = engine, handoffs, doors
        self._limits, self._times, self._patience = limits, times, patience
        self.fetches: dict[Key, Fetch] = {}
        self.loads: dict[Key, Loading] = {}
        self.ending: list[Fetch] = []
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    def expect(self, c: Expect) -> None:
        """Begin to fetch."""
        key = (c.request, c.epoch)
        if key not in self.fetches:
            try:
                self.fetches[key] = self._fetch(unpack(c.ticket), c.epoch)
            except ValueError:
                self.counts["not fetched: ticket"] += 1  # `load` says why

    def load(self, c: Load, here: bytes) -> bool:
        """Have a state come in. Whether that is under way; not if it is `here`, by its handoff, already.

        Raises NotLoaded.
        """
        key = (c.request, c.epoch)
        try:
            ticket, announced = _announced(c)
            if here:
                if here != ticket.handoff:
                    raise NotLoaded("key", "another state of this request is here")
                return False
            if key in self.loads:
                return True  # the first one goes on
            fetch = self.fetches.get(key)
            if fetch is None or fetch.ticket != ticket or (fetch.failed and not fetch.size):
                self.stop(key)
                fetch = self.fetches[key] = self._fetch(ticket, c.epoch)
        except ValueError as error:
            self.stop(key)
            raise self._failed("ticket", str(error)) from None
        if fetch.complete:
            self.counts["bytes in ahead"] += fetch.size
        self.loads[key] = Loading(c, fetch, announced, time.monotonic())
        return True

    def arrived(self, key: Key, name: str) -> bytes | None:
        """The handoff of a state that runs by this name now; None while it is under way. Raises NotLoaded."""
        loading = self.loads[key]
        fetch, now = loading.fetch, time.monotonic()
        try:
            if fetch.complete:
                self._take_in(name, loading)
                self.seconds += time.monotonic() - loading.began
                self._end(self.fetches.pop(key), good=True)
                del self.loads[key]
                return fetch.ticket.handoff
            if fetch.failed is not None:
                raise self._failed(*fetch.failed)
            if now - loading.began > self._patience or now - max(loading.began, fetch.moved) > self._times.lease:
                raise self._failed("lease", f"{fetch.size} bytes have come, and then no more in time")
            return None
        except NotLoaded:
            self.stop(key)
            raise

    def stop(self, key: Key) -> None:
        """A state is not wanted any more; an unknown one is no error."""
        self.loads.pop(key, None)
        fetch = self.fetches.pop(key, None)
        if fetch is not None:
            self._end(fetch, good=False)

    def clear(self) -> None:
        for key in list(self.fetches):
            self.stop(key)
        self.loads.clear()

    def join(self, seconds: float) -> None:
        """Let the threads of what has ended say their last word."""
        until = time.monotonic() + seconds
        for fetch in self.ending:
            fetch.thread.join(max(0.0, until - time.monotonic()))

    def _fetch(self, ticket: Ticket, epoch: int) -> Fetch:
        """Raises ValueError."""
        if ticket.epoch != epoch:
            raise ValueError(f"ticket: got epoch {ticket.epoch}, allowed is {epoch}")
        return Fetch(self._doors.dial(ticket), ticket, self._limits, self._times)

    def _end(self, fetch: Fetch, *, good: bool) -> None:
        if good:
            fetch.conclude()
        else:
            fetch.stop()
        self.ending = [each for each in (*self.ending, fetch) if each.thread.is_alive()]

    def _failed(self, reason: str, why: str) -> NotLoaded:
        self.counts[f"not loaded: {reason}"] += 1
        return NotLoaded(reason, why)

    def _take_in(self, name: str, loading: Loading) -> None:
        c, fetch, coming = loading.command, loading.fetch, None
        try:
            self._check_kinds(fetch, loading.announced)
            coming = self._handoffs.reserve(*fetch.parts[0], name)
            _check_offer(coming.offer, c, fetch.ticket)
            for part in fetch.parts[1:]:
                coming.put(*part)
            coming.commit()
            _check_tokens(self._engine, name, c.spec.prompt, c.manifest)
        except HandoffRefused as error:
            self._engine.abort(name)  # its end is told of nobody
            raise self._failed(error.reason, str(error)) from None
        finally:
            if coming is not None:
                coming.cancel()
        self.counts["handoffs in"] += 1
        self.counts["bytes in"] += fetch.size

    def _check_kinds(self, fetch: Fetch, announced: dict[Kind, Announced]) -> None:
        """Raise HandoffRefused unless all that was announced has come, kind by kind, and no more."""
        came: dict[str, list[int]] = {}
        for name, data in fetch.parts:
            try:
                kind = came.setdefault(self._handoffs.kind(name), [0, 0])
            except ValueError as error:
                raise HandoffRefused("part", str(error)) from None
            kind[0], kind[1] = kind[0] + 1, kind[1] + len(data)
        said = {kind: [each.parts, each.size] for kind, each in announced.items()}
        if came != said:
            raise HandoffRefused("incomplete", f"parts: got {came}, announced were {said}")


def _announced(c: Load) -> tuple[Ticket, dict[Kind, Announced]]:
    """Raises ValueError unless all parts are of one ticket."""
    announced: dict[Kind, Announced] = {}
    for part, payload in zip(c.manifest.parts, c.parts, strict=True):
        if part.kind == "grammar":
            if payload != c.spec.grammar.encode():
                raise ValueError("grammar: got another one than the request's")
        elif payload:
            if part.kind in announced:
                raise ValueError(f"part: got {part.kind} twice")
            announced[part.kind] = unpack_announced(payload)
    tickets = {each.ticket for each in announced.values()}
    if len(tickets) != 1:
        raise ValueError(f"ticket: got {len(tickets)} different ones, allowed is one")
    return unpack(tickets.pop()), announced


def _check_offer(offer: Offer, c: Load, ticket: Ticket) -> None:
    """Raise HandoffRefused for a state of another request, epoch or ticket."""
    if offer.labels != labels_of(c, ticket):
        raise HandoffRefused("key", f"labels: got {offer.labels}, allowed are {labels_of(c, ticket)}")
    if offer.prompt_len != len(c.spec.prompt):
        raise HandoffRefused("state", f"prompt: got {offer.prompt_len} tokens, allowed are {len(c.spec.prompt)}")


def _check_tokens(engine: Engine, name: str, prompt: tuple[int, ...], manifest: Manifest) -> None:
    """Raise HandoffRefused unless the request that came is the one that was announced, token by token."""
    sequence = engine.find(name)
    if sequence is None or tuple(sequence.tokens) != prompt + manifest.output:
        raise HandoffRefused("state", "tokens: the state is of other tokens than the request")
