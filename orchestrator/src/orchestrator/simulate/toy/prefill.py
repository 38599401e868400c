"""A prefill engine: prompts in chunks over paged rows, prefixes from its own memory and from the shared store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.cache.chain import Chain, usable_blocks
from orchestrator.cache.pool import PoolFull
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.roles import engine_port as port
from orchestrator.roles.messages import RequestSpec
from orchestrator.roles.state_parts import Manifest, Part, part_of
from orchestrator.simulate.store import StoredBlock, Unavailable
from orchestrator.simulate.toy import model
from orchestrator.simulate.toy.cells import Cells
from orchestrator.simulate.toy.engine import EngineShape, Key, Site, ToyEngine
from orchestrator.simulate.toy.text import chain_of, ends_after, over, replayed, salt_of

LAYOUT = "toy/1"
_PIECE = 2048
"""Bytes of a part of the global rows at most."""


@dataclass
class Prefilling:
    """A prompt at the engine. `tokens`: prompt and output so far. `given`: the token that prefill samples. `cached`:
    tokens that were not computed."""

    spec: RequestSpec
    tokens: tuple[int, ...]
    salt: int
    chain: Chain
    blocks: list[int]
    small: model.Small
    published: int
    given: tuple[int, ...] = ()
    cached: int = 0

    @property
    def output(self) -> tuple[int, ...]:
        return self.tokens[len(self.spec.prompt) :]


class PrefillEngine(ToyEngine):
    """One rank's worth of work; `PrefillChunk.rank` only has to be one that lives."""

    def __init__(self, name: str, shape: EngineShape, site: Site, emit: Callable[[Any], None]) -> None:
        super().__init__(name, shape, site, emit)
        self.cells: Cells = Cells(shape.blocks)
        self.live: dict[Key, Prefilling] = {}
        self._on |= {
            port.Begin: self._begin,
            port.RunPrefill: self._launch,
            port.Export: self._export,
            port.Withdraw: self._nothing,
        }

    def room(self) -> float:
        return 4 * (self.shape.launch + self.shape.token * self.shape.chunk)

    def forget_all(self) -> None:
        for key in list(self.live):
            self.free(key)

    def free(self, key: Key) -> None:
        work = self.live.pop(key, None)
        if work is not None:
            self.cells.pool.release(work.blocks)

    def _begin(self, command: port.Begin) -> None:
        key, spec = (command.request, command.epoch), command.spec
        if key in self.live:
            self.site.checks.wrong(8, f"{self.name}: {key} was begun twice")
            return
        tokens = spec.prompt + command.output
        chain = chain_of(spec.tenant, [image.digest for image in spec.images])
        chain.extend(tokens)
        usable = chain.keys[: usable_blocks(len(tokens))]
        found = self.cells.pool.match(usable)
        self.cells.pool.hold(found)
        try:
            blocks = found + self.cells.take(self.cells.need(len(tokens)) - len(found))
        except PoolFull:
            self.cells.pool.release(found)
            self._answer(0.001, port.Began(*key, 0, "no memory"))
            return
        embeddings = dict(command.embeddings)
        salt = salt_of(spec.tenant, [embeddings.get(image.digest, b"") for image in spec.images])
        start = model.begin(spec.seed, spec.grammar)
        work = self.live[key] = Prefilling(spec, tokens, salt, chain, blocks, start, len(found))
        self._fetch(key, work, usable)

    def _fetch(self, key: Key, work: Prefilling, usable: list[bytes]) -> None:
        """Ask the store for what goes on behind the blocks that are here."""
        store, here, now = self.site.store, work.published, self.site.queue.now
        try:
            there = store.match(usable)
            lease = store.begin_read(usable[:there], now + 10.0, self.name) if there > here else None
        except Unavailable:
            lease = None
        if lease is None:
            self._later(0.001, self._fetched, key, work, [])
        else:
            seconds = 0.002 + 0.0005 * there + 0.02 * self.site.random.random() ** 4
            self._later(seconds, self._read, key, work, usable[:there], lease)

    def _read(self, key: Key, work: Prefilling, keys: list[bytes], lease: tuple[int, list[int]]) -> None:
        try:
            found = self.site.store.end_read(keys, *lease, self.site.queue.now)
        except Unavailable:
            found = []
        self._fetched(key, work, found)

    def _fetched(self, key: Key, work: Prefilling, found: list[bytes | None]) -> None:
        if self.live.get(key) is not work:
            return  # dropped meanwhile: `Begin` of a dropped request has no answer but `Dropped`
        here = work.published
        for number in range(here, len(found)):
            data = found[number]
            if data is None:
                break
            begin = number * BLOCK_TOKENS
            right = model.rows(work.tokens[begin : begin + BLOCK_TOKENS], begin, work.salt)
            self.site.checks.block_read(self.name, work.chain.keys[number], data, right)
            self.cells.write(work.blocks, begin, data)
            here += 1
        self._publish(work, here)
        length = work.cached = here * BLOCK_TOKENS
        work.small = replayed(
            work.tokens,
            length,
            len(work.spec.prompt),
            seed=work.spec.seed,
            grammar=work.spec.grammar,
            salt=work.salt,
        )
        self._say(port.Began(*key, length))

    def _publish(self, work: Prefilling, upto: int) -> None:
        for number in range(work.published, upto):
            self.cells.pool.publish(work.blocks[number], work.chain.keys[number])
        work.published = max(work.published, upto)

    def _launch(self, command: port.RunPrefill) -> None:
        tokens = sum(chunk.count for chunk in command.chunks)
        step = self.cells.launched()
        self._run(command.step, self.shape.launch + self.shape.token * tokens, self._end(step), command)

    def _end(self, step: int) -> Callable[[port.RunPrefill], None]:
        def end(command: port.RunPrefill) -> None:
            failed = []
            for chunk in command.chunks:
                why = self._compute(chunk)
                if why:
                    failed.append((chunk.request, chunk.epoch, why))
            self.cells.pool.completed(step)
            self._say(port.PrefillDone(command.step, self.shape.launch * self.speed, 0, tuple(failed)))

        return end

    def _compute(self, chunk: port.PrefillChunk) -> str:
        work = self.live.get((chunk.request, chunk.epoch))
        if work is None:
            return ""
        tokens, prompt = work.tokens, len(work.spec.prompt)
        end = chunk.start + chunk.count
        if chunk.start != work.small.length or end > len(tokens) or chunk.final != (end == len(tokens)):
            self.site.checks.wrong(8, f"{self.name}: {chunk} does not go on from {work.small.length} of {len(tokens)}")
            return "a chunk out of place"
        piece = tokens[chunk.start : end]
        rows = model.rows(piece, chunk.start, work.salt, work.small.tail)
        self.cells.write(work.blocks, chunk.start, rows)
        work.small = model.absorb(work.small, rows, piece, max(0, end - max(prompt, chunk.start)))
        before = work.published
        self._publish(work, end // BLOCK_TOKENS)
        if work.published > before:
            self._persist(work, before)
        if not chunk.final:
            return ""
        if self._bad_row():
            return "not a number"
        if not self.shape.stop_early and not over(work.output, work.spec.max_tokens):
            work.given = (self._sample(work),)
        return ""

    def _sample(self, work: Prefilling) -> int:
        if len(work.output) == ends_after(work.spec.params):
            return model.END
        return model.next_token(self.cells.read(work.blocks, len(work.tokens)), work.small)

    def _persist(self, work: Prefilling, first: int) -> None:
        """Copy full blocks out, and store them a moment later."""
        keys, root = work.chain.keys, work.chain.root
        blocks = [
            StoredBlock(keys[n], keys[n - 1] if n else root, n, self.cells.block(work.blocks[n]))
            for n in range(first, work.published)
        ]
        self.site.queue.after(0.01, persist, self.site, blocks, root, work.spec.tenant)

    def _export(self, command: port.Export) -> None:
        key = (command.request, command.epoch)
        work = self.live.get(key)
        if work is None or work.small.length < len(work.tokens):
            self._answer(0.001, port.Exported(*key, None, (), "it is not here, or not computed"))
            return
        output = work.output + work.given
        ended = over(output, work.spec.max_tokens)
        if ended:
            manifest = Manifest(LAYOUT, len(work.tokens), output, False, (), ended, work.cached)
            parts: tuple[bytes, ...] = ()
        else:
            rows = self.cells.read(work.blocks, len(work.tokens))
            manifest, parts = export(rows, work.small, output, early=not work.given, cached=work.cached)
        self._answer(self.shape.copy, port.Exported(*key, manifest, parts))


def persist(site: Site, blocks: list[StoredBlock], root: bytes, tenant: str) -> None:
    """Store blocks; a store that does not answer loses them, which is no more than a later miss."""
    try:
        site.store.write(blocks, root, tenant, site.queue.now)
    except Unavailable:
        site.store.counts["lost writes"] += len(blocks)


def export(
    rows: bytes, small: model.Small, output: tuple[int, ...], *, early: bool, cached: int
) -> tuple[Manifest, tuple[bytes, ...]]:
    """All kinds of a state as parts; `early` leaves out what the receiver replays."""
    pieces: list[tuple[Any, bytes]] = [("global", rows[at : at + _PIECE]) for at in range(0, max(1, len(rows)), _PIECE)]
    pieces += [
        ("window", small.window),
        ("tail", small.tail),
        ("lookback", small.lookback),
        ("drafter", b"" if early else small.drafter),
        ("sampler", small.sampler),
        ("grammar", small.grammar),
    ]
    parts: tuple[Part, ...] = tuple(part_of(kind, payload) for kind, payload in pieces)
    return Manifest(LAYOUT, small.length, output, early, parts, cached=cached), tuple(payload for _, payload in pieces)
