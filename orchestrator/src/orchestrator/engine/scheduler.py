"""Which tokens to compute next: continuous batching with chunked prefill and lossless preemption.

No I/O and no tensors: `schedule` reads and moves ids, `Step` tells the runner what to save, restore and compute.

Policy
1. Every decoding request gets its one token, oldest first; then its planned drafts, which park nobody and leave half
   of the remaining budget to prompts that wait.
2. What is left of the token budget goes to prompts, oldest first: running ones, then parked ones that come back,
   then waiting ones. Nobody overtakes an older request that waits for memory.
3. A request that needs a block when none is free parks the youngest running request: its rows are copied to the
   host and come back unchanged, so nothing is computed twice. The oldest is never parked, so there is always one
   that finishes, and a request is parked at most once for each block that older requests take.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.engine.fence import FencedPool
from orchestrator.engine.pool import IdPool
from orchestrator.engine.sequence import Sequence, State
from orchestrator.engine.shared_blocks import SharedBlocks
from orchestrator.model.config import BLOCK_TOKENS

if TYPE_CHECKING:
    from orchestrator.engine.prefix_cache import PrefixCache


@dataclass
class Step:
    """One step's orders, to be carried out in this order: save `park`, restore `resume`, compute `work`.

    `park` holds (sequence, blocks, slot) as they were before their ids were freed.
    """

    park: list[tuple[Sequence, list[int], int]] = field(default_factory=list)
    resume: list[Sequence] = field(default_factory=list)
    work: list[tuple[Sequence, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.work or self.park or self.resume)


class Scheduler:
    """Queues and memory of one rank.

    `max_step_tokens` bounds a step's tokens, `chunk_tokens` one prompt's share of it. With `prefix` a request that
    enters holds the blocks of its hit, which others may hold too, and starts behind it.
    """

    def __init__(
        self,
        blocks: IdPool | SharedBlocks,
        slots: IdPool,
        max_step_tokens: int,
        chunk_tokens: int,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.blocks, self.slots, self.prefix = blocks, slots, prefix
        self.max_step_tokens, self.chunk_tokens = max_step_tokens, chunk_tokens
        self.waiting: deque[Sequence] = deque()
        self.parked: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.parked or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget a request in whatever state it is and free what it holds. Idempotent."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.PARKED:
            self.parked.remove(sequence)
            sequence.parked = None
        elif sequence.state is State.LEAVING:
            self.leaving.remove(sequence)
            sequence.parked = None
            if sequence.slot:
                self._release(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.state = State.FINISHED

    def hold(self, sequence: Sequence) -> None:
        """Let a request compute nothing more and keep what it holds."""
        queues = {State.WAITING: self.waiting, State.PARKED: self.parked, State.RUNNING: self.running}
        queues[sequence.state].remove(sequence)
        sequence.state = State.LEAVING
        self.leaving.append(sequence)

    def rejoin(self, sequence: Sequence) -> None:
        """Let a request go on that `hold` took out, or that came from elsewhere with its blocks and slot.

        Not while a step is in flight: overlapped steps know the requests of the step before them.
        """
        if sequence.state is State.LEAVING:
            self.leaving.remove(sequence)
        if sequence.slot:
            sequence.state = State.RUNNING
            self.running.append(sequence)
        elif sequence.parked is not None:
            sequence.state = State.PARKED
            self.parked.append(sequence)
        else:
            sequence.state = State.WAITING
            self.waiting.appendleft(sequence)

    def has_room(self, tokens: int, live: int = 0) -> bool:
        """Whether a request of so many tokens from elsewhere can enter now, with no need to park anybody soon.

        `live` of its blocks are here and in use. Nobody overtakes an older request that waits for memory.
        """
        blocks = blocks_for(tokens + 1) - live + len(self.running)
        return not self.parked and self.slots.free > 0 and blocks <= self.blocks.free

    def schedule(self) -> Step:
        step = Step()
        budget = self.max_step_tokens
        self.running.sort(key=lambda s: s.order)
        for sequence in [s for s in self.running if s.remaining == 1]:
            if budget > 0 and sequence.state is State.RUNNING and self._grow(sequence, 1, step):
                step.work.append((sequence, 1))
                budget -= 1
        budget -= self._add_drafts(step, budget)
        for sequence in [s for s in self.running if s.remaining > 1]:
            count = min(sequence.stretch, budget, self.chunk_tokens)
            if count > 0 and sequence.state is State.RUNNING and self._grow(sequence, count, step):
                step.work.append((sequence, count))
                budget -= count
        if not step.park:  # memory is short: nobody new comes in
            budget = self._resume(step, budget)
            self._admit(step, budget)
        step.work = [(s, n) for s, n in step.work if s.state is State.RUNNING]
        return step

    def _add_drafts(self, step: Step, budget: int) -> int:
        """Widen the decoding requests' work by their planned drafts, where memory is free. Returns the tokens added."""
        prompts = bool(self.waiting or self.parked) or any(s.remaining > 1 for s in self.running)
        left = allowed = budget // 2 if prompts else budget
        for i, (sequence, _) in enumerate(step.work):
            room = (len(sequence.blocks) + self.blocks.free) * BLOCK_TOKENS - sequence.computed - 1
            count = min(sequence.planned, left, room) if sequence.state is State.RUNNING and not step.park else 0
            if count > 0:
                self._grow(sequence, 1 + count, step)
                step.work[i] = (sequence, 1 + count)
                left -= count
        return allowed - left

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give a request the blocks of its first `tokens` tokens if they are free.

        Rule H3: nobody is parked for it. While a step is in flight, a victim's blocks would not become free, and the
        next attempt would park another request.
        """
        missing = blocks_for(tokens) - len(sequence.blocks)
        if missing > self.blocks.free:
            return False
        if missing > 0:
            sequence.blocks.extend(self.blocks.take(missing))
        return True

    def reclaim(self) -> None:
        """Take note that a step has ended, so that memory given back before it did may be free now."""
        for pool in (self.blocks, self.slots):
            if isinstance(pool, FencedPool | SharedBlocks):
                pool.reclaim()

    @property
    def prompts_can_run(self) -> bool:
        """Whether `schedule` would compute anything but one token of each running request, and its drafts."""
        if any(s.remaining > 1 for s in self.running):
            return True
        if self.slots.free == 0:
            return False
        if self.parked:
            oldest = min(self.parked, key=lambda s: s.order)
            return blocks_for(max(oldest.held, oldest.computed + 1)) <= self.blocks.free - len(self.running)
        sequence = self._next()
        return sequence is not None and self._fits(sequence)

    @property
    def stuck(self) -> bool:
        """Whether there is nothing to compute before some request's blocks have been fetched."""
        return bool(self.waiting) and not (self.running or self.parked) and self._next() is None

    def _next(self) -> Sequence | None:
        """The oldest waiting request; one whose blocks are being fetched is passed over."""
        return next((s for s in self.waiting if s.fetch is None), None)

    def _fits(self, sequence: Sequence) -> bool:
        """The whole prompt and one token have to fit, else it would be parked before its first token."""
        live = 0 if self.prefix is None else self.prefix.live(sequence)
        return blocks_for(len(sequence.tokens) + 1) - live + len(self.running) <= self.blocks.free

    def _resume(self, step: Step, budget: int) -> int:
        for sequence in sorted(self.parked, key=lambda s: s.order):
            held = blocks_for(sequence.held)
            count = min(sequence.stretch, budget, self.chunk_tokens)
            # One spare block for each running request keeps it from being parked again by the next boundary.
            wanted = max(held, blocks_for(sequence.computed + count)) + len(self.running)
            if count <= 0 or wanted > self.blocks.free or self.slots.free == 0:
                break
            self.parked.remove(sequence)
            self._enter(sequence, held)
            step.resume.append(sequence)
            self._grow(sequence, count, step)
            step.work.append((sequence, count))
            budget -= count
        return budget

    def _admit(self, step: Step, budget: int) -> int:
        while budget > 0 and not self.parked and self.slots.free:
            sequence = self._next()
            if sequence is None or not self._fits(sequence):
                break
            self.waiting.remove(sequence)
            self._enter(sequence, 0)
            if self.prefix is not None:
                self.prefix.adopt(sequence)
            count = min(sequence.stretch, budget, self.chunk_tokens)
            self._grow(sequence, count, step)
            step.work.append((sequence, count))
            budget -= count
        return budget

    def _enter(self, sequence: Sequence, blocks: int) -> None:
        sequence.slot = self.slots.take(1)[0]
        sequence.blocks = self.blocks.take(blocks)
        sequence.state = State.RUNNING
        self.running.append(sequence)

    def _grow(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Give the request the blocks that its next `count` tokens need; False if it was parked itself."""
        missing = blocks_for(sequence.computed + count) - len(sequence.blocks)
        while missing > self.blocks.free:
            victim = max(self.running, key=lambda s: s.order)
            self._park(victim, step)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks.extend(self.blocks.take(missing))
        return True

    def _park(self, victim: Sequence, step: Step) -> None:
        held = blocks_for(victim.held)  # blocks taken for tokens of this very step hold nothing yet
        step.park.append((victim, victim.blocks[:held], victim.slot))
        self.running.remove(victim)
        self._release(victim)
        victim.state = State.PARKED
        victim.preemptions += 1
        victim.published = 0  # what comes back are copies in other blocks
        self.parked.append(victim)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.give(sequence.blocks)
        self.slots.give([sequence.slot])
        sequence.blocks, sequence.slot = [], 0


def blocks_for(tokens: int) -> int:
    """Blocks that hold the rows of so many tokens."""
    return -(-tokens // BLOCK_TOKENS)
