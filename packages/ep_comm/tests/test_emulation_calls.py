"""`ep_comm.cuda` with the emulated kernels: what Python checks, allocates, passes on and raises."""

from __future__ import annotations

import ctypes
import importlib
import threading
from pathlib import Path

import pytest
import torch

from ep_comm import Broken, Mismatch, PeerTimeout, Shape, reference
from ep_comm.cuda import CopyTables, FusedExchange, FusedSizes, Together, failures, sizes, virtual, virtual_buffers
from ep_comm.cuda.meeting import Meeting
from kernel_core.testing.child import load_file

HERE = Path(__file__).parent
EMULATED, FAKE = load_file(HERE / "emulated.py"), load_file(HERE / "fake_gpu.py")
inputs, assert_rows = EMULATED.inputs, EMULATED.assert_rows


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return EMULATED.device_code(tmp_path_factory.mktemp("ep"))


@pytest.fixture
def fake(monkeypatch, library):
    return FAKE.use(monkeypatch, library)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "fp8"])
def test_round_trips(fake, form):
    shape = Shape(3, 5, 128, 3, 2, form, "bfloat16")
    group = Together(virtual(shape))
    for turn in range(4):
        fixed, slots, dtype = turn % 2 == 0, turn < 2, torch.bfloat16 if turn % 3 else torch.float32
        xs, ids, weights = inputs(shape, [5, 0, turn], turn, dtype=dtype)
        got = group.dispatch(xs, ids, weights, fixed=fixed)
        expected = reference.dispatch(shape, xs, ids, weights, fixed=fixed)
        assert_rows(shape, got, expected)
        assert all(d.epoch == 3 * turn + 1 and d.fixed is fixed for d in got)
        ys = [torch.randn(len(d.ids), *([3] if slots else []), 128).to(dtype) for d in got]
        outs = group.combine(ys, got)
        assert all(map(torch.equal, outs, reference.combine(shape, ys, expected, ids)))
        given = [torch.full_like(o, float("nan")) for o in outs]
        assert group.combine(ys, got, outs=given)[0] is given[0]
        assert all(map(torch.equal, outs, given))
    group.barrier()
    group.check()


def test_bad_input_is_refused_before_anything_is_sent(fake):
    shape = Shape(2, 4, 128, 2, 2)
    comms = virtual(shape, packed=False)
    group = Together(comms)
    xs, ids, weights = inputs(shape, [4, 3], 1)
    calls = fake.seed
    for name, given in (
        ("x", ([x.half() for x in xs], ids, weights)),
        ("x", ([torch.zeros(5, 128)] * 2, ids, weights)),
        ("ids", (xs, [i.long() for i in ids], weights)),
        ("weights", (xs, ids, [w[:, :1] for w in weights])),
    ):
        with pytest.raises(ValueError, match=name):
            group.dispatch(*given, fixed=True)
    with pytest.raises(ValueError, match="fixed"):
        group.dispatch(xs, ids, weights, fixed=False)
    with pytest.raises(ValueError, match="dispatched"):
        comms[0].combine(torch.zeros(8, 128), reference.dispatch(shape, xs, ids, weights)[0])
    assert fake.seed == calls
    got = group.dispatch(xs, ids, weights, fixed=True)
    assert_rows(shape, got, reference.dispatch(shape, xs, ids, weights, fixed=True))


def test_sizes_that_kernels_do_not_take(fake):
    for name, shape in (("hidden", Shape(2, 4, 24, 2, 2)), ("ranks", Shape(65, 4, 16, 2, 2)),
                        ("top_k", Shape(2, 4, 16, 33, 40))):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            virtual(shape)
    with pytest.raises(ValueError, match="ctas"):
        virtual(Shape(2, 4, 16, 2, 2), ctas=67)
    with pytest.raises(ValueError, match="timeout"):
        virtual(Shape(2, 4, 16, 2, 2), timeout=0)
    comms = virtual(Shape(2, 4, 16, 2, 2))
    with pytest.raises(ValueError, match="ranks"):
        Together(comms[:1])
    with pytest.raises(ValueError, match="ranks"):
        Together(comms[::-1])
    for tokens, most, fixed, ctas in ((1, 132, True, 8), (16, 132, True, 32), (128, 64, True, 64), (1, 16, False, 16)):
        assert sizes.ctas_of(Shape(8, tokens, 16, 2, 2), most, fixed) == ctas


def test_a_missing_rank_an_abort_and_an_end(fake):
    comms = virtual(Shape(2, 4, 16, 2, 2), timeout=0.3)
    comms[0].barrier()
    with pytest.raises(PeerTimeout) as caught:
        comms[0].barrier()
    assert caught.value.waiting_for == (1,) and caught.value.kind == "barrier" and caught.value.epoch == 1
    with pytest.raises(Broken):
        comms[0].barrier()
    with pytest.raises(Broken):
        comms[0].all_gather(torch.tensor([1]))
    comms[1].barrier()
    with pytest.raises(Broken, match="rank 0 had waited too long"):
        comms[1].check()
    comms = virtual(Shape(2, 4, 16, 2, 2), timeout=100)
    comms[1].abort("a test")
    comms[1].abort("again")
    comms[0].barrier()
    with pytest.raises(Broken, match="rank 1 aborted"):
        comms[0].check()
    with pytest.raises(Broken, match="a test"):
        comms[1].barrier()
    comms[0].close()
    comms[0].close()


