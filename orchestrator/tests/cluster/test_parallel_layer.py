"""One layer's experts over ranks: the bits of one rank, whatever the placement, for any number of ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference_threads import reference_threads

import ep_comm
import mega_moe
from orchestrator.balance.eplb import Placement, RankSlots, initial, routing_table, smallest_slots
from orchestrator.cluster.counts import StepCounts
from orchestrator.model.expert_parallel import ExpertPool, HeldExperts, ParallelExperts, fill
from orchestrator.model.expert_parallel.pool import ExpertShapes

HIDDEN, WIDTH, EXPERTS, TOP_K = 128, 32, 12, 3


@pytest.fixture(scope="module")
def weights():
    rng = torch.Generator().manual_seed(3)

    def codes(*shape):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng)

    def scales(*shape):
        return torch.randint(120, 127, shape, dtype=torch.uint8, generator=rng)

    def fp8(*shape):
        return (torch.randn(shape, generator=rng) * 0.2).to(torch.float8_e4m3fn)

    shared = mega_moe.SharedExpert(
        fp8(2 * WIDTH, HIDDEN), scales(2 * WIDTH // 32, HIDDEN // 32), fp8(HIDDEN, WIDTH), scales(HIDDEN // 32, 1)
    )
    made = SimpleNamespace(
        w13=codes(EXPERTS, 2 * WIDTH, HIDDEN // 2), s13=scales(EXPERTS, 2 * WIDTH, HIDDEN // 32),
        w2=codes(EXPERTS, HIDDEN, WIDTH // 2), s2=scales(EXPERTS, HIDDEN, WIDTH // 32), shared=shared,
    )  # fmt: skip
    parts = (made.w13, made.s13, made.w2, made.s2)
    made.read = lambda layer, expert: torch.cat([t[expert].flatten() for t in parts])
    return made


def shuffled(ranks, slots, seed):
    """A legal placement that is not in order: experts once, then copies where there is room."""
    rng = np.random.default_rng(seed)
    table = np.full((ranks, slots), -1, np.int32)
    for i, expert in enumerate(rng.permutation(EXPERTS)):
        table[i % ranks, i // ranks] = expert
    for rank in range(ranks):
        free = rng.permutation(np.setdiff1d(np.arange(EXPERTS), table[rank]))
        holes = np.flatnonzero(table[rank] < 0)
        table[rank, holes[: len(free)]] = free[: len(holes)]
    return Placement(table[None], EXPERTS)


def run_ranks(placement, weights, inputs, *, counts=None, dispatch="float32", combine="slots"):
    """Each rank's output of (x, ids, weights, padding or None)."""
    ranks, slots = placement.ranks, placement.slots
    links = reference_threads(ep_comm.Shape(ranks, 40, HIDDEN, TOP_K, slots, dispatch))
    outs, errors = [None] * ranks, []

    def rank(number):
        try:
            pool = ExpertPool(ExpertShapes.of(HIDDEN, WIDTH), slots + 1)
            held = HeldExperts(RankSlots(number, placement, 1), pool)
            fill(held, weights)
            mine = None if counts is None else counts[number]
            layer = ParallelExperts(0, links[number], held, weights.shared, 10.0, mine, combine)
            outs[number] = layer(*inputs[number])
        except BaseException as error:
            errors.append(error)
            links[number].abort(str(error))

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return outs


def inputs_of(ranks, seed, sizes=None):
    rng = torch.Generator().manual_seed(seed)
    made = []
    for rank in range(ranks):
        count = sizes[rank % len(sizes)] if sizes else int(torch.randint(0, 40, (1,), generator=rng))
        ids = torch.rand(count, EXPERTS, generator=rng).topk(TOP_K).indices.to(torch.int32)
        x, chances = torch.randn(count, HIDDEN, generator=rng), torch.rand(count, TOP_K, generator=rng)
        made.append((x, ids, chances, None))
    return made


def on_one_rank(weights, x, ids, chances):
    w = weights
    return mega_moe.fused_experts(x, ids, chances, w.w13, w.s13, w.w2, w.s2, limit=10.0, shared=w.shared)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8])
def test_the_bits_of_one_rank(weights, ranks):
    slots = smallest_slots(EXPERTS, ranks) + (ranks > 1)
    inputs = inputs_of(ranks, ranks)
    for placement in (initial(1, EXPERTS, ranks, slots), shuffled(ranks, slots, ranks)):
        for (x, ids, chances, _), out in zip(inputs, run_ranks(placement, weights, inputs), strict=True):
            assert torch.equal(out.view(torch.int32), on_one_rank(weights, x, ids, chances).view(torch.int32))


def test_ranks_without_tokens_and_one_hot_expert(weights):
    inputs = inputs_of(4, 1, sizes=[0, 40, 0, 1])
    for _, ids, _, _ in inputs:
        ids[:, 0] = 0
        ids[:, 1] = -1
    for (x, ids, chances, _), out in zip(inputs, run_ranks(initial(1, EXPERTS, 4, 4), weights, inputs), strict=True):
        assert out.shape == x.shape and torch.equal(out, on_one_rank(weights, x, ids, chances))
    nobody = inputs_of(3, 1, sizes=[0])
    assert all(out.shape == (0, HIDDEN) for out in run_ranks(initial(1, EXPERTS, 3, 4), weights, nobody))


