"""The door of an engine through which requests leave for other engines and come in from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import google_crc32c
import msgspec

from orchestrator.cache.block_object import Buffer
from orchestrator.engine.handoff.arrival import check_offer
from orchestrator.engine.handoff.identity import model_id, wire_tag
from orchestrator.engine.handoff.incoming import Incoming
from orchestrator.engine.handoff.messages import FORMS, Form, Listed, Offer, decode
from orchestrator.engine.handoff.outgoing import Outgoing
from orchestrator.engine.handoff.parts import (
    FORMAT,
    MANIFEST,
    OFFER,
    STATE,
    TOKENS,
    HandoffRefused,
    Part,
    handoff_of,
    open_part,
)
from orchestrator.model.batch import StepBatch

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine


class Handoffs:
    """One for an engine; everything but `Outgoing.take` belongs to the engine's thread, between steps.

    Args:
        name: what else the weights are named by, see `identity.model_id`; the same on both sides.

    Attributes:
        counts: handoffs by what became of them: "out" and "in", "kept" by a sender and "cancelled" by a receiver; and
            refusals by their reason.
        model, layout: 32 bytes each that an offer has to carry.

    Example:
        >>> leaving = Handoffs(first).begin("r1")
        >>> leaving.close()
        >>> parts = leaving.take()
        >>> coming = Handoffs(second).reserve(*parts[0])
        >>> for name, data in parts[1:]:
        ...     coming.put(name, data)
        >>> coming.commit(), leaving.done()
    """

    def __init__(self, engine: Engine, name: bytes = b"") -> None:
        self.engine, self.counts = engine, Counter[str]()
        self.model, self.layout = model_id(engine.model, name), wire_tag(engine.cache)
        self._leaving: dict[str, Outgoing] = {}
        self._coming: dict[bytes, Incoming] = {}
        if not engine.cache.rings.is_cuda:  # there, reading rows in the midst of a step would wait for it
            engine.cache.wrote = self._wrote

    def begin(self, request_id: str, form: Form = "full", labels: Mapping[str, str] | None = None) -> Outgoing:
        """Start to hand a request on; see `Outgoing`.

        A request that was added without `leaves_at` stops now. `labels` travel with the offer.

        Raises:
            ValueError: unknown id or form; a form that the request cannot take; it is on its way already.
        """
        if form not in FORMS:
            raise ValueError(f"form: got {form!r}, allowed are {', '.join(map(repr, FORMS))}")
        sequence = self.engine.find(request_id)
        if sequence is None:
            raise ValueError(f"request_id: got {request_id!r}, allowed is a request that has not ended")
        if request_id in self._leaving and self._leaving[request_id].alive:
            raise ValueError(f"request_id: got {request_id!r}, which is on its way already")
        if sequence.recorder is not None:
            raise ValueError(f"request_id: got {request_id!r}, whose forward passes are recorded here")
        if sequence.params.prompt_logprobs and form == "replay":
            raise ValueError("form: got 'replay', allowed are 'full' and 'tokens' with prompt_logprobs")
        if sequence.leaves_at == 0 and form == "full":
            raise ValueError("form: got 'full', allowed are 'replay' and 'tokens' for a request without decoder rows")
        leaving = Outgoing(self.engine, sequence, form, self.model, self.layout, dict(labels or {}), self.counts)
        self._leaving = {key: going for key, going in self._leaving.items() if going.alive}
        self._leaving[request_id] = leaving
        return leaving

    def reserve(self, name: str, data: Buffer, request_id: str | None = None, *, share: bool = False) -> Incoming:
        """Make room for a request by its offer, the first part of a handoff; see `Incoming`.

        It gets another id here where one is given. With `share` the prefix cache is asked which blocks it has: the
        sender has to skip them (`Incoming.have`, `Outgoing.skip`).

        Raises:
            HandoffRefused: it is no offer, or one for another model or layout, or the request cannot come in.
        """
        data = bytes(data)
        try:
            handoff = handoff_of(data)
            offer = decode(open_part(FORMAT, handoff, 0, name, data), Offer)
            if name != OFFER or offer.handoff != handoff:
                raise HandoffRefused("part", f"part: got {name!r}, allowed is {OFFER!r}")
            if request_id is not None:
                offer = msgspec.structs.replace(offer, request_id=request_id)
            check_offer(self.engine, offer, self.model, self.layout)
            if any(c.open and c.offer.request_id == offer.request_id for c in self._coming.values()):
                raise HandoffRefused("id", f"request_id: got {offer.request_id!r}, which is on its way already")
            listed = Listed(name, len(data), google_crc32c.value(data))
            coming = Incoming(self.engine, offer, listed, self.counts, share=share)
        except HandoffRefused as error:
            self.counts[error.reason] += 1
            raise
        self._coming = {key: c for key, c in self._coming.items() if c.open}
        self._coming[handoff] = coming
        return coming

    def give(self, request_id: str, form: Form = "full", labels: Mapping[str, str] | None = None) -> list[Part]:
        """All parts of a request that stops now. `conclude` ends it."""
        leaving = self.begin(request_id, form, labels)
        leaving.close()
        return leaving.take()

    def conclude(self, request_id: str, *, taken: bool) -> bool:
        """End the handoff of a request: free it here, or let it go on here.

        False, with nothing to do, if the request had ended before or is not on its way.
        """
        leaving = self._leaving.pop(request_id, None)
        if leaving is None:
            return False
        return leaving.done() if taken else leaving.cancel()

    def take(self, parts: Iterable[tuple[str, Buffer]], request_id: str | None = None) -> str:
        """Have a request run here by all its parts in order; returns its id, which is `request_id` where one is given.

        Raises HandoffRefused, with the engine as it was and no room taken.
        """
        coming: Incoming | None = None
        try:
            for name, data in parts:
                if coming is None:
                    coming = self.reserve(name, data, request_id)
                else:
                    coming.put(name, data)
            if coming is None:
                self.counts["incomplete"] += 1
                raise HandoffRefused("incomplete", "parts: got none")
            return coming.commit()
        finally:
            if coming is not None:
                coming.cancel()

    def due(self) -> list[Outgoing]:
        """Handoffs whose request has stopped, so that `close` is due."""
        return [leaving for leaving in self._leaving.values() if leaving.due]

    def kind(self, name: str) -> str:
        """Which kind of a request's state a part holds.

        "global", "window", "drafter" (draft stages' windows), "tail", "lookback" (tokens and images), or "sampler" for
        all else. Raises ValueError for a name of no part.
        """
        head, *rest = name.split("/")
        kinds = {
            "rows": "global",
            "image": "lookback",
            "tail": "tail",
            TOKENS: "lookback",
            **dict.fromkeys((OFFER, STATE, MANIFEST), "sampler"),
        }
        if head == "window" and rest and rest[0].isdecimal():
            return "window" if int(rest[0]) < self.engine.model.config.num_hidden_layers else "drafter"
        if head not in kinds:
            raise ValueError(f"name: got {name!r}, allowed are names of parts")
        return kinds[head]

    def _wrote(self, layer: int, batch: StepBatch) -> None:
        if not batch.chunks:  # overlapped decoding, perhaps by another thread
            return
        for leaving in self._leaving.values():
            leaving.wrote(layer, batch)
