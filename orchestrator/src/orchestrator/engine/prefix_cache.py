"""Prefix reuse of one engine: whose blocks a prompt may share, where it starts, and what a step leaves for others.

A request's blocks get their keys as they fill, in prefill and decode. A later prompt holds those of its beginning and
computes what is behind them. Window rows are not part of a block: they come from a snapshot, or are rebuilt.
Rules: docs/kv_cache.md, In the engine.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kernel_core.check import require
from orchestrator.cache.chain import Chain, ChainScope, ImageRun, framed, usable_blocks
from orchestrator.cache.client import Plan
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.windows import Peer, WindowKey, WindowStore
from orchestrator.engine.prefix_plan import (
    CANONICAL_TOKENS,
    PrefixMode,
    Start,
    choose_start,
    segment,
    snapshot_stops,
)
from orchestrator.engine.prefix_tier import PrefixTier
from orchestrator.engine.sequence import Sequence, State
from orchestrator.engine.shared_blocks import SharedBlocks
from orchestrator.engine.window_pulls import WindowPull, WindowPulls
from orchestrator.model.config import BLOCK_TOKENS

if TYPE_CHECKING:
    from orchestrator.model.cache import CachePools


class PrefixCache:
    """Decisions and bookkeeping; the scheduler asks `live` and `adopt`, the engine tells of steps.

    Attributes:
        stride: distance of canonical boundaries.
        rings: those of the encoder, [layers, slots, ring_rows, row]; what a snapshot holds of one slot.
        windows: snapshots of encoder windows by (chain key, boundary).
        tier: host tier and store behind the device pool, or None; to be set before the first request.
        pulls: questions to other nodes, see `ask`.
        arrived: set from any thread when something has come that a request may wait for.
    """

    def __init__(self, mode: PrefixMode, blocks: SharedBlocks, cache: CachePools, window_bytes: int) -> None:
        self.mode, self.blocks, self.cache, self.stride = mode, blocks, cache, CANONICAL_TOKENS
        self.config = cache.config
        self.tier: PrefixTier | None = None
        self.pulls: WindowPulls | None = None
        self.arrived = threading.Event()
        layout = BlockLayout.of(self.config, quantised=cache.quantised)
        self.scope = ChainScope(model=b"", layout=layout.tag, numerics=self._numerics())
        self.rings = cache.rings[: self.config.encoder_layers]
        shape = self.rings[:, 0].shape
        tag = framed(b"fathom-window/1", layout.tag, mode.encode(), str((*shape, self.rings.dtype)).encode())
        self.windows = WindowStore(hashlib.sha256(tag).digest(), window_bytes)
        self._spare = cache.rings.shape[2] - self.config.sliding_window + 1  # rows beyond a boundary that a ring bears

    def name_model(self, digest: bytes, machine: str = "") -> None:
        """Have keys stand for a model's weights, since what is stored outlives the process. Before any request.

        `machine` names what else the bits of rows depend on; it separates the stored blocks of different machines.
        """
        numerics = framed(self.scope.numerics, b"" if self.mode == "bounded" else machine.encode())
        self.scope = replace(self.scope, model=digest, numerics=numerics)

    def root_of(self, salt: str) -> bytes:
        """The key before the first block of requests with this salt."""
        return replace(self.scope, tenant=salt.encode()).root()

    def _numerics(self) -> bytes:
        """What changes rows of equal tokens and is not in the checkpoint."""
        return framed(self.mode.encode(), str(self.stride if self.mode == "canonical" else 0).encode())

    def chain_of(self, tokens: list[int], salt: str = "") -> Chain:
        """Keys of the full blocks of some tokens."""
        chain = Chain(self.root_of(salt))
        chain.extend(tokens)
        return chain

    def prepare(self, sequence: Sequence) -> None:
        """Set a new request's bounds, hit or not."""
        # Log-probabilities of the prompt and records want every row; they neither take nor leave anything.
        sequence.shares = not sequence.params.prompt_logprobs and sequence.recorder is None
        if self.mode == "canonical" and sequence.shares:
            base = segment(sequence.prompt_len - 1, self.stride)
            sequence.decoder_lower = max(sequence.decoder_lower, base - self.config.sliding_window)
            sequence.publishable = base + self.stride
            sequence.stops = list(range(self.stride, sequence.prompt_len, self.stride))
        if self.seeks and sequence.shares:
            self._seek(sequence)

    @property
    def seeks(self) -> bool:
        """Whether requests may wait for something that is fetched."""
        return self.tier is not None or self.pulls is not None

    def ask(self, peers: Iterable[Peer], deadline_s: float = 0.1) -> None:
        """Have windows that are not here asked of other nodes, in order. After `name_model`, before any request.

        A request waits `deadline_s` for them at most. Raises ValueError without a model's name: keys of nodes with
        different weights would be equal.
        """
        require(bool(self.scope.model), "peers", "some before name_model was called", "some after it")
        self.windows.peers = tuple(peers)
        self.pulls = WindowPulls(self.windows, deadline_s, self.arrived.set)

    def _seek(self, sequence: Sequence) -> None:
        """Start bringing what a new request can use and is not here: its window first, which says how far it goes."""
        matched = len(self._match(sequence))
        if self.tier is not None:
            plan = self.tier.match(sequence.tokens, self.root_of(sequence.params.cache_salt), _runs(sequence))
            sequence.chain, sequence.stored = plan.chain, plan.blocks
            matched = max(matched, plan.blocks)
        missing = [] if self.pulls is None else self._missing_windows(sequence, matched * BLOCK_TOKENS)
        if self.pulls is not None and missing:
            sequence.fetch = self.pulls.start(missing)
        else:
            self._fetch(sequence)

    def _missing_windows(self, sequence: Sequence, matched: int) -> list[WindowKey]:
        """Windows that would have the request start later than those that are here, the best first."""
        missing = []

        def kept(boundary: int) -> bool:
            key = self._window_key(sequence, boundary)
            if not self.windows.has(key):
                missing.append(key)
                return False
            return True

        self._start(sequence, matched, kept)
        return missing

    def _fetch(self, sequence: Sequence) -> None:
        """Start bringing the blocks that a waiting request can use and the device pool lacks."""
        if self.tier is None:
            return
        stored = min(sequence.stored, usable_blocks(sequence.prompt_len)) * BLOCK_TOKENS
        usable = self._start(sequence, stored, self._kept(sequence)).hit // BLOCK_TOKENS
        sequence.fetch_first = len(self._match(sequence))
        if usable > sequence.fetch_first:
            plan = Plan(self._chain(sequence), usable)
            sequence.fetch = self.tier.fetch(plan, sequence.fetch_first, self.arrived.set)

    def arrive(self, waiting: Iterable[Sequence]) -> None:
        """Take in what has come for requests that wait."""
        for sequence in waiting:
            if sequence.fetch is None or not sequence.fetch.done:
                continue
            handle, sequence.fetch = sequence.fetch, None
            if isinstance(handle, WindowPull):
                self._fetch(sequence)
            elif self.tier is not None:
                chain = self._chain(sequence)
                self.tier.absorb(handle, sequence.fetch_first, chain, self.blocks, self.cache)

    def live(self, sequence: Sequence) -> int:
        """How many blocks less than its prompt a waiting request needs now: those of its hit that are in use."""
        if not sequence.shares:
            return 0
        found = self._match(sequence)
        start = self._start(sequence, len(found) * BLOCK_TOKENS, self._kept(sequence))
        hit = found[: start.hit // BLOCK_TOKENS]
        return len(hit) - self.blocks.idle(hit)

    def adopt(self, sequence: Sequence) -> None:
        """Have a request that enters hold its hit and start behind it."""
        if not sequence.shares:
            return
        found = self._match(sequence)
        matched = len(found) * BLOCK_TOKENS
        start = self._start(sequence, matched, self._kept(sequence))
        if start.window:
            sequence.window = self.windows.get(self._window_key(sequence, start.hit))
            if sequence.window is None:  # expired since, or its bytes have changed
                start = self._start(sequence, matched, lambda boundary: False)
        sequence.blocks = found[: start.hit // BLOCK_TOKENS]
        self.blocks.hold(sequence.blocks)
        if self.tier is not None and start.hit:
            self.tier.used(self._chain(sequence), len(sequence.blocks), sequence.params)
        sequence.hit = sequence.global_floor = start.hit
        sequence.computed, sequence.encoder_lower = start.start, start.lower
        sequence.published = len(sequence.blocks)
        sequence.decoder_lower = max(sequence.decoder_lower, start.lower)
        canonical = [stop for stop in sequence.stops if stop > start.hit]
        wanted = snapshot_stops(sequence.prompt_len, matched, sequence.decoder_lower, start.hit)
        sequence.stops = sorted({*canonical, *wanted})

    def keys_of(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """Keys of a request's first full blocks, so many at most."""
        return list(self._chain(sequence).keys[:blocks])

    def note_stored(self, sequence: Sequence) -> None:
        """Find out which blocks of a request from another engine the tiers have, so that they are not stored again."""
        if self.tier is not None:
            plan = self.tier.match(sequence.tokens, self.root_of(sequence.params.cache_salt), _runs(sequence))
            sequence.stored = min(plan.blocks, sequence.computed // BLOCK_TOKENS)

    def restore(self, sequence: Sequence) -> None:
        """Give a request that was just admitted the window rows of its snapshot."""
        if sequence.window is None:
            return
        rings = self.rings[:, sequence.slot]
        rows = torch.frombuffer(bytearray(sequence.window), dtype=torch.uint8).view(rings.dtype).view(rings.shape)
        rings.copy_(rows)
        sequence.window = None

    def wrote(self, sequence: Sequence, end: int) -> None:
        """A step alone, writing rows of a running request up to position `end` - 1, has ended."""
        self.publish(sequence)
        self._keep_windows(sequence, end)
        if self.mode != "canonical" or not sequence.shares or sequence.computed >= sequence.prompt_len:
            return
        if sequence.computed % self.stride == 0 and sequence.computed > sequence.global_floor:
            boundary = sequence.computed
            sequence.stops.remove(boundary)
            sequence.global_floor = boundary
            sequence.computed = sequence.encoder_lower = boundary - self.config.sliding_window

    def wrote_overlapped(self, sequence: Sequence, rows: torch.Tensor | None, *, behind: bool) -> None:
        """A decode step of a running request has ended; `behind` says that the next one has been started.

        `rows` are the request's rings as the step left them, if they were copied. A block that is full now and was not
        before became so in this step, so the rings reached no further beyond its end than one step's drafts.
        """
        boundary = sequence.computed // BLOCK_TOKENS * BLOCK_TOKENS
        passed = boundary > sequence.published * BLOCK_TOKENS
        self.publish(sequence)
        if not behind:
            rows = self.rings[:, sequence.slot]
        if sequence.shares and passed and rows is not None and sequence.snapped < boundary < sequence.publishable:
            self._keep_window(sequence, boundary, rows)

    def publish(self, sequence: Sequence) -> None:
        """Name the blocks of a running request that have become full. The steps that wrote them have ended."""
        full = min(sequence.computed, sequence.publishable) // BLOCK_TOKENS
        if not sequence.shares:
            return
        if full > sequence.published:
            keys = self._chain(sequence).keys
            for number in range(sequence.published, full):
                sequence.blocks[number] = self.blocks.publish(sequence.blocks[number], keys[number])
            sequence.published = full
        self._store(sequence)

    def _store(self, sequence: Sequence) -> None:
        """Hand full blocks on once a token came of them: rows that give no distribution stay here."""
        if self.tier is None or sequence.output_len == 0:
            return
        self._share_windows(self.tier, sequence)
        if sequence.published <= sequence.stored:
            return
        blocks = sequence.blocks[sequence.stored : sequence.published]
        # While overlapped steps are under way, a request has `computed` tokens by steps that the host has waited for.
        settled = self.blocks.fence.open
        self.tier.store(self._chain(sequence), sequence.stored, blocks, self.cache, sequence.params, settled=settled)
        sequence.stored = sequence.published

    def _share_windows(self, tier: PrefixTier, sequence: Sequence) -> None:
        """Store snapshots whose blocks are named, once a token came of them. A full window store may have lost some."""
        boundaries, sequence.unshared = sequence.unshared, []
        for boundary in boundaries:
            key = self._window_key(sequence, boundary)
            sealed = self.windows.peek(key)
            if boundary > sequence.published * BLOCK_TOKENS:
                sequence.unshared.append(boundary)
            elif sealed is not None:
                tier.share(key, sealed, sequence.params)

    def leave(self, sequence: Sequence, *, good: bool) -> None:
        """A request ends, in whatever state. `good` says that its rows are right."""
        if sequence.fetch is not None:
            sequence.fetch.release()
            sequence.fetch = None
        if sequence.state is State.RUNNING or (sequence.state is State.LEAVING and sequence.slot):
            if good:
                self.publish(sequence)
            else:
                self.retract(sequence)

    def retract(self, sequence: Sequence) -> None:
        """Take back what a request has left for others, since its rows are in doubt. What it took stays."""
        if not sequence.shares:
            return
        self.blocks.forget(sequence.blocks[sequence.hit // BLOCK_TOKENS : sequence.published])
        for boundary in range(sequence.hit + BLOCK_TOKENS, sequence.snapped + 1, BLOCK_TOKENS):
            self.windows.drop(self._window_key(sequence, boundary))

    def _keep_windows(self, sequence: Sequence, end: int) -> None:
        """Take a snapshot where one is wanted and the ring still has every row of its window."""
        boundary = sequence.computed // BLOCK_TOKENS * BLOCK_TOKENS
        if not sequence.shares or boundary <= max(sequence.snapped, sequence.global_floor):
            return
        if boundary >= sequence.publishable or end - boundary > self._spare:
            return
        if sequence.computed >= sequence.prompt_len or boundary in sequence.stops:
            self._keep_window(sequence, boundary, self.rings[:, sequence.slot])

    def _keep_window(self, sequence: Sequence, boundary: int, rows: torch.Tensor) -> None:
        snapshot = rows.contiguous().cpu().view(torch.uint8).numpy().tobytes()
        self.windows.put(self._window_key(sequence, boundary), snapshot)
        sequence.snapped = boundary
        if self.tier is not None and self.tier.windows is not None:
            sequence.unshared.append(boundary)

    def _match(self, sequence: Sequence) -> list[int]:
        return self.blocks.match(self._chain(sequence).keys[: usable_blocks(sequence.prompt_len)])

    def _kept(self, sequence: Sequence) -> Callable[[int], bool]:
        return lambda boundary: self.windows.has(self._window_key(sequence, boundary))

    def _start(self, sequence: Sequence, matched: int, kept: Callable[[int], bool]) -> Start:
        return choose_start(
            self.mode,
            matched,
            sequence.prompt_len,
            sequence.decoder_lower,
            kept,
            window=self.config.sliding_window,
            stride=self.stride,
        )

    def _window_key(self, sequence: Sequence, boundary: int) -> WindowKey:
        return WindowKey(self._chain(sequence).keys[boundary // BLOCK_TOKENS - 1], boundary)

    def _chain(self, sequence: Sequence) -> Chain:
        """The request's chain over all tokens that it has by now."""
        if sequence.chain is None:
            sequence.chain = Chain(self.root_of(sequence.params.cache_salt), _runs(sequence))
        if len(sequence.tokens) // BLOCK_TOKENS > len(sequence.chain.keys):
            sequence.chain.extend(sequence.tokens[sequence.chain.tokens :])
        return sequence.chain


def _runs(sequence: Sequence) -> list[ImageRun]:
    """The prompt's images, as keys tell them apart."""
    return [image.run for image in sequence.images]
