"""The hazards of overlapped steps: each one's rule holds, and without the rule the same check fails.

The device is one that runs as late as it may: a piece of work is done when somebody waits for it, or for a later one.
"""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from orchestrator.engine.fence import Fence, FencedPool
from orchestrator.engine.launch import InOrder
from orchestrator.engine.lockstep import Lockstep
from orchestrator.engine.readback import HostRing
from orchestrator.engine.request import GrammarSpec, SamplingParams
from orchestrator.engine.rules import Rules
from orchestrator.engine.scheduler import Step
from orchestrator.engine.step_clock import StepClock


class Late:
    """Launches run in order, and not before they have to."""

    inline = False

    def __init__(self) -> None:
        self.pieces: list[Late.Span] = []

    class Span:
        seconds = 1e-3

        def __init__(self, device, work) -> None:
            self.device, self.work = device, work

        def wait(self) -> None:
            while self.work is not None:
                piece = self.device.pieces.pop(0)
                work, piece.work = piece.work, None
                with torch.inference_mode():
                    work()

        def after(self, earlier) -> float:
            return 0.0

    def launch(self, work, name="work"):
        self.pieces.append(self.Span(self, work))
        return self.pieces[-1]

    def close(self) -> None:
        pass


def sampled(seed: int, **options) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 24, "ignore_eos": True} | options)


def late(kit, model, tokenizer=None, *, known=None, rules=None, **options):
    engine = kit.engine_of(model, tokenizer, **options)
    engine.overlap(Late(), rules or Rules())
    if known is not None:
        kit.tutor(engine, known, lambda seed, position: (seed + position) % 6)
    return engine


def truth(kit, model, requests, tokenizer=None):
    expected = kit.run(kit.engine_of(model, tokenizer, speculation="off"), requests)
    known = {p.seed: [*prompt, *expected[name][0]] for name, (prompt, p) in requests.items()}
    return expected, known


def holds(check) -> bool:
    """Whether a check passes; an error of the engine's own counts as a failure too."""
    try:
        return bool(check())
    except (AssertionError, KeyError, IndexError, RuntimeError, ValueError):
        return False


@pytest.mark.parametrize("kept", [True, False])
def test_h1_what_comes_after_an_end_is_dropped(kit, nano, kept):
    free, _ = truth(kit, nano, {str(i): ([5, 9, i], sampled(i)) for i in range(5)})
    requests = {
        str(i): ([5, 9, i], sampled(i, stop_token_ids=(free[str(i)][0][4 + i],), ignore_eos=False)) for i in range(5)
    }
    expected, known = truth(kit, nano, requests)
    engine = late(kit, nano, known=known, rules=Rules(discard_after_end=kept))
    assert holds(lambda: kit.run(engine, requests) == expected) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_h2_memory_is_free_when_no_step_in_flight_can_touch_it(kit, nano, kept):
    """One request ends, and another one needs the only block there is, sooner or later after that."""
    free, _ = truth(kit, nano, {"ends": (kit.prompt_of(60, 0), sampled(0))})
    ends = sampled(0, stop_token_ids=(free["ends"][0][8],))
    early = []
    for length in range(114, 124):
        engine = late(kit, nano, rules=Rules(fenced_frees=kept), num_blocks=3, speculation="off")
        engine.add("ends", kit.prompt_of(60, 0), ends)
        engine.add("grows", kit.prompt_of(length, 1), sampled(1))
        engine.step()
        pool = engine.scheduler.blocks
        others = pool.take(pool.free)
        early += _taken_while_in_use(engine)
        pool.give(others)
    assert (early == []) == kept


def _taken_while_in_use(engine) -> list[int]:
    """Runs the engine; returns the blocks handed out while a step not yet begun was going to write them."""
    pool, found = engine.scheduler.blocks, []
    take = pool.take

    def watched(count):
        ids = take(count)
        flight = engine.pipeline.flight
        if flight is not None and flight.forward.work is not None:
            found.extend(set(ids) & set(flight.host.blocks.flatten().tolist()))
        return ids

    pool.take = watched
    while engine.has_work:
        engine.step()
    return found


def test_h2_frees_wait_for_the_step_that_was_last_when_they_came():
    fence = Fence()
    pool = FencedPool(5, "blocks", fence)
    ids = pool.take(4)
    fence.launched = 3
    pool.give(ids[:2])
    fence.launched = 4
    pool.give(ids[2:3])
    assert (pool.free, pool.fenced, pool.used) == (0, 3, 4)
    fence.done = 3
    pool.reclaim()
    assert (pool.free, pool.fenced, pool.used) == (2, 1, 2)
    with pytest.raises(RuntimeError, match="wanted"):
        pool.take(3)
    fence.done = 4
    pool.reclaim()
    assert (pool.free, pool.used) == (3, 1)
    pool.give(ids[3:])
    assert pool.free == 4


