"""Virtual ranks on one GPU against the reference: rows, sums, orders of collectives, graphs, failures, moves."""

from __future__ import annotations

import threading

import pytest
import torch

from ep_comm import Broken, Mismatch, PeerTimeout, Shape, Transfer
from ep_comm.cuda import Together, virtual

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def round_trip(group, problem, *, fixed, slots, dtype=torch.float32):
    got = group.dispatch(*problem.on_device, fixed=fixed)
    expected = problem.expected(fixed)
    for rank, (d, e) in enumerate(zip(got, expected, strict=True)):
        problem.check_rows(rank, d, e)
    ys = problem.results(expected, slots, dtype)
    outs = group.combine([y.cuda() for y in ys], got)
    group.check()
    problem.check_sums(ys, expected, outs)
    return outs


@pytest.mark.parametrize("form", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_round_trips(problem, form, ranks):
    shape = Shape(ranks, 40, 1152, 6, 5, form, "bfloat16" if form == "bfloat16" else "float32")
    group = Together(virtual(shape))
    g = torch.Generator().manual_seed(ranks)
    for turn in range(8):
        tokens = torch.randint(0, 41, (ranks,), generator=g).tolist()
        kind = ("random", "random", "random", "one", "none", "random", "random", "one")[turn]
        dtype = torch.bfloat16 if turn % 3 == 1 else torch.float32
        given = problem(shape, tokens, turn, kind=kind, dtype=dtype)
        round_trip(group, given, fixed=turn % 2 == 0, slots=turn % 4 < 2, dtype=dtype)
    given = problem(shape, [0] * ranks, 9)
    round_trip(group, given, fixed=True, slots=True)
    round_trip(group, given, fixed=False, slots=False)


def test_long_prefill(problem):
    shape = Shape(4, 2048, 4096, 6, 12, "fp8", "bfloat16")
    round_trip(Together(virtual(shape, fixed=False)), problem(shape, [2048, 1000, 0, 33], 1), fixed=False, slots=True)


def test_same_bits_again_and_two_of_a_kind(problem):
    shape = Shape(8, 16, 512, 6, 4, "fp8")
    group = Together(virtual(shape))
    given = problem(shape, [16, 0, 3, 16, 9, 1, 16, 5], 3)
    first = None
    for turn in range(300):
        d = group.dispatch(*given.on_device, fixed=True)
        if turn % 3 == 0:
            d = group.dispatch(*given.on_device, fixed=turn % 2 == 0)
        if turn % 5 == 0:
            group.barrier()
        ys = [(r.x.float().unsqueeze(1) * r.weights.unsqueeze(-1)).contiguous() for r in d]
        outs = group.combine(ys, d)
        if turn % 4 == 0:
            outs = group.combine(ys, d)
        whole = torch.cat(outs)
        first = whole if first is None else first
        assert torch.equal(whole, first)
    group.check()


def _load_kernels(shape):
    """PyTorch's kernels that a rank uses. One that is loaded at its first use waits for all kernels that run, and those
    wait for the rank."""
    torch.cuda._sleep(1)
    for x in (torch.ones(2, 1, shape.hidden, device="cuda"), torch.ones(2, 1, shape.hidden, device="cuda").bfloat16()):
        weights, ids = torch.ones(2, 2, device="cuda"), torch.zeros(2, 2, dtype=torch.int32, device="cuda")
        y = x[:, 0] * weights.where(ids >= 0, 0).sum(1, keepdim=True)
        assert bool(y.isfinite().all())
    torch.zeros(4, dtype=torch.int32, device="cuda").cumsum(0).cpu()
    torch.cuda.synchronize()


def test_threads_and_streams(problem):
    """Each rank by a thread of its own, with delays."""
    shape = Shape(4, 8, 256, 2, 2)
    comms = virtual(shape, ctas=4, timeout=20)
    problems = [problem(shape, [8, 0, 5, t % 9], t) for t in range(6)]
    for p in problems:
        p.wanted = p.expected(False)
    _load_kernels(shape)
    errors: list[BaseException] = []

    def run(rank):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn, p in enumerate(problems):
                    if (turn + rank) % 3 == 0:
                        torch.cuda._sleep(2_000_000)
                    d = comms[rank].dispatch(*(t[rank] for t in p.on_device))
                    out = comms[rank].combine(d.x * d.weights.where(d.ids >= 0, 0).sum(1, keepdim=True), d)
                    comms[rank].check()
                    p.check_rows(rank, d, p.wanted[rank])
                    assert out.shape == (p.tokens[rank], shape.hidden) and bool(out.isfinite().all())
                    row = torch.tensor([rank, turn])
                    assert comms[rank].all_gather(row).tolist() == [[r, turn] for r in range(4)]
        except BaseException as error:  # shown by the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors, errors


def test_graph_replays_equal_eager(problem):
    shape = Shape(4, 8, 512, 3, 3, "fp8", "bfloat16")
    group = Together(virtual(shape))
    given = problem(shape, [8, 8, 8, 8], 1)
    xs, ids, weights = given.on_device

    def step():
        d = group.dispatch(xs, ids, weights, fixed=True)
        ys = [(r.x.float() * r.scales.repeat_interleave(128, 1)).unsqueeze(1).expand(-1, 3, -1).contiguous() for r in d]
        return torch.cat(group.combine(ys, d))

    eager = step().clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, eager)
    other = problem(shape, [8, 8, 8, 8], 2)
    for into, new in zip((xs, ids, weights), other.on_device, strict=True):
        for a, b in zip(into, new, strict=True):
            a.copy_(b)
    graph.replay()
    group.check()
    assert torch.equal(out, step())
    with pytest.raises(ValueError, match="fixed"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        group.dispatch(xs, ids, weights, fixed=False)


def test_a_rank_that_does_not_come_is_named(problem):
    shape = Shape(3, 4, 128, 2, 2)
    comms = virtual(shape, ctas=2, timeout=0.2)
    given = problem(shape, [4, 4, 4], 1)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for rank in range(2):
        with torch.cuda.stream(streams[rank]):
            comms[rank].dispatch(*(t[rank] for t in given.on_device), fixed=True)
    torch.cuda.synchronize()
    raised = []
    for rank in range(2):
        with pytest.raises((PeerTimeout, Broken)) as caught:
            comms[rank].barrier()
        raised.append(caught.value)
        with pytest.raises(Broken):
            comms[rank].barrier()
    late = [e for e in raised if isinstance(e, PeerTimeout)]
    assert late and all(e.waiting_for == (2,) and e.kind == "dispatch" and e.epoch == 1 for e in late)


def test_mismatch_and_abort(problem):
    shape = Shape(2, 4, 128, 2, 2)
    comms = virtual(shape, ctas=2, timeout=5)
    given = problem(shape, [4, 4], 1)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        comms[0].dispatch(*(t[0] for t in given.on_device), fixed=True)
    with torch.cuda.stream(streams[1]):
        comms[1].barrier()
    torch.cuda.synchronize()
    kinds = set()
    for comm in comms:
        with pytest.raises((Mismatch, Broken)) as caught:
            comm.check()
        kinds.add(type(caught.value))
    assert Mismatch in kinds
    comms = virtual(shape, ctas=2, timeout=30)
    with torch.cuda.stream(streams[0]):
        comms[0].barrier()
    comms[1].abort("a test")
    with pytest.raises(Broken, match="rank 1"):
        torch.cuda.synchronize()
        comms[0].check()


def test_bad_input_leaves_the_group_usable(problem):
    shape = Shape(2, 4, 128, 2, 2)
    group = Together(virtual(shape, packed=False))
    given = problem(shape, [4, 3], 1)
    xs, ids, weights = given.on_device
    with pytest.raises(ValueError, match="x"):
        group.dispatch([x.half() for x in xs], ids, weights, fixed=True)
    with pytest.raises(ValueError, match="ids"):
        group.dispatch(xs, [i.cpu() for i in ids], weights, fixed=True)
    with pytest.raises(ValueError, match="fixed"):
        group.dispatch(xs, ids, weights, fixed=False)
    with pytest.raises(ValueError, match="hidden"):
        virtual(Shape(2, 4, 24, 2, 2))
    with pytest.raises(ValueError, match="ctas"):
        virtual(shape, ctas=100)
    round_trip(group, given, fixed=True, slots=True)


def test_moves():
    comms = virtual(Shape(3, 4, 128, 2, 2), timeout=0.5)
    g = torch.Generator("cuda").manual_seed(1)
    a, b = (torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda", generator=g) for _ in range(2))
    to_a, to_b = torch.zeros_like(a), torch.zeros_like(b)
    first = comms[0].move([Transfer(7, 0, 1, a), Transfer(8, 2, 0, to_b)])
    assert not first.done()
    second = comms[1].move([Transfer(7, 0, 1, to_a)])
    third = comms[2].move([Transfer(8, 2, 0, b)])
    for moving in (first, second, third):
        moving.wait()
    assert torch.equal(a, to_a) and torch.equal(b, to_b)
    with pytest.raises(PeerTimeout) as caught:
        comms[0].move([Transfer(9, 0, 1, a)]).wait(0.05)
    assert caught.value.waiting_for == (1,)
    again = comms[0].move([Transfer(9, 0, 1, a)])
    comms[1].move([Transfer(9, 0, 1, to_a)]).wait()
    again.wait()
