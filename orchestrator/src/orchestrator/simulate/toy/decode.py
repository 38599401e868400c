"""A decode engine: takes states in, gives tokens, hands states on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.cache.chain import Chain
from orchestrator.cache.pool import PoolFull
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.roles import engine_port as port
from orchestrator.roles.messages import RequestSpec
from orchestrator.simulate.store import StoredBlock
from orchestrator.simulate.toy import model
from orchestrator.simulate.toy.cells import Cells
from orchestrator.simulate.toy.engine import EngineShape, Key, Site, ToyEngine
from orchestrator.simulate.toy.group import ExpertGroup
from orchestrator.simulate.toy.prefill import export, persist
from orchestrator.simulate.toy.text import chain_of, embedding, ends_after, over, salt_of


@dataclass
class Decoding:
    """A sequence at the engine.

    Attributes:
        output: tokens generated, here and elsewhere. frozen: exported, not to be run. early: no token was sampled
        since its prefill, so every token has its row. published: blocks named and stored.
    """

    spec: RequestSpec
    salt: int
    chain: Chain
    blocks: list[int]
    small: model.Small
    output: list[int]
    early: bool
    frozen: bool = False
    published: int = 0
    cached: int = 0


class DecodeEngine(ToyEngine):
    """One group of ranks that step together."""

    def __init__(self, name: str, shape: EngineShape, site: Site, emit: Callable[[Any], None]) -> None:
        super().__init__(name, shape, site, emit)
        self.cells: Cells = Cells(shape.blocks)
        self.live: dict[Key, Decoding] = {}
        self.group = ExpertGroup(name, shape.ranks, shape.fewest, site.queue, site.random, site.checks.wrong)
        self._on |= {
            port.Load: self._load,
            port.RunDecode: self._launch,
            port.Export: self._export,
            port.Thaw: self._thaw,
            port.Expect: self._nothing,
            port.Rename: self._rename,
        }

    def room(self) -> float:
        return float(self.shape.blocks * BLOCK_TOKENS * len(self.ranks) // self.shape.ranks)

    def kill_rank(self, rank: int) -> bool:
        died = super().kill_rank(rank)
        if died:
            self.group.died(rank)
        return died

    def _reformed(self, command: port.Reform) -> None:
        """The group has met again; it answers once every expert has a copy, if the ranks can hold them."""
        if len(self.ranks) >= self.shape.fewest:
            self.group.begin_again()
            self._load_experts(command)
        else:
            super()._reformed(command)

    def _load_experts(self, command: port.Reform) -> None:
        if len(self.ranks) < self.shape.fewest or self.group.load():
            super()._reformed(command)
        else:
            self._later(0.05, self._load_experts, command)

    def forget_all(self) -> None:
        for key in list(self.live):
            self.free(key)

    def free(self, key: Key) -> None:
        seq = self.live.pop(key, None)
        if seq is not None:
            self.cells.pool.release(seq.blocks)

    def _load(self, command: port.Load) -> None:
        key, spec, manifest = (command.request, command.epoch), command.spec, command.manifest
        if key in self.live:
            self.site.checks.wrong(8, f"{self.name}: {key} was loaded twice")
            return
        parts: dict[str, bytes] = dict.fromkeys(model.KINDS, b"")
        for part, payload in zip(manifest.parts, command.parts, strict=False):
            parts[part.kind] += payload
        try:
            blocks = self.cells.take(self.cells.need(manifest.tokens + 1))
        except PoolFull:
            self._answer(0.001, port.Loaded(*key, "no memory"))
            return
        rows = parts.pop("global")[: len(blocks) * BLOCK_TOKENS * model.ROW]
        self.cells.write(blocks, 0, rows)
        tokens = spec.prompt + manifest.output
        small = model.Small(manifest.tokens, **parts)
        if manifest.replay_tail:
            small = replace(small, drafter=model.draft_context(tokens[: manifest.tokens]))
        digests = [image.digest for image in spec.images]
        chain = chain_of(spec.tenant, digests)
        chain.extend(tokens[: manifest.tokens])
        early = manifest.tokens == len(tokens)
        salt = salt_of(spec.tenant, map(embedding, digests))
        seq = Decoding(spec, salt, chain, blocks, small, list(manifest.output), early)
        seq.published, seq.cached = manifest.tokens // BLOCK_TOKENS, manifest.cached
        self.live[key] = seq
        self._answer(self.shape.copy, port.Loaded(*key))

    def _thaw(self, command: port.Thaw) -> None:
        seq = self.live.get((command.request, command.epoch))
        if seq is not None:
            seq.frozen = False

    def _rename(self, command: port.Rename) -> None:
        seq = self.live.pop((command.request, command.epoch), None)
        if seq is not None:
            self.live[command.request, command.new_epoch] = seq

    def _launch(self, command: port.RunDecode) -> None:
        if len(command.requests) > self.shape.rows:
            self.site.checks.wrong(9, f"{self.name}: {len(command.requests)} rows in a step of {self.shape.rows}")
        if not self.broken:
            self.group.step()
        step = self.cells.launched()
        seconds = self.shape.launch + self.shape.row * len(command.requests)
        there = [(key, self.live[key]) for key in command.requests if key in self.live]
        self._run(command.step, seconds, lambda _: self._end(step, command.step, there), command)

    def _end(self, fence: int, step: int, there: list[tuple[Key, Decoding]]) -> None:
        outputs = []
        for key, seq in there:
            if self.live.get(key) is seq:
                if seq.frozen:
                    self.site.checks.wrong(8, f"{self.name}: {key} ran while it was exported")
                    continue
                outputs.append(self._advance(key, seq))
        self.cells.pool.completed(fence)
        self._say(port.DecodeDone(step, tuple(outputs), self.group.version))

    def _advance(self, key: Key, seq: Decoding) -> port.DecodeOutput:
        if ended := over(seq.output, seq.spec.max_tokens):
            return port.DecodeOutput(*key, (), ended)
        if self._bad_row():
            return port.DecodeOutput(*key, (), "error", "not a number")
        given: list[int] = []
        wanted = 1 + (self.site.random.randrange(1 + self.shape.drafts) if self.shape.drafts else 0)
        while len(given) < wanted:
            if not seq.early and not self._take_in(seq):
                self.free(key)
                return port.DecodeOutput(*key, tuple(given), "preempted")
            seq.early = False
            token = self._sample(seq)
            seq.output.append(token)
            given.append(token)
            if ended := over(seq.output, seq.spec.max_tokens):
                return port.DecodeOutput(*key, tuple(given), ended)
        return port.DecodeOutput(*key, tuple(given))

    def _take_in(self, seq: Decoding) -> bool:
        """Give the last token its row. False where there is no memory for it."""
        position = seq.small.length
        if position // BLOCK_TOKENS >= len(seq.blocks):
            try:
                seq.blocks += self.cells.take(1)
            except PoolFull:
                return False
        token = (seq.output[-1],)
        row = model.rows(token, position, seq.salt, seq.small.tail)
        self.cells.write(seq.blocks, position, row)
        seq.small = model.absorb(seq.small, row, token, 1)
        if seq.chain.extend(token):
            number = seq.published
            seq.published += 1
            keys = seq.chain.keys
            parent = keys[number - 1] if number else seq.chain.root
            block = StoredBlock(keys[number], parent, number, self.cells.block(seq.blocks[number]))
            self.site.queue.after(0.01, persist, self.site, [block], seq.chain.root, seq.spec.tenant)
        return True

    def _sample(self, seq: Decoding) -> int:
        if len(seq.output) == ends_after(seq.spec.params):
            return model.END
        return model.next_token(self.cells.read(seq.blocks, seq.small.length), seq.small)

    def _export(self, command: port.Export) -> None:
        key = (command.request, command.epoch)
        seq = self.live.get(key)
        if seq is None:
            self._answer(0.001, port.Exported(*key, None, (), "it is not here"))
            return
        if self.running:
            self._later(0.002, self._export, command)  # as the last step leaves it
            return
        seq.frozen = True
        rows = self.cells.read(seq.blocks, seq.small.length)
        manifest, parts = export(rows, seq.small, tuple(seq.output), early=seq.early, cached=seq.cached)
        self._answer(self.shape.copy, port.Exported(*key, manifest, parts))