@pytest.mark.parametrize("kept", [True, False])
def test_h3_nobody_is_parked_for_an_overlapped_step(kit, nano, kept):
    requests = {str(i): (kit.prompt_of(110, i), sampled(i, max_tokens=60)) for i in range(4)}
    expected, _ = truth(kit, nano, requests)
    engine = late(kit, nano, num_blocks=5)
    scheduler, parked = engine.scheduler, []
    park = scheduler._park

    def watched(victim, step):
        parked.append(engine.pipeline.flight is not None)
        park(victim, step)

    scheduler._park = watched
    if not kept:
        scheduler.reserve = lambda sequence, tokens: scheduler._grow(sequence, tokens - sequence.computed, Step())
    right = holds(lambda: kit.run(engine, requests) == expected)
    assert parked, "memory was never short"
    assert (right and not any(parked)) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_h4_a_host_buffer_in_use_is_not_filled_again(kept):
    ring = HostRing(2, pinned=False, guarded=kept)
    first, second = [torch.tensor([7])], [torch.tensor([8])]
    place = ring.claim(1)
    ring.fill(place, first)

    def two_steps_later():
        again = ring.claim(3)  # the ring is one too small for that many steps in flight
        ring.fill(again, second)

    if kept:
        with pytest.raises(RuntimeError, match="step 3 wants the host buffer of step 1"):
            two_steps_later()
    else:
        two_steps_later()
    assert (ring.read(place, first)[0].tolist() == [7]) == kept
    ring.release(place)
    assert ring.claim(5) == place


def test_h4_results_keep_their_types_and_places():
    tensors = [torch.tensor([True, False, True]), torch.tensor([[1.5]]), torch.arange(3), torch.empty(0, 2).int()]
    ring = HostRing(3, pinned=False)
    place = ring.claim(0)
    ring.fill(place, tensors)
    for got, sent in zip(ring.read(place, tensors), tensors, strict=True):
        assert got.equal(sent) and got.dtype == sent.dtype


@pytest.mark.parametrize("kept", [True, False])
def test_h5_rows_are_announced_when_they_are_there(kit, nano, kept):
    engine = late(kit, nano, rules=Rules(publish_late=kept))
    pool = engine.cache.pools[nano.config.kv_source_layer_ids[-1]]  # a row a token
    for memory in (p.main for p in engine.cache.pools.values()):
        memory.zero_()
    missing = []

    def written(sequence, blocks, tokens):
        block, offset = divmod(tokens - 1, 128)
        if not pool.main[blocks[block], offset].any():
            missing.append((sequence.request_id, tokens))

    engine.pipeline.written = written
    kit.run(engine, {str(i): (kit.prompt_of(9 + i, i), sampled(i)) for i in range(3)})
    assert (missing == []) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_h6_lengths_are_taken_as_if_all_in_flight_were_accepted(kit, nano, kept):
    """Every draft stands, and the requests come to a block's end and to their limits in the middle of a step."""
    requests = {str(i): (kit.prompt_of(110 + i, i), sampled(i, max_tokens=17 + i)) for i in range(6)}
    expected, known = truth(kit, nano, requests)
    engine = kit.engine_of(nano)
    engine.overlap(Late(), Rules(optimistic_lengths=kept))
    kit.tutor(engine, known, lambda seed, position: 9)
    assert holds(lambda: kit.run(engine, requests) == expected) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_h7_an_abort_in_flight_ends_a_request_at_once(kit, nano, kept):
    requests = {str(i): (kit.prompt_of(9, i), sampled(i, max_tokens=40)) for i in range(4)}
    expected, _ = truth(kit, nano, requests)
    engine = late(kit, nano, rules=Rules(drop_aborted=kept))
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params)
    early = [event for _ in range(6) for event in engine.step()]
    assert engine.pipeline.flight is not None
    for _ in range(2):
        engine.abort("2")
    assert "2" not in engine._sequences and engine.scheduler.slots.fenced == 1

    def rest_is_right():
        rest = kit.finish(engine)
        begun = {n: [e.token_id for e in early if e.request_id == n and hasattr(e, "token_id")] for n in requests}
        assert rest["2"][3].reason == "abort" and rest["2"][0] == []
        return all(begun[n] + rest[n][0] == expected[n][0] for n in "013")

    assert holds(rest_is_right) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_h8_sampling_waits_for_the_tokens_that_its_masks_depend_on(kit, nano, tokenizer, kept):
    grammar = GrammarSpec("regex", "(ab|[0-9]{3}){2,9}-(yes|no)")
    requests = {str(i): ([5, 9, i], sampled(i, max_tokens=60, grammar=grammar, ignore_eos=False)) for i in range(4)}
    expected, known = truth(kit, nano, requests, tokenizer)
    engine = late(kit, nano, tokenizer, known=known, rules=Rules(sample_late=kept))
    assert holds(lambda: kit.run(engine, requests) == expected) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_h9_draws_depend_on_seed_and_position_alone(kit, nano, kept):
    requests = {str(i): (kit.prompt_of(9, i), sampled(i)) for i in range(3)}
    expected, known = truth(kit, nano, requests)
    engine = late(kit, nano, known=known, rules=Rules(position_keyed=kept))
    assert holds(lambda: kit.run(engine, requests) == expected) == kept


