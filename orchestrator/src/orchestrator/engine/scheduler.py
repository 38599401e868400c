"""Which tokens to compute next: continuous batching with chunked prefill and lossless preemption.

No I/O and no tensors: `schedule` reads and moves ids, `Step` tells the runner what to save, restore and compute.

Policy
1. Every decoding request gets its one token, oldest first.
2. What is left of the token budget goes to prompts, oldest first: running ones, then parked ones that come back,
   then waiting ones. Nobody overtakes an older request that waits for memory.
3. A request that needs a block when none is free parks the youngest running request: its rows are copied to the
   host and come back unchanged, so nothing is computed twice. The oldest is never parked, so there is always one
   that finishes, and a request is parked at most once for each block that older requests take.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from orchestrator.engine.pool import IdPool
from orchestrator.engine.sequence import Sequence, State
from orchestrator.model.config import BLOCK_TOKENS


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

    `max_step_tokens` bounds a step's tokens, `chunk_tokens` one prompt's share of it.
    """

    def __init__(self, blocks: IdPool, slots: IdPool, max_step_tokens: int, chunk_tokens: int) -> None:
        self.blocks, self.slots = blocks, slots
        self.max_step_tokens, self.chunk_tokens = max_step_tokens, chunk_tokens
        self.waiting: deque[Sequence] = deque()
        self.parked: list[Sequence] = []
        self.running: list[Sequence] = []

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
        else:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> Step:
        step = Step()
        budget = self.max_step_tokens
        self.running.sort(key=lambda s: s.order)
        for sequence in [s for s in self.running if s.remaining == 1]:
            if budget > 0 and sequence.state is State.RUNNING and self._grow(sequence, 1, step):
                step.work.append((sequence, 1))
                budget -= 1
        for sequence in [s for s in self.running if s.remaining > 1]:
            count = min(sequence.remaining, budget, self.chunk_tokens)
            if count > 0 and sequence.state is State.RUNNING and self._grow(sequence, count, step):
                step.work.append((sequence, count))
                budget -= count
        if not step.park:  # memory is short: nobody new comes in
            budget = self._resume(step, budget)
            self._admit(step, budget)
        step.work = [(s, n) for s, n in step.work if s.state is State.RUNNING]
        return step

    def _resume(self, step: Step, budget: int) -> int:
        for sequence in sorted(self.parked, key=lambda s: s.order):
            held = _blocks_for(sequence.computed)
            count = min(sequence.remaining, budget, self.chunk_tokens)
            # One spare block for each running request keeps it from being parked again by the next boundary.
            wanted = max(held, _blocks_for(sequence.computed + count)) + len(self.running)
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
        while self.waiting and budget > 0 and not self.parked and self.slots.free:
            sequence = self.waiting[0]
            # The whole prompt and one token have to fit, else it would be parked before its first token.
            if _blocks_for(len(sequence.tokens) + 1) + len(self.running) > self.blocks.free:
                break
            self.waiting.popleft()
            self._enter(sequence, 0)
            count = min(sequence.remaining, budget, self.chunk_tokens)
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
        missing = _blocks_for(sequence.computed + count) - len(sequence.blocks)
        while missing > self.blocks.free:
            victim = max(self.running, key=lambda s: s.order)
            self._park(victim, step)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks.extend(self.blocks.take(missing))
        return True

    def _park(self, victim: Sequence, step: Step) -> None:
        held = _blocks_for(victim.computed)  # blocks taken for tokens of this very step hold nothing yet
        step.park.append((victim, victim.blocks[:held], victim.slot))
        self.running.remove(victim)
        self._release(victim)
        victim.state = State.PARKED
        victim.preemptions += 1
        self.parked.append(victim)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.give(sequence.blocks)
        self.slots.give([sequence.slot])
        sequence.blocks, sequence.slot = [], 0


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
