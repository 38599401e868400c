"""The clients of a run: they ask, read their streams, leave, and come again when a connection breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from orchestrator.balance.vision import patches
from orchestrator.cache.chain import usable_blocks
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.roles.messages import (
    ClientCancel,
    ClientRequest,
    Deliver,
    DeliverEnd,
    DeliverReady,
    Image,
    RequestSpec,
)
from orchestrator.simulate.queue import EventQueue
from orchestrator.simulate.store import SharedStore, Unavailable
from orchestrator.simulate.toy import model
from orchestrator.simulate.toy.reference import Reference
from orchestrator.simulate.toy.text import chain_of
from orchestrator.simulate.workload import Asked, digests_of, reference_of

PATCH = 14
MAY_FAIL = ("the router does not answer",)
"""Beginnings of reasons for which a request may fail: it was never accepted."""
_AGAIN = 30
"""Times that a client comes again at most."""


@dataclass
class Stream:
    """One connection of a client.

    Attributes:
        request: name under which it asks. got: tokens that came. state: "open", "left", or how it ended.
        entry, life: where it is connected. epoch: of the last tokens.
    """

    request: str
    asked: Asked
    reference: Reference
    entry: str
    life: int
    began: float
    tries: int = 0
    got: int = 0
    epoch: int = 0
    ready: bool = False
    state: str = "open"
    ended: float = 0.0


class Front(Protocol):
    """What clients reach: the entries."""

    def entries(self) -> list[tuple[str, int]]:
        """Entries that are up, with their incarnation."""

    def tell(self, entry: str, life: int, event: Any) -> None:
        """Hand an event to an entry, if it still lives that life."""


class Clients:
    """All clients.

    Args:
        wrong: called with an invariant's number and what is wrong.

    Attributes:
        streams: by name of request. outcomes: how streams ended. failures: reasons of failed ones.
        delivered: tokens that came in streams.
    """

    def __init__(
        self, queue: EventQueue, random: Random, front: Front, store: SharedStore, wrong: Callable[[int, str], None]
    ) -> None:
        self._queue, self._random, self._front, self._store, self._wrong = queue, random, front, store, wrong
        self.streams: dict[str, Stream] = {}
        self.open: dict[str, Stream] = {}
        self.coming = 0
        """Clients that will come again."""
        self.outcomes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.delivered = 0
        self.on: dict[type, Callable[[str, Any], None]] = {
            Deliver: self._deliver,
            DeliverReady: self._ready,
            DeliverEnd: self._end,
        }

    def ask(self, asked: Asked, tries: int = 0, reference: Reference | None = None) -> None:
        """Connect to some entry and ask; a client that finds none comes again."""
        entries = self._front.entries()
        if not entries:
            self._again(asked, tries, reference, 0.5 + self._random.random())
            return
        entry, life = self._random.choice(entries)
        request = f"{asked.request}~{tries}" if tries else asked.request
        now = self._queue.now
        stream = Stream(request, asked, reference or reference_of(asked), entry, life, now, tries)
        self.streams[request] = self.open[request] = stream
        event = ClientRequest(request, self._spec(asked))
        self._front.tell(entry, life, event)
        if asked.leaves is not None:
            self._queue.after(asked.leaves, self._leave, stream)
        if asked.asks_twice is not None:
            self._queue.after(asked.asks_twice, self._front.tell, entry, life, event)

    def leave(self, share: float) -> None:
        """So many of the open streams are left by their clients now."""
        for stream in list(self.open.values()):
            if self._random.random() < share:
                self._leave(stream)

    def broken(self, entry: str) -> None:
        """An entry died: its connections are broken, and those clients come again under new names."""
        for stream in [s for s in self.open.values() if s.entry == entry]:
            self._close(stream, "broken")
            self._again(stream.asked, stream.tries + 1, stream.reference, 0.2 + 2 * self._random.random())

    def _again(self, asked: Asked, tries: int, reference: Reference | None, delay: float) -> None:
        self.coming += 1
        self._queue.after(delay, self._ask_again, asked, tries, reference)

    def _ask_again(self, asked: Asked, tries: int, reference: Reference | None) -> None:
        self.coming -= 1
        self.ask(asked, tries, reference)

    def _spec(self, asked: Asked) -> RequestSpec:
        digests = digests_of(asked)
        chain = chain_of(asked.tenant, digests)
        keys = chain.extend(asked.prompt)[: usable_blocks(len(asked.prompt))]
        try:
            hit = self._store.match(keys) * BLOCK_TOKENS
        except Unavailable:
            hit = 0
        images = tuple(Image(digest, patches(*size, PATCH)) for digest, size in zip(digests, asked.images, strict=True))
        stop = b"" if asked.stop_after is None else b"%d" % asked.stop_after
        return RequestSpec(
            asked.prompt, asked.most, asked.seed, asked.tenant, hit, images, asked.grammar, asked.most, stop
        )

    def _leave(self, stream: Stream) -> None:
        if stream.state == "open":
            stream.state = "left"
            self._front.tell(stream.entry, stream.life, ClientCancel(stream.request))

    def _close(self, stream: Stream, state: str) -> None:
        self.open.pop(stream.request, None)
        stream.state, stream.ended = state, self._queue.now
        self.outcomes[state] += 1

    def _of(self, request: str, what: str, entry: str) -> Stream | None:
        stream = self.open.get(request)
        if stream is None:
            known = self.streams.get(request)
            state = known.state if known is not None else "unknown"
            if state != "broken":
                self._wrong(1, f"{request}: {what} came from {entry} when it was {state} already")
            return None
        if stream.entry != entry:
            self._wrong(1, f"{request}: {what} came from {entry}, but it was asked of {stream.entry}")
        return stream

    def _ready(self, entry: str, event: DeliverReady) -> None:
        stream = self._of(event.request, "usage", entry)
        if stream is None:
            return
        if stream.ready or stream.got:
            self._wrong(1, f"{event.request}: usage came again, or after tokens")
        if event.prompt_tokens != len(stream.asked.prompt) or not 0 <= event.cached_tokens < event.prompt_tokens:
            self._wrong(10, f"{event.request}: usage {event} for a prompt of {len(stream.asked.prompt)}")
        stream.ready = True

    def _deliver(self, entry: str, event: Deliver) -> None:
        stream = self._of(event.request, "tokens", entry)
        if stream is None:
            return
        if event.index != stream.got:
            self._wrong(1, f"{event.request}: index {event.index} came where {stream.got} was next")
        if not stream.ready:
            self._wrong(1, f"{event.request}: tokens came before usage")
        if event.epoch < stream.epoch:
            self._wrong(7, f"{event.request}: epoch {event.epoch} gave tokens after epoch {stream.epoch}")
        stream.epoch = event.epoch
        reference = stream.reference
        for number, token in enumerate(event.tokens, event.index):
            if number >= reference.length or token != reference.token(number):
                right = reference.token(number) if number < reference.length else "none"
                self._wrong(2, f"{event.request}: token {number} is {token}, the reference has {right}")
        stream.got += len(event.tokens)
        self.delivered += len(event.tokens)

    def _end(self, entry: str, event: DeliverEnd) -> None:
        stream = self._of(event.request, "an outcome", entry)
        if stream is None:
            return
        asked, left = stream.asked, stream.state == "left"
        if event.tokens != stream.got:
            self._wrong(10, f"{event.request}: {event.tokens} tokens are counted, {stream.got} came")
        if event.outcome == "finished":
            self._finished(stream, event)
        elif event.outcome == "cancelled" and not left:
            self._wrong(1, f"{event.request}: cancelled ({event.reason}), but its client is there")
        elif event.outcome == "rejected" and event.status == 400 and asked.can_run:
            self._wrong(1, f"{event.request}: refused for ever ({event.reason}), but it fits")
        self._close(stream, event.outcome)
        if event.outcome == "failed":
            self.failures[event.reason] += 1
            if not event.reason.startswith(MAY_FAIL):
                self._wrong(11, f"{event.request}: failed ({event.reason})")
        if not left and asked.can_run and stream.tries < _AGAIN:
            if event.outcome == "rejected":
                if event.retry_after < 1:
                    self._wrong(1, f"{event.request}: refused without a word on when to come again")
                self._again(asked, stream.tries + 1, stream.reference, float(event.retry_after))
            elif event.outcome == "failed":
                self._again(asked, stream.tries + 1, stream.reference, 1.0)

    def _finished(self, stream: Stream, event: DeliverEnd) -> None:
        if not stream.asked.can_run:
            self._wrong(1, f"{event.request}: it was answered, but cannot have been held")
        if stream.got != stream.reference.length:
            self._wrong(1, f"{event.request}: {stream.got} tokens of {stream.reference.length}, then {event.reason}")
        last = stream.reference.token(stream.got - 1)
        if event.reason != ("stop" if last == model.END else "length"):
            self._wrong(1, f"{event.request}: ended by {event.reason} behind token {last}")
