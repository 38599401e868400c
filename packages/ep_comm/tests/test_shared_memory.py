"""Processes of one host: the same bits as the reference, and what happens when one of them goes."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest
import torch
from rank_group import check_round_trip, on_threads, random_step, results_of, round_trip
from rank_processes import Processes

import ep_comm
from ep_comm import Shape, Transfer

TINY = Shape(3, 2, 4, 1, 1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "region"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_processes_are_the_reference(ranks, path):
    shape = Shape(ranks, 6, 128, 3, 2, dispatch="fp8", combine="bfloat16")
    steps = [random_step(shape, seed) for seed in range(10)]

    def work(rank):
        comm = ep_comm.shared_memory(path, rank, shape, timeout=20)
        got = [round_trip(comm, step, fixed=n % 2 == 0, slots=n % 3 != 0) for n, step in enumerate(steps)]
        mine = torch.full((200_000,), rank, dtype=torch.uint8)
        from_left = torch.zeros_like(mine)
        left, right = (rank - 1) % ranks, (rank + 1) % ranks
        moving = comm.move([Transfer(1, rank, right, mine), Transfer(2 if ranks == 1 else 1, left, rank, from_left)])
        total = comm.all_reduce(torch.tensor([rank]))
        moving.wait()
        comm.barrier()
        comm.close()
        return got, int(total), from_left[[0, -1]].tolist()

    with Processes(ranks, work) as processes:
        reports = processes.reports()
    for n, step in enumerate(steps):
        check_round_trip(shape, step, [r[0][n] for r in reports], fixed=n % 2 == 0, slots=n % 3 != 0, epoch=2 * n + 1)
    for rank, (_, total, moved) in enumerate(reports):
        assert total == sum(range(ranks))
        assert moved == ([(rank - 1) % ranks] * 2 if ranks > 1 else [0, 0])
    assert not path.exists() and not list(path.parent.iterdir())


@pytest.mark.parametrize("when", ["waits for it", "while it moves"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_process_is_noticed_by_all(how, when, path):
    def work(rank):
        comm = ep_comm.shared_memory(path, rank, TINY, timeout=20)
        comm.barrier()
        comm.timeout = 0.5
        if rank == 1:
            os.kill(os.getpid(), how)
        if when == "while it moves":
            comm.move([Transfer(1, 1, rank, torch.zeros(8, dtype=torch.uint8))]).wait(0.5)
        comm.all_gather(torch.ones(1, dtype=torch.int64))
        return "nothing noticed"

    begun = time.monotonic()
    with Processes(3, work) as processes:
        reports = [processes.report(rank, 8) for rank in (0, 2)]
    assert time.monotonic() - begun < 10
    for report in reports:
        if how == signal.SIGKILL:
            assert "rank 1 is gone: its process" in report
        else:
            assert "for rank 1 in" in report


def test_a_process_that_ends_without_a_word(path):
    def work(rank):
        comm = ep_comm.shared_memory(path, rank, TINY, timeout=20)
        comm.barrier()
        if rank == 2:
            os._exit(3)
        begun = time.monotonic()
        try:
            comm.barrier()
        except ep_comm.Broken as error:
            return str(error), time.monotonic() - begun
        return None

    with Processes(3, work) as processes:
        for text, seconds in [processes.report(rank) for rank in (0, 1)]:
            assert "rank 2" in text and seconds < 5  # long before the time-out


def test_abort_and_mismatch_cross_processes(path):
    def work(rank):
        comm = ep_comm.shared_memory(path, rank, TINY, timeout=20)
        if rank == 0:
            comm.all_gather(torch.zeros(3, dtype=torch.int64))
        comm.barrier()

    with Processes(3, work) as processes:
        reports = processes.reports()
    for report in reports:
        assert report.startswith("Mismatch") and "barrier" in report and "all_gather of 3 values" in report


def test_who_does_not_join_is_named(path):
    def join(rank):
        return None if rank == 1 else ep_comm.shared_memory(path, rank, TINY, timeout=0.3)

    errors = on_threads(3, join)
    assert any(isinstance(e, ep_comm.PeerTimeout) and e.waiting_for == (1,) and e.kind == "join" for e in errors)
    assert all(isinstance(errors[rank], ep_comm.CommError) for rank in (0, 2))
    assert not path.exists()


def test_another_shape_is_a_mismatch_that_names_both(path):
    other = Shape(3, 2, 8, 1, 1, dispatch="bfloat16")
    first = threading.Thread(target=lambda: on_threads(1, lambda _: ep_comm.shared_memory(path, 0, TINY, timeout=0.5)))
    first.start()
    while not path.exists():
        time.sleep(0.005)
    with pytest.raises(ep_comm.Mismatch, match=r"hidden=4 .*dispatch=float32.*this rank .*hidden=8 .*bfloat16"):
        ep_comm.shared_memory(path, 1, other, timeout=0.5)
    first.join()


def test_a_place_can_be_taken_once(path):
    results = on_threads(2, lambda _: ep_comm.shared_memory(path, 2, TINY, timeout=1))
    taken = [r for r in results if isinstance(r, ValueError)]
    assert len(taken) == 1 and "rank: got 2, which process" in str(taken[0])
    assert sum(isinstance(r, ep_comm.PeerTimeout) for r in results) == 1


def test_paths_that_cannot_be_used(path):
    for content in (b"", b"x" * 10, b"something else" * 4096):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="path"):
            ep_comm.shared_memory(path, 0, TINY, timeout=0.2)
        assert path.read_bytes() == content
    with pytest.raises(OSError) as error:
        ep_comm.shared_memory(path.parent / "none" / "region", 0, TINY)
    assert error.value.errno == errno.ENOENT
    for rank in (-1, 3):
        with pytest.raises(ValueError, match="rank"):
            ep_comm.shared_memory(path, rank, TINY)
    with pytest.raises(ValueError, match="timeout"):
        ep_comm.shared_memory(path, 0, TINY, timeout=float("inf"))


def test_too_little_room_is_said_before_anything_is_written(path):
    stats = os.statvfs(path.parent)
    room = stats.f_bavail * stats.f_frsize
    rows = room // 4096 + 100_000
    if rows >= 2**31:
        pytest.skip("more room here than a region can ask for")
    with pytest.raises(OSError):
        ep_comm.shared_memory(path, 0, Shape(1, rows, 1024, 1, 1))
    assert not list(path.parent.iterdir())


def test_ctrl_c_ends_a_wait_and_peers_hear_of_it(path):
    def work(rank):
        comm = ep_comm.shared_memory(path, rank, Shape(2, 1, 4, 1, 1), timeout=20)
        comm.barrier()
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                comm.barrier()  # rank 1 never comes
            except KeyboardInterrupt:
                return "interrupted"
        time.sleep(0.6)
        comm.all_gather(torch.zeros(1, dtype=torch.int64))

    with Processes(2, work) as processes:
        begun = time.monotonic()
        assert processes.report(0) == "interrupted"
        assert time.monotonic() - begun < 5
        assert processes.report(1).startswith("Mismatch")  # it was in another collective, and sees that first


def test_new_group_at_the_path_of_an_old_one(path):
    for _ in range(3):
        comms = results_of(3, lambda rank: ep_comm.shared_memory(path, rank, TINY, timeout=20))
        results_of(3, lambda rank, comms=comms: comms[rank].barrier())
        for comm in comms:
            comm.close()
        assert not path.exists()
