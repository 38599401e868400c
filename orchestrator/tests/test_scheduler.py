"""The scheduler alone, with a pretended model: memory is conserved, nobody starves, preemption loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.engine.pool import IdPool
from orchestrator.engine.request import SamplingParams
from orchestrator.engine.scheduler import Scheduler
from orchestrator.engine.sequence import Sequence, State
from orchestrator.model.config import BLOCK_TOKENS


def make(order: int, prompt: int, output: int) -> Sequence:
    return Sequence(
        request_id=str(order),
        params=SamplingParams(max_tokens=output),
        tokens=[1] * prompt,
        prompt_len=prompt,
        max_total=prompt + output,
        order=order,
        seed=0,
    )


class Pretend:
    """Stands in for runner and engine: checks every order, writes a token wherever one is due."""

    def __init__(self, blocks: int, slots: int, budget: int, chunk: int) -> None:
        self.blocks, self.slots = IdPool(blocks + 1, "blocks"), IdPool(slots + 1, "slots")
        self.scheduler = Scheduler(self.blocks, self.slots, budget, chunk)
        self.owner: dict[int, str] = {}
        self.done: list[Sequence] = []

    def step(self) -> int:
        step = self.scheduler.schedule()
        for sequence, blocks, _slot in step.park:
            assert all(self.owner[b] == sequence.request_id for b in blocks)  # nobody wrote there before the save
            assert len(blocks) * BLOCK_TOKENS >= sequence.computed
            sequence.parked = sequence.computed
        for sequence in step.resume:
            assert sequence.parked == sequence.computed
            sequence.parked = None
        assert sum(n for _, n in step.work) <= self.scheduler.max_step_tokens
        assert len({id(s) for s, _ in step.work}) == len(step.work)
        for sequence, count in step.work:
            assert sequence.state is State.RUNNING and sequence.slot != 0
            assert 0 < count <= max(1, self.scheduler.chunk_tokens)
            assert len(sequence.blocks) * BLOCK_TOKENS >= sequence.computed + count
            for block in sequence.blocks:
                self.owner[block] = sequence.request_id
            sequence.computed += count
            if sequence.remaining == 0:
                sequence.tokens.append(1)
                if len(sequence.tokens) >= sequence.max_total:
                    self.scheduler.finish(sequence)
                    self.done.append(sequence)
        held = [b for s in self.scheduler.running for b in s.blocks]
        assert len(held) == len(set(held)) == self.blocks.used
        assert self.slots.used == len(self.scheduler.running)
        return len(step.work)


requests = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 300)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(7, 20), st.integers(1, 6), st.integers(6, 300), st.integers(1, 300))
def test_everything_finishes_and_memory_returns(wanted, blocks, slots, budget, chunk):
    world = Pretend(blocks, slots, budget, chunk)
    for order, (prompt, output) in enumerate(wanted):
        world.scheduler.add(make(order, prompt, output))
    for _ in range(sum(p + o for p, o in wanted) + 10):
        if not world.scheduler.has_work:
            break
        assert world.step() > 0, "work is left and nothing was computed"
    assert len(world.done) == len(wanted)
    assert world.blocks.used == 0 and world.slots.used == 0
    older = 0
    for sequence in sorted(world.done, key=lambda s: s.order):
        assert sequence.preemptions <= older, "parked more often than older requests took blocks"
        older += -(-len(sequence.tokens) // BLOCK_TOKENS)


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(7, 12), st.data())
def test_abort_in_any_state_frees_everything(wanted, blocks, data):
    world = Pretend(blocks, 4, 300, 128)
    sequences = [make(order, *sizes) for order, sizes in enumerate(wanted)]
    for sequence in sequences:
        world.scheduler.add(sequence)
    for _ in range(data.draw(st.integers(0, 60))):
        if world.scheduler.has_work:
            world.step()
    for sequence in data.draw(st.permutations(sequences)):
        world.scheduler.finish(sequence)
        world.scheduler.finish(sequence)  # idempotent
    assert not world.scheduler.has_work and world.blocks.used == 0 and world.slots.used == 0


def test_a_full_pool_parks_the_youngest_and_brings_it_back():
    world = Pretend(blocks=5, slots=4, budget=600, chunk=600)
    for order in range(2):
        world.scheduler.add(make(order, 200, 200))
    parked = set()
    while world.scheduler.has_work:
        world.step()
        parked.update(s.request_id for s in world.scheduler.parked)
    assert parked == {"1"} and len(world.done) == 2


def test_pool_refuses_a_double_free():
    pool = IdPool(4, "blocks")
    ids = pool.take(2)
    assert 0 not in ids
    pool.give(ids)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.give(ids[:1])
    with pytest.raises(RuntimeError, match="wanted"):
        pool.take(4)
