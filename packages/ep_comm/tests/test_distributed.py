"""Processes of a Gloo group: the same bits as the reference, and what happens when one of them goes."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from rank_group import check_round_trip, random_step, round_trip
from rank_processes import Processes

import ep_comm
from ep_comm import Shape, Transfer

TINY = Shape(3, 2, 4, 1, 1)


def _in_group(path, ranks, work):
    """`work(rank)` in processes of a Gloo group."""

    def run(rank):
        dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=ranks)
        return work(rank)

    return Processes(ranks, run)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_are_the_reference(ranks, tmp_path):
    shapes = [
        Shape(ranks, 6, 128, 3, 2, dispatch="fp8", combine="bfloat16"),
        Shape(ranks, 5, 12, 2, 3, dispatch="bfloat16"),
        Shape(ranks, 5, 20, 4, 1),
    ]
    steps = {shape: [random_step(shape, seed) for seed in range(4)] for shape in shapes}
    for shape in shapes:
        steps[shape].append(random_step(shape, 9, [0] * ranks))

    def work(rank):
        got = {}
        for shape in shapes:  # a communicator after the other on one group
            comm = ep_comm.distributed(None, shape, timeout=20)
            got[shape] = [
                round_trip(comm, step, fixed=n % 2 == 0, slots=n % 3 != 0) for n, step in enumerate(steps[shape])
            ]
            gathered = comm.all_gather(torch.tensor([rank, -rank]))
            comm.barrier()
            comm.close()
        return got, gathered

    with _in_group(tmp_path, ranks, work) as processes:
        reports = processes.reports()
    for shape in shapes:
        for n, step in enumerate(steps[shape]):
            for rank, report in enumerate(reports):
                assert report[1].tolist() == [[r, -r] for r in range(ranks)], rank
            got = [report[0][shape][n] for report in reports]
            check_round_trip(shape, step, got, fixed=n % 2 == 0, slots=n % 3 != 0, epoch=2 * n + 1)


def test_moves_beside_steps(tmp_path):
    shape = Shape(3, 4, 16, 2, 2)
    step, size = random_step(shape, 1), 3_000_001

    def work(rank):
        comm = ep_comm.distributed(None, shape, timeout=20)
        data = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(rank), dtype=torch.uint8)
        left, right = (rank - 1) % 3, (rank + 1) % 3
        target, none = torch.zeros_like(data), torch.empty(0, dtype=torch.uint8)
        moving = comm.move(
            [
                Transfer(5, rank, right, data),
                Transfer(5, left, rank, target),
                Transfer(6, rank, left, none),
                Transfer(6, right, rank, none),
            ]
        )
        got = [round_trip(comm, step) for _ in range(5)]
        moving.wait()
        expected = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(left), dtype=torch.uint8)
        alone = comm.move([Transfer(7, left, rank, target)])
        with pytest.raises(ep_comm.PeerTimeout, match=f"for rank {left} in move"):
            alone.wait(0.05)
        comm.barrier()
        again = comm.move([Transfer(7, left, rank, target), Transfer(7, rank, right, data)])
        again.wait()
        wrong = comm.move([Transfer(8, rank, right, data[:10]), Transfer(8, left, rank, target[:9])])
        with pytest.raises(ep_comm.Mismatch, match="expects 9 bytes"):
            wrong.wait()
        comm.barrier()
        comm.close()
        return got[-1], torch.equal(target, expected)

    with _in_group(tmp_path, 3, work) as processes:
        reports = processes.reports()
    check_round_trip(shape, step, [got for got, _ in reports], fixed=False, slots=True, epoch=9)
    assert all(equal for _, equal in reports)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_process_is_noticed_by_all(how, tmp_path):
    def work(rank):
        comm = ep_comm.distributed(None, TINY, timeout=20)
        comm.barrier()
        comm.timeout = 0.5
        if rank == 1:
            os.kill(os.getpid(), how)
        comm.all_gather(torch.ones(1, dtype=torch.int64))

    begun = time.monotonic()
    with _in_group(tmp_path, 3, work) as processes:
        reports = [processes.report(rank, 15) for rank in (0, 2)]
    assert time.monotonic() - begun < 20
    for report in reports:
        assert re.search(
            r"rank 1 is gone" if how == signal.SIGKILL else r"for ranks? (0, |)1(, 2|) in all_gather", report
        )


def test_mismatch_names_both_on_all_ranks(tmp_path):
    def work(rank):
        comm = ep_comm.distributed(None, TINY, timeout=20)
        try:
            if rank == 2:
                comm.all_gather(torch.zeros(3, dtype=torch.int64))
            comm.barrier()
        finally:
            comm.close()

    with _in_group(tmp_path, 3, work) as processes:
        for report in processes.reports():
            assert report.startswith("Mismatch") and "barrier" in report and "all_gather of 3 values" in report


def test_abort_close_and_bad_input(tmp_path):
    def work(rank):
        comm = ep_comm.distributed(None, TINY, timeout=20)
        with pytest.raises(ValueError, match="group: got 3 ranks"):
            ep_comm.distributed(None, Shape(2, 2, 4, 1, 1))
        with pytest.raises(ValueError, match="ids"):
            comm.dispatch(torch.zeros(1, 4), torch.full((1, 1), 3, dtype=torch.int32), torch.zeros(1, 1))
        assert comm.epoch == 0
        comm.barrier()
        other = ep_comm.distributed(None, TINY, timeout=20)
        if rank == 0:
            comm.abort("the engine stops")
        else:
            with pytest.raises(ep_comm.Broken, match="rank 0 aborted: the engine stops"):
                comm.barrier()
        other.barrier()  # another communicator of the group is not concerned
        if rank == 1:
            other.close()
        else:
            with pytest.raises(ep_comm.Broken, match=r"rank 1 (closed|aborted)|rank . aborted: rank 1 closed"):
                other.barrier()
        return "fine"

    with _in_group(tmp_path, 3, work) as processes:
        assert processes.reports() == ["fine"] * 3


def test_another_shape_is_a_mismatch(tmp_path):
    def work(rank):
        ep_comm.distributed(None, Shape(2, 2, 4 + 4 * rank, 1, 1), timeout=10)

    with _in_group(tmp_path, 2, work) as processes:
        for report in processes.reports():
            assert report.startswith("Mismatch") and "hidden=4" in report and "hidden=8" in report
