"""One request on its way into an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import google_crc32c

from orchestrator.cache.block_object import Buffer
from orchestrator.engine.grammar import Matcher
from orchestrator.engine.handoff.arrival import arrive, check_state
from orchestrator.engine.handoff.messages import Listed, Manifest, Offer, State, decode
from orchestrator.engine.handoff.parts import (
    MANIFEST,
    OFFER,
    STATE,
    TOKENS,
    HandoffRefused,
    numbers_of,
    open_part,
)
from orchestrator.engine.handoff.pictures import picture_bytes
from orchestrator.engine.handoff.room import Room, check_size
from orchestrator.engine.handoff.token_bytes import unpack_tokens
from orchestrator.engine.scheduler import blocks_for
from orchestrator.model.config import BLOCK_TOKENS

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine


class Incoming:
    """Room for one request, filled part by part. All methods belong to the engine's thread.

    No request of the engine notices anything before `commit`; until then `cancel` gives the room back. Whoever owns it
    calls one of the two, also when the sender is heard of no more.

    Attributes:
        offer: what the sender said.
    """

    def __init__(self, engine: Engine, offer: Offer, listed: Listed, counts: Counter[str], *, share: bool) -> None:
        """`listed` is the offer's own part; with `share` blocks that are here are used.

        Raises HandoffRefused if the request cannot come in, with nothing taken.
        """
        self._engine, self.offer, self._counts = engine, offer, counts
        self._listed = [listed]
        self._tokens: list[int] | None = None
        self._state: State | None = None
        self._manifest: Manifest | None = None
        self._images: list[bytes] = []
        self._seen: set[str] = set()
        self._open = True
        self._room = None if offer.form == "tokens" else Room(engine, offer, share=share)
        self._kinds: dict[str, Callable[[str, bytes], None]] = {
            "rows": self._take_rows, "window": self._take_window, "tail": self._take_tail, "image": self._take_image,
            TOKENS: self._take_tokens, STATE: self._take_state, MANIFEST: self._take_manifest,
        }  # fmt: skip

    @property
    def have(self) -> int:
        """First full blocks that are here already, and must not be sent (`Outgoing.skip`)."""
        return 0 if self._room is None else self._room.have

    @property
    def open(self) -> bool:
        """Whether neither `commit` nor `cancel` has ended it."""
        return self._open

    @property
    def complete(self) -> bool:
        """Whether the last part has come."""
        return self._manifest is not None

    @property
    def received(self) -> int:
        """Parts that have been taken, the offer among them; the number that the next one must have."""
        return len(self._listed)

    def put(self, name: str, data: Buffer) -> None:
        """Take the next part.

        Raises HandoffRefused for one that is not the next, or not what it should be; the next one is still awaited.
        """
        with self._counted():
            self._check_open()
            self._put(name, bytes(data))

    def _put(self, name: str, data: bytes) -> None:
        if self._manifest is not None or name == OFFER:
            raise HandoffRefused("order", f"part {name!r}: got it behind {'the offer' if name == OFFER else MANIFEST}")
        payload = open_part(self.offer.layout, self.offer.handoff, len(self._listed), name, data)
        take = self._kinds.get(name.split("/")[0])
        if take is None or name in self._seen:
            raise self._none_of_these(name)
        take(name, payload)
        self._seen.add(name)
        self._listed.append(Listed(name, len(data), google_crc32c.value(data)))

    def commit(self, matcher: Matcher | None = None) -> str:
        """Have the request run here; returns its id. Its first event here follows the last one at the sender.

        `matcher` is what `Engine.compile` gave for it, if it was called already. Raises HandoffRefused, with the engine
        as it was, if parts are missing or contradict each other; `cancel` is due then.
        """
        with self._counted():
            self._check_open()
            self._check_complete()
            return self._commit(matcher)

    def _commit(self, matcher: Matcher | None) -> str:
        assert self._tokens is not None and self._state is not None
        sequence = arrive(self._engine, self.offer, self._state, self._tokens, self._images, matcher)
        self._open = False
        self._counts["in"] += 1
        engine = self._engine
        if self._room is None:
            engine.enter(sequence)
            engine.scheduler.add(sequence)
            engine.end_if_ended(sequence)
            return sequence.request_id
        self._room.hand_to(sequence, self._state.written)
        engine.enter(sequence)
        engine.scheduler.rejoin(sequence)
        if engine.speculator is not None and engine.lockstep is None and self._state.drafts:
            engine.speculator.join(sequence)
            sequence.stale = self._state.stale
        return sequence.request_id

    def cancel(self) -> None:
        """Give the room back. Idempotent; without effect behind `commit`."""
        if not self._open:
            return
        self._open = False
        self._counts["cancelled"] += 1
        if self._room is not None:
            self._room.give_back()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except HandoffRefused as error:
            self._counts[error.reason] += 1
            raise

    # Parts

    def _take_rows(self, name: str, payload: bytes) -> None:
        layer, first, count = numbers_of(name, "rows", 3)
        if self._room is None or layer not in self._engine.cache.pools or count < 1:
            raise self._none_of_these(name)
        self._room.put_rows(name, layer, first, payload, count)

    def _take_window(self, name: str, payload: bytes) -> None:
        (layer,) = numbers_of(name, "window", 1)
        if self._room is None or self.offer.form != "full" or layer >= self._layers:
            raise self._none_of_these(name)
        self._room.put_window(name, layer, payload)

    def _take_tail(self, name: str, payload: bytes) -> None:
        (layer,) = numbers_of(name, "tail", 1)
        if self._room is None or self.offer.form != "full" or layer not in self._engine.cache.tails:
            raise self._none_of_these(name)
        self._room.put_tail(name, layer, payload)

    def _take_image(self, name: str, payload: bytes) -> None:
        (number,) = numbers_of(name, "image", 1)
        pictures = self.offer.pictures
        if number >= len(pictures):
            raise HandoffRefused("part", f"part: got {name!r}, allowed are those of {len(pictures)} images")
        if number != len(self._images):
            raise HandoffRefused("order", f"part {name!r}: allowed is image {len(self._images)}, the next one")
        check_size(name, payload, picture_bytes(pictures[number], self._engine.model.config))
        self._images.append(payload)

    def _take_tokens(self, name: str, payload: bytes) -> None:
        tokens = unpack_tokens(payload, self._engine.model.config.vocab_size)
        most = self.offer.max_total - 1 if self.offer.form != "tokens" else self.offer.max_total
        if not self.offer.prompt_len <= len(tokens) <= most:
            allowed = f"{self.offer.prompt_len} to {most}"
            raise HandoffRefused("state", f"tokens: got {len(tokens)}, allowed are {allowed}")
        self._tokens = tokens

    def _take_state(self, name: str, payload: bytes) -> None:
        if self._tokens is None:
            raise HandoffRefused("order", "part 'state': got it before the tokens")
        state = decode(payload, State)
        check_state(self._engine, self.offer, state, len(self._tokens))
        if self.have * BLOCK_TOKENS > state.written:  # it would write into shared blocks
            sent = f"rows of {state.written} tokens"
            raise HandoffRefused(
                "incomplete", f"part 'state': got {sent}, allowed are those of {self.have} blocks or more"
            )
        self._state = state

    def _take_manifest(self, name: str, payload: bytes) -> None:
        manifest = decode(payload, Manifest)
        if manifest.parts != self._listed:
            raise HandoffRefused("incomplete", "part 'manifest': lists other parts than those that came")
        self._manifest = manifest
        try:
            self._check_complete()
        except HandoffRefused:
            self._manifest = None
            raise

    @property
    def _layers(self) -> int:
        return self._engine.model.config.num_hidden_layers + self.offer.draft_stages

    def _none_of_these(self, name: str) -> HandoffRefused:
        return HandoffRefused("part", f"part: got {name!r}, which is none of a {self.offer.form} handoff")

    def _check_open(self) -> None:
        if not self._open:
            raise HandoffRefused("ended", f"request {self.offer.request_id!r}: this handoff was committed or cancelled")

    def _check_complete(self) -> None:
        missing = [kind for kind, there in (
            (TOKENS, self._tokens), (STATE, self._state), (MANIFEST, self._manifest)
        ) if there is None]  # fmt: skip
        if self._state is not None and self._room is not None:
            blocks = blocks_for(self._state.written)
            missing += [f"rows/{layer}" for layer, filled in self._room.filled.items() if filled != blocks]
        if self.offer.form == "full":
            missing += [f"window/{n}" for n in range(self._layers) if f"window/{n}" not in self._seen]
            missing += [f"tail/{n}" for n in self._engine.cache.tails if f"tail/{n}" not in self._seen]
        missing += [f"image/{n}" for n in range(len(self._images), len(self.offer.pictures))]
        if missing:
            raise HandoffRefused("incomplete", f"parts: {', '.join(missing)} did not come whole")