def test_padding_goes_nowhere_and_is_not_counted(weights):
    inputs = inputs_of(2, 5, sizes=[8])
    padded = []
    for x, ids, chances, _ in inputs:
        padding = torch.arange(8) >= 5
        ids[5:] = torch.tensor([0, 1, 2], dtype=torch.int32)  # what a router makes of garbage
        x[5:] = float("nan")
        padded.append((x, ids, chances, padding))
    counts = [StepCounts(1, EXPERTS, TOP_K, 4) for _ in range(2)]
    outs = run_ranks(initial(1, EXPERTS, 2, 7), weights, padded, counts=counts)
    received = 0
    for (x, ids, chances, _), out, count in zip(padded, outs, counts, strict=True):
        assert torch.equal(out[:5], on_one_rank(weights, x[:5], ids[:5], chances[:5]))
        count.ended()
        count.file(count.oldest().kinds)
        assert count.window.last().sum() == 5 * TOP_K
        assert (count.window.last()[0, 0] == np.bincount(ids[:5].flatten(), minlength=EXPERTS)).all()
        received += count.last_received().sum()
    assert received == 2 * 5 * TOP_K


@pytest.mark.parametrize("dispatch", ["bfloat16", "fp8"])
def test_rounding_on_the_way_does_not_depend_on_places(weights, dispatch):
    inputs = inputs_of(3, 9, sizes=[7, 30, 13])
    first = run_ranks(initial(1, EXPERTS, 3, 5), weights, inputs, dispatch=dispatch)
    second = run_ranks(shuffled(3, 5, 2), weights, inputs, dispatch=dispatch)
    for a, b, (x, ids, chances, _) in zip(first, second, inputs, strict=True):
        assert torch.equal(a, b)
        exact = on_one_rank(weights, x, ids, chances)
        assert (a - exact).abs().max() < 0.1 * exact.abs().max() and not torch.equal(a, exact)


def test_added_up_on_each_rank(weights):
    inputs = inputs_of(3, 4)
    for (x, ids, chances, _), out in zip(
        inputs, run_ranks(shuffled(3, 5, 1), weights, inputs, combine="ranks"), strict=True
    ):
        torch.testing.assert_close(out, on_one_rank(weights, x, ids, chances), rtol=1e-5, atol=1e-5)


def test_choice_is_that_of_the_routing_table():
    rng = np.random.default_rng(1)
    for ranks, slots in ((2, 9), (5, 4), (8, 2)):
        placement = shuffled(ranks, slots, ranks)
        table = routing_table(placement.experts[0], EXPERTS)
        for rank in range(ranks):
            ids = rng.integers(-1, EXPERTS, (33, TOP_K)).astype(np.int32)
            held = HeldExperts(RankSlots(rank, placement, 1), ExpertPool(ExpertShapes.of(32, 32), slots + 1))
            chosen = held.choose(0, torch.from_numpy(ids)).numpy()
            assert (chosen == table.choose(ids, rank, np.arange(33))).all()


def test_a_rank_that_counts_wrongly_is_refused():
    counts = StepCounts(2, EXPERTS, TOP_K, 4)
    ids = np.zeros((4, TOP_K), np.int32)
    counts.routed(0, ids, np.ones(4, np.bool_))
    with pytest.raises(ValueError, match="each once a step"):
        counts.routed(0, ids, np.ones(4, np.bool_))
    counts._rows[1] = 4  # rows that no layer noted
    with pytest.raises(ValueError, match="tokens"):
        counts.ended()


@pytest.mark.parametrize("statistics", ["all", "prefill", "decode"])
def test_prompts_and_decoding_are_counted_apart(statistics):
    """Two ranks, one of which reads a prompt in one of its steps: both file that step as one of either kind."""
    rng = np.random.default_rng(3)
    ranks = [StepCounts(1, EXPERTS, TOP_K, 2, statistics) for _ in range(2)]
    told = {kind: [] for kind in ("prefill", "decode")}
    for step in range(4):
        kinds = 0
        for rank, counts in enumerate(ranks):
            ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(6)], np.int32)
            owner, valid = np.array([0, 0, 0, 1, 2, 9]), np.arange(6) < 5  # the last row is padding
            counts.began([step == 2 and rank == 0, False])  # the third request is one of an overlapped step's end
            counts.routed(0, ids, valid, owner)
            counts.received(0, 7 + step)
            counts.ended()
            kinds |= counts.oldest().kinds
            reads = valid & (owner == 0) & (step == 2 and rank == 0)
            for kind, mine in (("prefill", reads), ("decode", valid & ~reads)):
                told[kind].append(np.bincount(ids[mine].ravel(), minlength=EXPERTS))
        for counts in ranks:
            counts.file(kinds)
    assert ranks[0].steps == ranks[1].steps == {"all": 4, "prefill": 1, "decode": 4}
    assert ranks[0].last_kinds().tolist() == [2, 2, 3, 2] and (ranks[1].last_received() == [[7], [8], [9], [10]]).all()
    both = np.array(told["prefill"]) + np.array(told["decode"])
    by_step = {"all": both, "prefill": np.array(told["prefill"])[4:6], "decode": np.array(told["decode"])}[statistics]
    for rank, counts in enumerate(ranks):
        expected = by_step[rank::2][-2:]
        assert (counts.window.last()[:, 0] == expected).all() and len(counts.window.last()) == len(expected)


def test_without_owners_a_step_is_of_one_kind():
    counts = StepCounts(1, EXPERTS, TOP_K, 4)
    for prompts, kinds in (((), 2), ((True, True), 1), ((True, False), 2)):
        counts.began(prompts)
        counts.routed(0, np.zeros((2, TOP_K), np.int32), np.ones(2, np.bool_))
        counts.ended()
        assert counts.oldest().kinds == kinds
        counts.file(kinds)
    counts.began(())
    counts.ended()  # a rank without a row
    assert counts.oldest().kinds == 0 and not counts.oldest().routed.any()