class Ranks:
    """Two ranks in two threads. `any` and `collective` wait for both; one that waits in vain gives up."""

    def __init__(self, patience: float) -> None:
        self.barrier = threading.Barrier(2, timeout=patience)
        self.votes = [False, False]

    def of(self, rank: int):
        ranks = self

        class Mine:
            def any(self, mine: bool) -> bool:
                ranks.votes[rank] = mine
                ranks.barrier.wait()
                result = any(ranks.votes)
                ranks.barrier.wait()
                return result

        return Mine()


@pytest.mark.parametrize("kept", [True, False])
def test_h10_an_idle_rank_takes_part_in_every_step(kit, nano, kept):
    requests = {str(i): (kit.prompt_of(9, i), sampled(i, max_tokens=9)) for i in range(2)}
    expected, _ = truth(kit, nano, requests)
    ranks, outcomes, errors = Ranks(20.0 if kept else 0.3), {}, []
    barrier = threading.Barrier(2, timeout=20.0 if kept else 0.3)

    def rank(number: int) -> None:
        try:
            engine = kit.engine_of(nano)
            engine.overlap(InOrder())
            engine.lockstep = Lockstep(ranks.of(number), agreed=kept)
            forward = engine.runner.forward

            def collective(*args):
                barrier.wait()  # expert parallel: every rank has to be in the same forward pass
                return forward(*args)

            engine.runner.forward = collective
            for name, (prompt, params) in requests.items() if number == 0 else ():
                engine.add(name, prompt, params)
            tokens: dict[str, list[int]] = {}
            for _ in range(40):
                for event in engine.step():
                    if hasattr(event, "token_id"):
                        tokens.setdefault(event.request_id, []).append(event.token_id)
            outcomes[number] = (tokens, engine.forwards)
        except threading.BrokenBarrierError as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if kept:
        assert not errors and outcomes[0][0] == {n: expected[n][0] for n in requests}
        assert outcomes[0][1] == outcomes[1][1] > 3 and outcomes[1][0] == {}
    else:
        assert errors


@pytest.mark.parametrize("kept", [True, False])
def test_h11_padding_rows_touch_nothing(kit, nano, kept):
    requests = {str(i): (kit.prompt_of(30 + i, i), sampled(i)) for i in range(3)}
    expected, known = truth(kit, nano, requests)
    engine = late(kit, nano, known=known, rules=Rules(padding_apart=kept))
    engine.pipeline.spare_rows = 1

    def nothing_is_touched():
        right = kit.run(engine, requests) == expected
        return right and not any(p.main[0].any() or p.index[0].any() for p in engine.cache.pools.values())

    assert holds(nothing_is_touched) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_h12_a_step_sees_one_version_of_the_weights(kit, nano, kept):
    """Weights change while a step is between its forward pass and its drafts."""
    engine = kit.engine_of(nano)
    engine.overlap(InOrder(), Rules(flips_between=kept))
    pipeline, seen, version = engine.pipeline, [], [0]
    forward, draft = pipeline._forward, pipeline._draft
    pipeline._forward = lambda flight: (seen.append([flight.weights, version[0]]), forward(flight))[1]
    pipeline._draft = lambda *args: (seen[-1].append(version[0]), draft(*args))[1]
    pipeline.written = lambda *_: pipeline.flip(lambda: version.__setitem__(0, version[0] + 1))
    kit.run(engine, {"r": ([5, 9], sampled(1))})
    assert version[0] > 5
    torn = [entry for entry in seen if len(set(entry)) > 1]
    assert (torn == []) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_h13_a_slow_host_is_reported(kept, caplog):
    clock = StepClock(alarm=kept)
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            clock.host(0.009)
            clock.device(0.010)
    assert (clock.alarms > 0) == (len(caplog.records) == 1) == kept
    assert clock.host_share == pytest.approx(0.9) and clock.steps == 200


def test_h13_a_quick_host_is_not(caplog):
    clock = StepClock()
    for _ in range(200):
        clock.host(0.002)
        clock.device(0.010)
    assert clock.alarms == 0 and not caplog.records