def test_a_report_says_what_happened():
    def report(*words):
        return torch.frombuffer(bytearray(failures._REPORT.pack(*words)), dtype=torch.uint8)

    assert failures.failure(report(0, 1, 2, 3, 4), 0, 1.0) is None
    error = failures.failure(report(1, 2, 9, 0b1010, 0), 0, 2.5)
    assert isinstance(error, PeerTimeout)
    assert str(error) == "rank 0 waited 2.5 s for ranks 1, 3 in combine, epoch 9"
    error = failures.failure(report(2, 1, 9, 0b100, 9 << 24 | 3 << 16 | 0), 0, 2.5)
    assert isinstance(error, Mismatch) and "dispatch" in str(error) and "rank 2 is in barrier" in str(error)
    assert "rank 5 closed" in str(failures.failure(report(3, 3, 9, 1, 2 | 5 << 8), 0, 2.5))


def test_meeting_on_the_host():
    meeting = Meeting(3)
    results = {}

    def run(rank):
        for turn in range(20):
            results[rank, turn] = meeting.gather(rank, torch.tensor([rank, turn]), turn, 10.0)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert len(results) == 60
    assert all(value.tolist() == [[r, turn] for r in range(3)] for (_, turn), value in results.items())
    with pytest.raises(PeerTimeout) as caught:
        meeting.gather(1, torch.tensor([1]), 21, 0.05)
    assert caught.value.waiting_for == (0, 2)
    with pytest.raises(Broken):
        meeting.gather(0, torch.tensor([1]), 21, 5.0)


def test_fused_buffers_are_the_ranks_own_and_apart():
    buffers = virtual_buffers(FusedSizes(3, 5, 32, 2), torch.device("cpu"))
    for r in range(3):
        for value, tensor in enumerate(
            (buffers[r].x[r], buffers[r].slots[r], buffers[r].weights[r], buffers[r].parts[r])
        ):
            tensor.fill_(10 * r + value)
    for seen in buffers:
        for r in range(3):
            for value, tensor in enumerate((seen.x[r], seen.slots[r], seen.weights[r], seen.parts[r])):
                assert (tensor == 10 * r + value).all()
            assert seen.flags[r].tolist() == [0] * 6 and seen.parts[r].shape == (15, 32)
            assert seen.x[r].data_ptr() % 16 == 0 and seen.parts[r].data_ptr() % 16 == 0
        assert seen.mine.shape == (15, 2) and (seen.mine == 10 * seen.rank + 1).all()
    tables = buffers[1].tables()
    assert (tables.rank, tables.rows_of_rank, tables.everybody) == (1, 10, 15)
    with pytest.raises(ValueError, match="hidden"):
        FusedSizes(2, 5, 24, 2)


def test_what_publish_is_given(fake):
    shape = Shape(2, 6, 32, 2, 3, "bfloat16")
    comm = virtual(shape)[1]
    buffers = virtual_buffers(FusedSizes(2, 6, 32, 2), torch.device("cpu"))
    exchange = FusedExchange(comm, buffers[1])
    (x, ids, weights) = (t[0] for t in inputs(shape, [4], 1))
    copies = CopyTables(*(torch.zeros(n, dtype=torch.int32) for n in (5, 5)), torch.zeros(5, 2, dtype=torch.int32))
    routed, received = torch.zeros(5, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    got = exchange.publish(x, ids, weights, copies=copies, routed=routed, received=received)
    rank, given = fake.published[-1]
    assert rank.tokens == 4 and rank.x == x.data_ptr() and not rank.x_narrow and rank.ids == ids.data_ptr()
    assert given["rows"] == buffers[1].x[1].data_ptr() and given["physical"] == got.data_ptr()
    assert given["logical"] == 5 and given["routed"] == routed.data_ptr() and given["padding"] == 0
    table = (ctypes.c_int64 * 2).from_address(given["slots"])
    assert list(table) == [b.data_ptr() for b in buffers[1].slots] and comm.epoch == 1
    calls = len(fake.published)
    for name, wrong in (
        ("ids", dict(ids=ids.long())),
        ("x", dict(x=torch.zeros(7, 32), ids=ids[:0], weights=weights[:0])),
        ("copies", dict(copies=CopyTables(copies.own, copies.counts[:4], copies.copies))),
        ("routed", dict(copies=copies, routed=routed[:4])),
        ("routed", dict(routed=routed)),
        ("padding", dict(padding=torch.zeros(3, dtype=torch.bool))),
    ):
        with pytest.raises(ValueError, match=name):
            exchange.publish(**(dict(x=x, ids=ids, weights=weights) | wrong))
    assert len(fake.published) == calls
    with pytest.raises(ValueError, match="max_tokens"):
        FusedExchange(comm, virtual_buffers(FusedSizes(2, 5, 32, 2), torch.device("cpu"))[1])
    with pytest.raises(ValueError, match="rank"):
        FusedExchange(comm, buffers[0])


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_processes_gather_through_their_store(kind, tmp_path):
    dist = torch.distributed
    peers = importlib.import_module("ep_comm.cuda.peers")

    def connection(rank, ranks):
        made = peers.PeerConnection.__new__(peers.PeerConnection)
        base = shared if kind == "hash" else dist.FileStore(str(tmp_path / "store"), -1)
        made.addresses, made._rank, made._store = [0] * ranks, rank, dist.PrefixStore("ep", base)
        made._gathered, made._ended = 0, ""
        return made

    shared = dist.HashStore()
    results = {}

    def run(rank):
        mine = connection(rank, 3)
        for turn in range(8):
            results[rank, turn] = mine.gather(torch.tensor([rank, -turn]), turn, 10.0)
        if rank != 1:
            with pytest.raises(PeerTimeout) as caught:
                mine.gather(torch.tensor([0]), 8, 0.2)
            results[rank, "late"] = caught.value.waiting_for

    threads = [threading.Thread(target=run, args=(r,)) for r in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert all(results[r, turn].tolist() == [[p, -turn] for p in range(3)] for r in range(3) for turn in range(8))
    assert results[0, "late"] == results[2, "late"] == (1,)
