"""One request on its way out of an engine."""

from __future__ import annotations

import secrets
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

import google_crc32c

from orchestrator.engine.handoff.messages import Form, Listed, Manifest, Offer, Picture, State, encode
from orchestrator.engine.handoff.parts import (
    FORMAT,
    MANIFEST,
    OFFER,
    STATE,
    TOKENS,
    HandoffRefused,
    Part,
    image_part,
    rows_part,
    seal_part,
    tail_part,
    window_part,
)
from orchestrator.engine.handoff.pictures import image_bytes
from orchestrator.engine.handoff.replay import begin_replay
from orchestrator.engine.handoff.rows import read_blocks, read_rings, read_tail
from orchestrator.engine.handoff.token_bytes import pack_tokens
from orchestrator.engine.scheduler import blocks_for
from orchestrator.engine.sequence import Sequence
from orchestrator.engine.sequence import State as Stage
from orchestrator.model.batch import StepBatch
from orchestrator.model.config import BLOCK_TOKENS

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine

BLOCKS_A_PART = 32
_LARGEST = 1 << 62  # of an integer that travels


class Outgoing:
    """Parts of a request, in the order in which they have to arrive; the first one is the offer.

    Without `leaves_at` the request stops at once. With it, it goes on until it is time, and the blocks that are full by
    then can go ahead: between steps, and on a CPU also in the midst of one, layer after layer. All methods belong to
    the engine's thread; `take` may be called from any.

    Attributes:
        request_id, form, handoff: `handoff` is 32 random bytes, which all parts carry.
        sent: bytes of the parts so far, headers included, by kind of part.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: Sequence,
        form: Form,
        model: bytes,
        layout: bytes,
        labels: dict[str, str],
        counts: Counter[str],
    ) -> None:
        self.request_id, self.form, self.handoff = sequence.request_id, form, secrets.token_bytes(32)
        self.sent: Counter[str] = Counter()
        self._engine, self._sequence, self._tag, self._counts = engine, sequence, layout, counts
        self._parts: deque[Part] = deque()
        self._listed: list[Listed] = []
        self._blocks = dict.fromkeys(() if form == "tokens" else engine.cache.pools, 0)
        self._closed = self._ended = False
        if sequence.leaves_at is None:
            self._stop()
        self._put(OFFER, encode(self._offer(model, labels)))

    @property
    def alive(self) -> bool:
        """Whether the engine still has the request, and it has not been given away."""
        return not self._ended and self._sequence.state is not Stage.FINISHED

    @property
    def due(self) -> bool:
        """Whether the request has stopped, so that `close` is due."""
        return self.alive and self._sequence.state is Stage.LEAVING

    def take(self) -> list[Part]:
        """Parts that were collected and not taken yet. From any thread."""
        parts = []
        while self._parts:
            parts.append(self._parts.popleft())
        return parts

    def skip(self, blocks: int) -> None:
        """Leave the first full blocks out, which the receiver has (`Incoming.have`). Before any rows are collected."""
        known = self._known_full()
        if not 0 <= blocks <= known or self._listed[1:]:
            raise ValueError(f"blocks: got {blocks}, allowed are 0 to {known} before other parts than the offer")
        self._blocks = dict.fromkeys(self._blocks, blocks)

    def collect(self) -> None:
        """Make parts of the blocks that are full by now. Between steps; raises HandoffRefused if the request ended."""
        self._check_alive()
        if not self._closed and self._sequence.state is not Stage.WAITING:
            for layer in self._blocks:
                self._rows(layer, self._sequence.held // BLOCK_TOKENS, self._sequence.held)

    def wrote(self, layer: int, batch: StepBatch) -> None:
        """In the midst of a step: a layer's rows are there, while layers above it are still to be computed."""
        sequence = self._sequence
        if self._closed or layer not in self._blocks or sequence.state is not Stage.RUNNING:
            return
        end = next((chunk.end for chunk in batch.chunks if chunk.slot == sequence.slot), 0)
        end = min(end, len(sequence.tokens))  # rows of drafts may be written again
        self._rows(layer, end // BLOCK_TOKENS, end)

    def close(self) -> None:
        """Stop the request, if it still runs, and make parts of all that is left. It waits here for `done` or `cancel`.

        Raises HandoffRefused if the request has ended.
        """
        self._check_alive()
        if self._closed:
            return
        self._stop()
        sequence, cache = self._sequence, self._engine.cache
        for layer in self._blocks:
            self._rows(layer, blocks_for(sequence.held), sequence.held)
        if self.form == "full":
            for layer, ring in enumerate(read_rings(cache, sequence)):
                self._put(window_part(layer), ring)
            for layer in cache.tails:
                self._put(tail_part(layer), read_tail(cache, sequence, layer))
        for number, image in enumerate(sequence.images):
            self._put(image_part(number), image_bytes(image.rows))
        self._put(TOKENS, pack_tokens(sequence.tokens))
        self._put(STATE, encode(self._state()))
        self._put(MANIFEST, encode(Manifest(list(self._listed))))
        self._closed = True

    def done(self) -> bool:
        """The receiver has it: free all that it held here. False if it had ended before, by an abort for instance."""
        if not self._closed and self.alive:
            raise ValueError(f"request_id: got {self.request_id!r} before close, allowed is a request that was closed")
        alive, self._ended = self.alive, True
        if alive:
            self._engine.depart(self._sequence)
            self._counts["out"] += 1
        return alive

    def cancel(self) -> bool:
        """The handoff is off: the request goes on here. False if it had ended before. Idempotent."""
        alive, self._ended = self.alive, True
        sequence, engine = self._sequence, self._engine
        if not alive:
            return False
        self._counts["kept"] += 1
        if engine.pipeline is not None:
            engine.pipeline.drain()
        if sequence.leaves_at == 0 and sequence.computed > sequence.decoder_lower:  # no decoder layer has run
            begin_replay(sequence, sequence.held, engine.model.config, engine.prefix)
        engine.stay(sequence)
        if sequence.state is Stage.LEAVING:
            sequence.drafts = []  # an overlapped step may have drafted anew, behind tokens that were dropped
            engine.scheduler.rejoin(sequence)
        return True

    # Parts

    def _stop(self) -> None:
        engine, sequence = self._engine, self._sequence
        if engine.pipeline is not None:  # so that the host knows all that was computed
            engine.pipeline.drain()
        self._check_alive()
        if sequence.state is Stage.WAITING and self.form != "tokens":
            raise ValueError(
                f"form: got {self.form!r} for {self.request_id!r}, which has computed nothing, allowed is 'tokens' then"
            )
        if sequence.state is not Stage.LEAVING:
            engine.scheduler.hold(sequence)

    def _check_alive(self) -> None:
        if not self.alive:
            raise HandoffRefused("ended", f"request {self.request_id!r} has ended, or was given away")

    def _rows(self, layer: int, full: int, tokens: int) -> None:
        """Parts of a layer's blocks before block number `full` that were not collected yet."""
        while self._blocks[layer] < full:
            first = self._blocks[layer]
            count = min(BLOCKS_A_PART, full - first)
            payload = read_blocks(self._engine.cache, self._sequence, layer, first, count, tokens)
            self._put(rows_part(layer, first, count), payload)
            self._blocks[layer] = first + count

    def _put(self, name: str, payload: bytes) -> None:
        tag = FORMAT if name == OFFER else self._tag
        part = seal_part(tag, self.handoff, len(self._listed), name, payload)
        self._listed.append(Listed(name, len(part.data), google_crc32c.value(part.data)))
        self.sent[name.split("/")[0]] += len(part.data)
        self._parts.append(part)

    def _rows_at_most(self) -> int:
        sequence = self._sequence
        if self.form == "tokens":
            return 0
        if sequence.leaves_at is None:
            return sequence.held
        ahead = 0 if self._engine.speculator is None or sequence.leaves_at < 2 else self._engine.speculator.depth
        known = max(len(sequence.tokens), sequence.prompt_len + max(0, sequence.leaves_at - 1) + ahead)
        return min(known, sequence.max_total)

    def _known_full(self) -> int:
        return min(len(self._sequence.tokens), self._rows_at_most()) // BLOCK_TOKENS

    def _offer(self, model: bytes, labels: dict[str, str]) -> Offer:
        sequence, engine = self._sequence, self._engine
        root, keys = b"", b""
        if engine.prefix is not None and sequence.shares and self.form != "tokens":
            root = engine.prefix.root_of(sequence.params.cache_salt)
            keys = b"".join(engine.prefix.keys_of(sequence, self._known_full()))
        params = sequence.params
        return Offer(
            form=self.form,
            handoff=self.handoff,
            request_id=self.request_id,
            model=model,
            layout=self._tag,
            params=replace(
                params, max_tokens=min(params.max_tokens, _LARGEST), min_tokens=min(params.min_tokens, _LARGEST)
            ),
            rows=self._rows_at_most(),
            prompt_len=sequence.prompt_len,
            max_total=sequence.max_total,
            draft_stages=engine.cache.rings.shape[0] - engine.model.config.num_hidden_layers,
            text=sequence.text is not None,
            root=root,
            keys=keys,
            pictures=[
                Picture(r.start, r.tokens, r.digest, r.width, r.height) for r in (i.run for i in sequence.images)
            ],
            labels=labels,
        )

    def _state(self) -> State:
        sequence, prefix = self._sequence, self._engine.prefix
        held_back, unfinished = ("", b"") if sequence.text is None else sequence.text.pending
        return State(
            seed=sequence.seed,
            computed=sequence.computed,
            written=0 if self.form == "tokens" else sequence.held,
            decoder_lower=sequence.decoder_lower,
            encoder_lower=sequence.encoder_lower,
            global_floor=sequence.global_floor,
            hit=sequence.hit,
            announced=sequence.announced,
            preemptions=sequence.preemptions,
            drafts=list(sequence.drafts),
            confidence=list(sequence.confidence),
            stale=sequence.stale,
            publishable=sequence.publishable,
            stops=list(sequence.stops),
            prompt_logprobs=list(sequence.prompt_logprobs),
            held_back=held_back,
            unfinished=unfinished,
            matched=-1 if sequence.matcher is None else sequence.matcher.taken,
            mode="" if prefix is None or sequence.remaining <= 1 else prefix.mode,
        )
