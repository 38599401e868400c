"""Ranks as threads against the reference, to the bit."""

from __future__ import annotations

import random
import time

import pytest
import torch
from rank_group import (
    check_dispatched,
    check_round_trip,
    expert_rows,
    on_threads,
    random_step,
    results_of,
    round_trip,
)

import ep_comm
import kernel_core
from ep_comm import Shape
from ep_comm.native import native, native_shape
from ep_comm.over_groups.records import record_of

WORLDS = [1, 2, 3, 4, 5, 6, 7, 8]


def _run(shape, step, comms, *, fixed, slots):
    got = results_of(shape.ranks, lambda rank: round_trip(comms[rank], step, fixed=fixed, slots=slots))
    check_round_trip(shape, step, got, fixed=fixed, slots=slots, epoch=comms[0].epoch - 1)
    return got


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("ranks", WORLDS)
def test_random_steps_are_the_reference(ranks, fixed, slots):
    formats = [("float32", "float32"), ("bfloat16", "float32"), ("fp8", "bfloat16")]
    for number, (dispatch, combine) in enumerate(formats):
        shape = Shape(ranks, 7, 256, 3, 4, dispatch=dispatch, combine=combine)
        comms = ep_comm.threads(shape, timeout=20)
        for seed in range(3):
            _run(shape, random_step(shape, seed + 10 * number), comms, fixed=fixed, slots=slots)


@pytest.mark.parametrize("routing", ["any", "one rank", "hot expert", "none"])
@pytest.mark.parametrize("tokens", [[0, 0, 0], [1, 1, 1], [9, 9, 9], [9, 0, 4], [0, 0, 1]])
def test_ragged_counts_and_lopsided_routing(tokens, routing):
    shape = Shape(3, 9, 32, 4, 2)
    comms = ep_comm.threads(shape, timeout=20)
    for slots in (True, False):
        _run(shape, random_step(shape, 5, tokens, routing), comms, fixed=slots, slots=slots)


def test_bfloat16_inputs_and_results_travel_too():
    shape = Shape(2, 6, 128, 2, 3, dispatch="fp8", combine="bfloat16")
    step = random_step(shape, 3, [6, 5])
    step.xs = [x.bfloat16() for x in step.xs]
    comms = ep_comm.threads(shape, timeout=20)
    got = results_of(2, lambda rank: comms[rank].dispatch(step.xs[rank], step.ids[rank], step.weights[rank]))
    want = ep_comm.reference.dispatch(shape, step.xs, step.ids, step.weights)
    for rank in range(2):
        check_dispatched(got[rank], want[rank])
    ys = [expert_rows(shape, rank, want[rank]).bfloat16() for rank in range(2)]
    outs = results_of(2, lambda rank: comms[rank].combine(ys[rank], got[rank]))
    for out, expected in zip(outs, ep_comm.reference.combine(shape, ys, want, step.ids), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize("isa", ["scalar", "best"])
def test_every_value_is_rounded_as_by_torch(isa):
    specials = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3e38, 448.0, 464.0, 2**-9, 2**-10]
    g = torch.Generator().manual_seed(1)
    x = torch.randn(40, 1280, generator=g) * torch.exp2(torch.randint(-12, 12, (40, 1), generator=g).float())
    x[:, :11] = torch.tensor(specials)
    x[5:, 0:5] = 1.0
    ids, weights = torch.zeros(40, 1, dtype=torch.int32), torch.ones(40, 1)
    for dispatch in ("float32", "bfloat16", "fp8"):
        shape = Shape(1, 40, 1280, 1, 1, dispatch=dispatch)
        kernel_core.limit_isa(isa)
        try:
            got = ep_comm.threads(shape)[0].dispatch(x, ids, weights)
        finally:
            kernel_core.limit_isa("best")
        check_dispatched(got, ep_comm.reference.dispatch(shape, [x], [ids], [weights])[0])


def test_results_go_into_out_and_nowhere_else():
    shape = Shape(2, 5, 64, 2, 2)
    step, comms = random_step(shape, 8, [5, 3]), ep_comm.threads(shape, timeout=20)
    backs = [torch.full((n + 2, 64), float("nan")) for n in (5, 3)]

    def work(rank):
        got = comms[rank].dispatch(step.xs[rank], step.ids[rank], step.weights[rank])
        return got, comms[rank].combine(expert_rows(shape, rank, got), got, out=backs[rank][1:-1])

    got = results_of(2, work)
    check_round_trip(shape, step, got, fixed=False, slots=True, epoch=1)
    for back, (_, out) in zip(backs, got, strict=True):
        assert out.data_ptr() == back[1].data_ptr()
        assert back[0].isnan().all() and back[-1].isnan().all()


def test_collectives_of_the_host():
    comms = ep_comm.threads(Shape(5, 1, 4, 1, 1), timeout=20)

    def work(rank):
        comm = comms[rank]
        sums = comm.all_reduce(torch.tensor([rank, -rank, 2**40]))
        comm.barrier()
        most = comm.all_reduce(torch.tensor([rank]), "max"), comm.all_reduce(torch.tensor([rank]), "min")
        return sums.tolist(), [int(m) for m in most], comm.all_gather(torch.full((65536,), rank))

    for sums, most, rows in results_of(5, work):
        assert sums == [10, -10, 5 * 2**40] and most == [4, 0]
        assert torch.equal(rows, torch.arange(5)[:, None].expand(5, 65536))


def test_a_thousand_steps_with_delays_give_the_same_bits_twice():
    shape = Shape(3, 4, 32, 2, 2)
    steps = [random_step(shape, seed) for seed in range(8)]

    def run(seed):
        comms = ep_comm.threads(shape, timeout=20)

        def work(rank):
            delays, outs = random.Random(seed * 10 + rank), []
            for number in range(500):  # two collectives each
                if delays.random() < 0.05:
                    time.sleep(delays.random() * 1e-3)
                outs.append(round_trip(comms[rank], steps[number % 8], fixed=number % 3 == 0)[1])
            return outs

        return results_of(3, work)

    first, second = run(1), run(2)
    for number in range(500):
        for rank in range(3):
            assert torch.equal(first[rank][number], second[rank][number])
            assert torch.equal(first[rank][number], first[rank][number % 8])


def test_mismatch_names_both_on_all_ranks():
    comms = ep_comm.threads(Shape(3, 2, 4, 1, 1), timeout=20)
    for error in on_threads(3, lambda r: comms[r].barrier() if r != 1 else comms[r].all_gather(torch.ones(2).long())):
        assert isinstance(error, ep_comm.Mismatch)
        assert "barrier" in str(error) and "all_gather of 2 values" in str(error) and "epoch 1" in str(error)
    with pytest.raises(ep_comm.Broken, match="barrier"):
        comms[0].barrier()


@pytest.mark.parametrize("what", ["form", "length"])
def test_details_have_to_agree_too(what):
    shape = Shape(2, 2, 4, 1, 1)
    comms = ep_comm.threads(shape, timeout=20)
    step = random_step(shape, 1, [2, 2], "hot expert")

    def work(rank):
        if what == "length":
            return comms[rank].all_gather(torch.zeros(rank + 1, dtype=torch.int64))
        return round_trip(comms[rank], step, slots=rank == 0)

    assert all(isinstance(error, ep_comm.Mismatch) for error in on_threads(2, work))


def test_who_waits_for_whom():
    comms = ep_comm.threads(Shape(4, 2, 4, 1, 1), timeout=0.3)
    begun = time.monotonic()
    errors = on_threads(4, lambda rank: None if rank in (1, 3) else comms[rank].barrier())
    assert time.monotonic() - begun < 5
    timeouts = [e for e in errors if isinstance(e, ep_comm.PeerTimeout)]
    assert timeouts and all(e.waiting_for == (1, 3) and e.kind == "barrier" and e.epoch == 1 for e in timeouts)
    assert "for ranks 1, 3 in barrier, epoch 1" in str(timeouts[0])
    assert all(isinstance(errors[r], (ep_comm.PeerTimeout, ep_comm.Broken)) for r in (0, 2))
    with pytest.raises(ep_comm.Broken):  # late, and told why
        comms[1].barrier()


def test_abort_ends_all_waits_from_any_thread():
    comms = ep_comm.threads(Shape(3, 2, 4, 1, 1), timeout=20)

    def work(rank):
        if rank == 2:
            time.sleep(0.1)
            comms[0].abort("the engine stops")
            comms[0].abort("again")
            return None
        return comms[rank].barrier()

    begun = time.monotonic()
    errors = on_threads(3, work)
    assert time.monotonic() - begun < 5
    for error in errors[:2]:
        assert isinstance(error, ep_comm.Broken) and "rank 0 aborted: the engine stops" in str(error)


def test_close_lets_peers_finish_and_then_tells_them():
    comms = ep_comm.threads(Shape(2, 2, 4, 1, 1), timeout=20)

    def work(rank):
        comms[rank].barrier()
        if rank == 0:
            comms[0].close()
            comms[0].close()
            return None
        comms[1].barrier()

    assert isinstance(on_threads(2, work)[1], ep_comm.Broken)
    with pytest.raises(ep_comm.Broken, match="rank 0 closed"):
        comms[0].barrier()


def test_bad_input_leaves_the_group_usable():
    shape = Shape(2, 4, 4, 2, 1)
    comms = ep_comm.threads(shape, timeout=20)
    step = random_step(shape, 2, [3, 4])
    bad = step.ids[0].clone()
    bad[1, 1] = shape.physical_experts
    for ids in (bad, step.ids[0].long(), step.ids[0].T):
        with pytest.raises(ValueError, match="ids"):
            comms[0].dispatch(step.xs[0], ids, step.weights[0])
    with pytest.raises(ValueError, match="at most max_tokens = 4"):
        comms[0].dispatch(torch.zeros(5, 4), torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="row"):
        comms[1].all_gather(torch.zeros(0, dtype=torch.int64))
    assert [comm.epoch for comm in comms] == [0, 0]
    _run(shape, step, comms, fixed=False, slots=True)
    with pytest.raises(ValueError, match="timeout"):
        ep_comm.threads(shape, timeout=0)


def test_an_interrupted_rank_does_not_leave_peers_waiting():
    comms = ep_comm.threads(Shape(2, 2, 4, 1, 1), timeout=20)

    class Interrupting:
        def __getattr__(self, name):
            if name == "wait_posted":
                raise KeyboardInterrupt
            return getattr(end, name)

    end, comms[0]._end = comms[0]._end, Interrupting()
    errors = on_threads(2, lambda rank: [comms[rank].all_gather(torch.ones(1).long()) for _ in range(2)])
    assert isinstance(errors[0], KeyboardInterrupt)
    assert isinstance(errors[1], ep_comm.Broken) and "KeyboardInterrupt" in str(errors[1])


@pytest.mark.parametrize("dispatch", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("top_k", [1, 6, 7])
def test_records_lie_alike_in_messages_and_in_memory(dispatch, top_k):
    shape = Shape(2, 3, 384, top_k, 4, dispatch=dispatch)
    assert tuple(record_of(shape)) == native.record_offsets(native_shape(shape))
